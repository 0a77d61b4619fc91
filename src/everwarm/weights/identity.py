"""The weights id: a digest of what a model's tensors are, whatever its file is called.

In: an open GGUF file. Out: a hexadecimal digest over the name, type, shape and bytes of every tensor. Reading it all
takes a while, so the answer is remembered by device, inode, size, mtime and ctime of the files, in `weights-ids.json`
in the home directory. In the same way `packs-as-written.json` remembers packs that are as they were written.
"""

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path

from everwarm.weights.gguf import GGUFFile

REMEMBERED, PACKS = "weights-ids.json", "packs-as-written.json"
_MOST = 1000  # entries; the oldest are forgotten


def weights_id(file: GGUFFile, home: Path) -> str:
    """The id of the model's weights, from memory if its files are as they were."""
    key = "|".join(fingerprint(path) for path in file.parts)
    known = _read(home / REMEMBERED)
    if key not in known:
        known[key] = digest(file)
        _write(home / REMEMBERED, known)
    return known[key]


def remember_pack(path: Path) -> None:
    """This pack is as it was written."""
    with suppress(OSError):  # just removed
        known, now = _read(_packs(path)), {path.name: fingerprint(path)}
        if known | now != known:
            _write(_packs(path), known | now)


def pack_was_touched(path: Path) -> bool:
    """Whether something has happened to a pack since then; False if nothing is remembered of it."""
    known = _read(_packs(path)).get(path.name)
    try:
        return known is not None and known != fingerprint(path)
    except OSError:  # just removed
        return True


def digest(file: GGUFFile) -> str:
    """Read every tensor and hash it. The order in which a file keeps them does not matter."""
    whole = hashlib.sha256()
    for name in sorted(file.tensors):
        info = file.tensors[name]
        whole.update(f"{name}\0{info.type.name}\0{info.shape}\0".encode())
        whole.update(hashlib.sha256(file.data(name).data).digest())
    return whole.hexdigest()


def fingerprint(path: Path) -> str:
    """What changes when a file does."""
    stat = path.stat()
    return f"{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ctime_ns}"


def _packs(pack: Path) -> Path:
    return pack.parent.parent / PACKS


def _read(path: Path) -> dict[str, str]:
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # not there, or damaged: it is only a memory
        return {}
    if not isinstance(known, dict) or not all(isinstance(value, str) for value in known.values()):
        return {}
    return known


def _write(path: Path, known: dict[str, str]) -> None:
    entries = list(known.items())[-_MOST:]
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(dict(entries), indent=1), encoding="utf-8")
        temporary.replace(path)
    except OSError:  # it will be computed again
        temporary.unlink(missing_ok=True)
