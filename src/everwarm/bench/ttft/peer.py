"""llama.cpp beside us: its own restore of a saved state, and the same number of new tokens behind it.

This file is two things. `Peer` starts it as a program of another environment, the one that `make peers` makes, which
has llama-cpp-python and not everwarm: so nothing of everwarm is imported here. The program computes the context once
with flash attention and once without, saves both states to files, then restores each whenever it is told a line.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

PYTHON = ".venv-peers/bin/python"


class PeerError(Exception):
    """The peer can't be run."""


class Peer:
    """The program, running, with both states saved."""

    def __init__(self, model: Path, context: int, suffix: int, threads: int, directory: Path, drop: bool) -> None:
        python = find_python()
        setup = {"model": str(model), "context": context, "suffix": suffix, "threads": threads, "drop": drop}
        arguments = [python, __file__, json.dumps(setup | {"directory": str(directory)})]
        self._process = subprocess.Popen(  # noqa: S603
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self._read()

    def measure(self) -> list[dict[str, Any]]:
        """One restore with flash attention, one without."""
        assert self._process.stdin is not None
        self._process.stdin.write("again\n")
        self._process.stdin.flush()
        found: list[dict[str, Any]] = self._read()
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        with self._process:  # closes its pipes and waits: it ends when nobody will ask any more
            pass

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.__exit__()
            raise PeerError(f"it ended with code {self._process.returncode}")
        return json.loads(line)


def find_python() -> str:
    """EVERWARM_PEER_PYTHON, or what `make peers` has made."""
    found = os.environ.get("EVERWARM_PEER_PYTHON") or PYTHON
    if not Path(found).exists():
        raise PeerError(
            "no Python with llama-cpp-python: run `make peers`, or set EVERWARM_PEER_PYTHON to the path of one"
        )
    return found


def _serve(setup: dict[str, Any]) -> None:
    import ctypes

    import llama_cpp  # type: ignore[import-not-found]

    def say(value: Any) -> None:
        print(json.dumps(value), flush=True)

    context, suffix = setup["context"], setup["suffix"]
    length = -(-(context + suffix + 8) // 256) * 256
    states = []
    for flash in (False, True):
        llama = llama_cpp.Llama(
            setup["model"], n_ctx=length, n_batch=512, n_threads=setup["threads"], n_threads_batch=setup["threads"],
            flash_attn=flash, verbose=False,
        )  # fmt: skip
        ids = [(i * 7919 + 13) % min(llama.n_vocab(), 20000) for i in range(context + suffix)]
        llama.eval(ids[:context])
        path = str(Path(setup["directory"]) / f"llama-{flash}.state").encode()
        handle, tokens = llama._ctx.ctx, (llama_cpp.llama_token * context)(*ids[:context])
        size = llama_cpp.llama_state_seq_save_file(handle, path, 0, tokens, context)
        memory = (ctypes.c_uint8 * llama_cpp.llama_state_seq_get_size(handle, 0))()
        llama_cpp.llama_state_seq_get_data(handle, memory, len(memory), 0)
        states.append((flash, llama, ids, path, memory, size))
    say("ready")
    for _ in sys.stdin:
        found = []
        for flash, llama, ids, path, memory, size in states:
            handle, tokens, count = llama._ctx.ctx, (llama_cpp.llama_token * context)(), ctypes.c_size_t()

            def empty(llama: Any = llama) -> None:
                llama._ctx.kv_cache_clear()

            empty()
            started = time.perf_counter()
            done = llama_cpp.llama_state_seq_set_data(handle, memory, len(memory), 0)
            copied = time.perf_counter() - started
            assert done, "the state was refused"
            empty()
            if setup["drop"]:
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            started = time.perf_counter()
            done = llama_cpp.llama_state_seq_load_file(handle, path, 0, tokens, context, ctypes.byref(count))
            restored = time.perf_counter()
            assert done, "the state was refused"
            assert count.value == context, "the state was refused"
            llama.n_tokens = context
            llama.eval(ids[context:])
            llama_cpp.llama_get_logits_ith(handle, -1)[0]
            computed = time.perf_counter()
            spent = {"restore_s": restored - started, "copy_s": copied, "suffix_s": computed - restored}
            found.append({"flash": flash, "bytes": int(size)} | spent)
        say(found)


if __name__ == "__main__":
    _serve(json.loads(sys.argv[1]))
