"""The command line. Results go to stdout, talk to stderr; what the caller got wrong is one line and exit code 2."""

import os
import sys


def main() -> None:
    """Entry point of the `everwarm` command."""
    from everwarm.cli.app import run

    try:
        code = run(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output has gone: nobody is left to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.exit(code)
