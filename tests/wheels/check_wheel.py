"""A wheel installs and answers in a fresh virtual environment that has no compiler.

    python tests/wheels/check_wheel.py dist/everwarm-*.whl [--model PATH] [--python PATH]

CC and CXX name a program that does not exist, PATH holds nothing but the environment's own programs, and pip may not
build anything. The last line is JSON: size and seconds.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
NO_COMPILER = "/there/is/no/compiler"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=lambda path: Path(path).resolve())
    parser.add_argument(
        "--model", type=lambda path: Path(path).resolve(), help="what answers; by default, a tiny random model"
    )
    parser.add_argument("--python", default=sys.executable, help="whose virtual environment it is")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        model = given.model
        if model is None:
            model = place / "tiny.gguf"
            subprocess.run([sys.executable, HERE.parent / "tiny.py", model], check=True)
        subprocess.run([given.python, "-m", "venv", place / "venv"], check=True)
        programs = place / "venv" / "bin"
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("EVERWARM_", "PYTHON"))
        }
        environment |= {"PATH": str(programs), "CC": NO_COMPILER, "CXX": NO_COMPILER}

        start = time.monotonic()
        install = [programs / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, "--only-binary", ":all:", given.wheel], env=environment, check=True, cwd=folder)
        install_s = time.monotonic() - start

        answer = [programs / "python", HERE / "answer.py", model]
        lines = subprocess.run(
            answer, env=environment, check=True, cwd=folder, stdout=subprocess.PIPE, text=True
        ).stdout
    text, figures = lines.splitlines()
    print(f"{given.wheel.name} answers: {text}")
    print(
        json.dumps({"size_bytes": given.wheel.stat().st_size, "install_s": round(install_s, 1)} | json.loads(figures))
    )


if __name__ == "__main__":
    main()
