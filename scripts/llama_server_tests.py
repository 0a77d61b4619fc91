"""Run the tests of llama.cpp's server against `everwarm serve`.

    python scripts/llama_server_tests.py LLAMA_CPP [--model NAME] [PYTEST ARGUMENTS]

`LLAMA_CPP` is a checkout of llama.cpp (the source package of PyPI's llama-cpp-python has it in `vendor/llama.cpp`). The
Python that runs this script needs what its `tools/server/tests/requirements.txt` names. Nothing there is changed: its
tests start the program that `LLAMA_SERVER_BIN_PATH` names, and that is a script which calls this file again
(`--as-server`) to start ours with the flags that mean the same. What differs between the two servers is told in
docs/llama-server.md.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

APPLICABLE = (
    "basic", "chat_completion", "compat_anthropic", "compat_oai_responses", "completion", "ctx_shift", "ignore_eos",
    "metrics", "security", "template", "tokenize", "tool_call",
)  # fmt: skip
"""Files of tests that are about something that everwarm has, too."""

EVERWARM = Path(__file__).resolve().parent.parent / ".venv" / "bin" / "everwarm"

SAME = ("--host", "--port", "--temp", "--seed", "--n-predict", "--api-key", "--chat-template-file", "--threads")
"""Flags with the same name and meaning."""

PLUGIN = """
import atexit, subprocess, types, utils

utils.ServerPreset.load_all = staticmethod(lambda: None)  # it would start a server for each of their models


class Kept:
    'A server that the next test with the same flags takes over: to start one takes longer than most tests.'

    last = None

    def __init__(self, command, **options):
        old, Kept.last = Kept.last, self
        if old is not None and old.command == command and old.process.poll() is None:
            self.process = old.process
        else:
            if old is not None:
                old.process.kill()
                old.process.wait()
            self.process = subprocess.Popen(command, **options)
        self.command, self.pid, self.returncode = command, self.process.pid, None
        self.poll = self.process.poll

    def terminate(self):
        pass

    def wait(self, timeout=None):
        return 0


atexit.register(lambda: Kept.last and Kept.last.process.kill())
utils.subprocess = types.SimpleNamespace(Popen=Kept, TimeoutExpired=subprocess.TimeoutExpired)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("llama_cpp", type=Path)
    parser.add_argument("--model", default="smollm2")
    options, rest = parser.parse_known_args()
    tests = (options.llama_cpp / "tools" / "server" / "tests").resolve()
    with tempfile.TemporaryDirectory() as folder:
        server = Path(folder) / "server"
        server.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__).resolve()}" --as-server "$@"\n')
        server.chmod(0o755)
        (Path(folder) / "one_server.py").write_text(PLUGIN)
        environment = os.environ | {
            "LLAMA_SERVER_BIN_PATH": str(server),
            "EVERWARM_TEST_MODEL": options.model,
            "PORT": os.environ.get("PORT", "18080"),
            "PYTHONPATH": os.pathsep.join([folder, str(tests)]),
        }
        files = [] if any(one.startswith("unit/") for one in rest) else [f"unit/test_{name}.py" for name in APPLICABLE]
        command = [sys.executable, "-m", "pytest", "-p", "one_server", "-m", "not slow", "-q", "-rA", "--tb=short"]
        return subprocess.run([*command, *files, *rest], cwd=tests, env=environment, check=False).returncode


def serve(arguments: list[str]) -> None:
    """Become `everwarm serve` with llama-server's flags."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for flag in SAME:
        parser.add_argument(flag)
    parser.add_argument("--alias", default="")
    parser.add_argument("--ctx-size", type=int, default=0)
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--kv-unified", action="store_true")
    given, _ = parser.parse_known_args(arguments)
    command = [str(EVERWARM), "serve", os.environ["EVERWARM_TEST_MODEL"]]
    for flag in SAME:
        value = getattr(given, flag.removeprefix("--").replace("-", "_"))
        if value is not None and value != "-1":
            command += [flag, value]
    for alias in given.alias.split(","):
        command += ["--alias", alias] if alias else []
    if given.ctx_size:  # llama-server divides it between its slots, unless they share it
        command += ["--context", str(given.ctx_size // (1 if given.kv_unified else given.parallel))]
    os.environ["EVERWARM_HOME"] = os.environ.get("EVERWARM_HOME", str(Path.home() / ".everwarm"))
    os.environ["EVERWARM_WARM"] = "off"
    os.execv(command[0], command)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-server"]:
        serve(sys.argv[2:])
    else:
        sys.exit(main())
