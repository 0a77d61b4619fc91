"""How agent programs are started so that they talk to this server: command and variables of each."""

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field

NO_KEY = "everwarm"
"""What is sent to a server without keys: the programs insist on one."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How one program is started."""

    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)


def claude(url: str, model: str, key: str) -> Launch:
    models = ("ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL",
              "ANTHROPIC_DEFAULT_SONNET_MODEL", "ANTHROPIC_DEFAULT_OPUS_MODEL")  # fmt: skip
    return Launch(
        ["claude"],
        {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": key, **dict.fromkeys(models, model)}
        # It would ask its maker for updates and send statistics, and give up on a slow first token.
        | {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "API_TIMEOUT_MS": "3600000"},
    )


def codex(url: str, model: str, key: str) -> Launch:
    provider = {
        "name": "everwarm", "base_url": f"{url}/v1", "wire_api": "responses", "env_key": "EVERWARM_KEY",
        "stream_idle_timeout_ms": 3600000,
    }  # fmt: skip
    settings: dict[str, object] = {"model": model, "model_provider": "everwarm"}
    settings |= {f"model_providers.everwarm.{name}": value for name, value in provider.items()}
    flags = [part for name, value in settings.items() for part in ("-c", f"{name}={json.dumps(value)}")]
    return Launch(["codex", *flags], {"EVERWARM_KEY": key})


def opencode(url: str, model: str, key: str) -> Launch:
    options = {"baseURL": f"{url}/v1", "apiKey": key}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "everwarm", "options": options, "models": {model: {}}}
    config = {"provider": {"everwarm": provider}, "model": f"everwarm/{model}", "small_model": f"everwarm/{model}"}
    return Launch(["opencode"], {"OPENCODE_CONFIG_CONTENT": json.dumps(config)})


def qwen(url: str, model: str, key: str) -> Launch:
    return Launch(["qwen"], {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": key, "OPENAI_MODEL": model})


def aider(url: str, model: str, key: str) -> Launch:
    return Launch(["aider", "--model", f"openai/{model}"], {"OPENAI_API_BASE": f"{url}/v1", "OPENAI_API_KEY": key})


PROGRAMS: dict[str, Callable[[str, str, str], Launch]] = {
    "claude": claude, "codex": codex, "opencode": opencode, "qwen": qwen, "aider": aider,
}  # fmt: skip


def command_line(found: Launch, arguments: list[str] | None = None) -> str:
    """As it is typed into a shell."""
    variables = [f"{name}={shlex.quote(value)}" for name, value in found.environment.items()]
    return " \\\n  ".join([*variables, shlex.join([*found.command, *(arguments or ())])])
