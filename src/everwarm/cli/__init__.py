"""The command line. Results go to stdout, talk to stderr; what the caller got wrong is one line and exit code 2."""

import os
import sys
from contextlib import suppress


def main() -> None:
    """Entry point of the `everwarm` command."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    if sys.stdout is None:  # closed by whoever started us
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    from everwarm.cli.app import run

    try:
        code = run(sys.argv[1:])
        sys.stdout.flush()
    except OSError as error:
        if not isinstance(error, BrokenPipeError):  # the reader of our output has gone: nobody is left to tell
            print(f"everwarm: can't write the output: {error.strerror or error}", file=sys.stderr)
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.exit(code)
