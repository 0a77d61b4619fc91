"""What went wrong with the server's own files, told without saying where they are.

Errors of the store and of the system name files, and a lock names the command that holds it: the log says so, a client
is not told. It goes by how a text looks, never by what is there, so it can't be used to guess.
"""

import re
import tempfile
from pathlib import Path

from everwarm import config

HIDDEN = "(a file of the server)"

_QUOTED = re.compile(r"""(['"])/.*?\1""")
_PREFIX = re.compile(r"\A/[^:]*(?=: )")  # `/path: what is wrong with it`
_PATH = re.compile(r"(?<![\w/.:])/(?:[^\s/'\":;,()]+/)+[^\s'\":;,()]*")
_HOLDER = re.compile(r"process \d+ \(.*?\) (?=is writing)", re.DOTALL)


def without_paths(text: str) -> str:
    """The text with each path replaced."""
    if "/" not in text and "process " not in text:
        return text
    for folder in {str(config.home()), tempfile.gettempdir(), str(Path.home())} - {"/", "."}:
        text = re.sub(re.escape(folder) + r"[^\s'\":;,()]*", HIDDEN, text)  # may have spaces in it
    text = _HOLDER.sub("another process ", text)
    for pattern in (_QUOTED, _PREFIX, _PATH):
        text = pattern.sub(HIDDEN, text)
    return text
