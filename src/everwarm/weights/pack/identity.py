"""The weights id: a digest of what a model's tensors are, whatever its file is called.

In: an open GGUF file. Out: a hexadecimal digest over the name, type, shape and bytes of every tensor. Reading it all
takes a while, so the answer is remembered by device, inode, size, mtime and ctime of the files, in `weights-ids.json`
in the home directory. In the same way `packs-as-written.json` remembers packs that are as they were written.

What is asked is the file that was opened, never what its path has become since: a model that was replaced by another
one keeps its id, and the other one does not get it.
"""

import json
import os
import secrets
from pathlib import Path

from everwarm.opening import create_new, read_whole
from everwarm.weights.gguf.file import GGUFFile
from everwarm.weights.pack.file import Pack

REMEMBERED, PACKS = "weights-ids.json", "packs-as-written.json"
_HEADER = " header "
_MOST = 1000  # entries; the oldest are forgotten
_MOST_BYTES = 64 << 20  # of such a file; a model of 100 parts takes 10,000 bytes


def weights_id(file: GGUFFile, home: Path) -> str:
    """The id of the model's weights, from memory if its files are as they were."""
    if file.known_digest is None:
        key = "|".join(file.fingerprints())
        known = _read(home / REMEMBERED)
        if key not in known:
            known[key] = digest(file)
            _write(home / REMEMBERED, known)
        file.known_digest = known[key]
    return file.known_digest


def remember_pack(pack: Pack, seen: str) -> None:
    """This pack is as it was written. `seen`: its fingerprint before it was looked at."""
    if pack.fingerprint() != seen:
        return
    known, now = _read(_packs(pack.path)), {pack.path.name: f"{seen}{_HEADER}{pack.header_digest}"}
    if known | now != known:
        _write(_packs(pack.path), known | now)


def pack_was_touched(pack: Pack) -> bool:
    """Whether something has happened to a pack since then; False if nothing is remembered of it."""
    known = _read(_packs(pack.path)).get(pack.path.name)
    return known is not None and known.partition(_HEADER)[0] != pack.fingerprint()


def pack_is_another(pack: Pack) -> bool:
    """Whether a pack says something else than the one that was written here: other checksums, so other bytes. False if
    nothing is remembered of it.
    """
    _, known, header = _read(_packs(pack.path)).get(pack.path.name, "").partition(_HEADER)
    return bool(known) and header != pack.header_digest


def digest(file: GGUFFile) -> str:
    """Read every tensor and hash it."""
    return file.digest()


def _packs(pack: Path) -> Path:
    return pack.parent.parent / PACKS


def _read(path: Path) -> dict[str, str]:
    try:
        known = json.loads(read_whole(path, _MOST_BYTES))
    except (OSError, ValueError, RecursionError):  # not there, or damaged: it is only a memory
        return {}
    if not isinstance(known, dict) or not all(isinstance(value, str) for value in known.values()):
        return {}
    return known


def _write(path: Path, known: dict[str, str]) -> None:
    entries = list(known.items())[-_MOST:]
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(create_new(temporary), "w", encoding="utf-8") as file:
            file.write(json.dumps(dict(entries), indent=1))
        temporary.replace(path)
    except OSError:  # it will be computed again
        temporary.unlink(missing_ok=True)
