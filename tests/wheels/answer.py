"""`everwarm` as it is installed answers on every instruction set of this machine, each with the same tokens.

    python tests/wheels/answer.py MODEL

It needs no package but everwarm and no file of the repository but itself: it runs where a wheel was installed.
The last line is JSON: the seconds that the first answer took, from the start of the process to its end, and the
instruction sets that answered.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REFUSED = 2  # exit code of a setting that this machine can't have


def everwarm(*arguments: str, home: str) -> dict[str, Any] | None:
    """What a command says; None if it refuses."""
    command = [sys.executable, "-m", "everwarm", *arguments, "--json"]
    run = subprocess.run(command, env=os.environ | {"EVERWARM_HOME": home}, stdout=subprocess.PIPE)
    if run.returncode == REFUSED:
        return None
    run.check_returncode()
    return json.loads(run.stdout)


def main(model: Path) -> None:
    with tempfile.TemporaryDirectory() as home:
        generate = (
            "generate",
            str(model),
            "--prompt",
            "Why is the sky blue?",
            "--max-tokens",
            "16",
            "--temperature",
            "0",
        )
        start = time.monotonic()
        first = everwarm(*generate, home=home)
        first_answer_s = time.monotonic() - start
        assert first is not None
        assert first["tokens"], "no token was generated"
        answers = {isa: everwarm(*generate, "--isa", isa, home=home) for isa in ("avx512", "avx2", "portable")}
        doctor = everwarm("doctor", home=home)
    answered = [isa for isa, answer in answers.items() if answer is not None]
    for isa in answered:
        tokens = answers[isa]["tokens"]
        assert tokens == first["tokens"], f"{isa} answers otherwise: {tokens} instead of {first['tokens']}"
    assert "portable" in answered
    assert doctor is not None
    assert doctor["kernels"]["backend"] == "native", f"no native kernels: {doctor['kernels']}"
    can = doctor["machine"]["instructions"].split()
    assert ("avx2" in answered) == ({"avx2", "fma"} <= set(can)), f"answered: {answered}, the processor has {can}"
    print(repr(first["text"]))
    print(json.dumps({"first_answer_s": round(first_answer_s, 2), "instruction_sets": answered}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
