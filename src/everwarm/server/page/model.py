"""What the page shows of the model: what `inspect` says, what lies in memory and on disk, settings, how to connect."""

import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from everwarm import config, kernels
from everwarm.inspection import model_use, summarise
from everwarm.server.page.sample import process_bytes
from everwarm.server.programs import NO_KEY, PROGRAMS, command_line
from everwarm.server.redact import without_paths
from everwarm.server.serving import Serving
from everwarm.setting_kinds import settings_of
from everwarm.settings import ServeSettings
from everwarm.weights.gguf.file import GGUFFile
from everwarm.weights.memory import available_bytes

KEY = "YOUR_KEY"
"""Stands where the reader's key belongs."""

Sources = Mapping[str, str]


def described(serving: Serving, url: str) -> dict[str, Any]:
    """What everyone who may use the model may know of it. `url`: where the page was opened. On a thread."""
    llm = serving.llm
    with GGUFFile(llm.path) as file:
        inspected = summarise(llm.path, file) | {"path": llm.path.name, "use": model_use(file, None)}
    return {
        "name": serving.name,
        "names": list(serving.names),
        "version": version("everwarm"),
        "context": serving.context,
        "layers": len(llm.config.layers),
        "kv_type": llm.backend.kv_type,
        "exact": llm.backend.exact,
        "sampling": {name: value for name, value in serving.sampling.items() if value is not None},
        "inspect": inspected,
        "connect": connect(url, serving.name, NO_KEY if serving.keys.is_open else KEY),
    }


def connect(url: str, model: str, key: str) -> list[dict[str, str]]:
    """Commands that start agent programs with this server."""
    known = [{"name": name, "command": command_line(launch(url, model, key))} for name, launch in PROGRAMS.items()]
    lines = [
        "from openai import OpenAI",
        "",
        f'client = OpenAI(base_url="{url}/v1", api_key="{key}")',
        "answer = client.chat.completions.create(",
        f'    model="{model}", messages=[{{"role": "user", "content": "Hello"}}],',
        '    extra_headers={"X-Agent-Id": "ada"},',
        ")",
        "print(answer.choices[0].message.content)",
    ]
    auth = "" if key == NO_KEY else f' \\\n  -H "Authorization: Bearer {key}"'
    curl = (
        f'curl {url}/v1/chat/completions{auth} \\\n  -H "Content-Type: application/json" -H "X-Agent-Id: ada" \\\n'
        '  -d \'{"messages": [{"role": "user", "content": "Hello"}]}\''
    )
    return [*known, {"name": "python", "command": "\n".join(lines)}, {"name": "curl", "command": curl}]


def machine(serving: Serving, settings: ServeSettings | None, sources: Sources) -> dict[str, Any]:
    """What lies where, and how the server was set up: for those who have it for themselves. On a thread."""
    llm = serving.llm
    store, weights = llm.agents.stats(), llm.weights
    home = config.home()
    disk = shutil.disk_usage(next(path for path in (home, *home.absolute().parents) if path.exists()))
    choice = kernels.choose(llm.settings.backend, llm.settings.isa)
    return {
        "memory": {
            "total_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "available_bytes": available_bytes(),
            "process_bytes": process_bytes(),
            "weight_bytes": weights.resident_bytes,
            "weight_budget": weights.budget,
            "model_bytes": weights.total_bytes,
            "mapped": weights.mapped,
            "hot_bytes": store.hot_bytes,
            "hot_budget": store.hot_budget,
        },
        "disk": {
            "total_bytes": disk.total,
            "free_bytes": disk.free,
            "warm_bytes": store.warm_bytes,
            "other_bytes": store.other_bytes,
            "warm_quota": store.warm_quota,
            "model_bytes": llm.path.stat().st_size,
            "read_only": without_paths(store.read_only),
        },
        "kernels": asdict(choice) | {"cores": config.cores(), "processor": kernels.detect_cpu().model},
        "settings": [
            {
                "name": setting.flag,
                "value": setting.show(getattr(settings, name)),
                "source": sources.get(name, "default"),
                "help": setting.sentence,
            }
            for name, setting in settings_of(ServeSettings).items()
            if settings is not None
        ],
    }
