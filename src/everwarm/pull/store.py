"""Where pulled models live, and how one gets there whole.

    models/NAME/FILE.gguf, model.json   a model: its file or files, and where they came from
    models/.pulling/NAME.XXXX/          a pull under way, or what a dead one has left
    models/.locks/NAME                  held while that name is pulled

Invariant: a directory models/NAME appears by one rename, after everything in it was written, checked and synced.
Names are escaped, so that none of them leads out of the directory.
"""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote

from everwarm.errors import PullError

Progress = Callable[[str, int, int | None], None]
"""Stage, bytes done, bytes in all if known."""

CHUNK = 1 << 20
SPARE_BYTES = 64 << 20
"""Disk space that must stay free."""


@dataclass(frozen=True, slots=True)
class File:
    """One file of a model. Hubs do not always tell a hash before the download; afterwards there is one."""

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class PulledModel:
    """A model on disk, and where it came from."""

    name: str
    path: Path
    files: tuple[File, ...]
    source: str
    licence: str
    pulled_at: str

    @property
    def size_bytes(self) -> int:
        """Of all files together."""
        return sum(file.size_bytes for file in self.files)


def component(name: str) -> str:
    """A name as one path component: different for different names, and never hidden or special."""
    escaped = quote(name, safe="").replace(".", "%2E", 1) if name.startswith(".") else quote(name, safe="")
    if len(escaped) > 200:  # file systems stop at 255 bytes
        escaped = f"{escaped[:150]}~{hashlib.sha256(name.encode()).hexdigest()[:32]}"
    return escaped


def pulled(home: Path) -> list[PulledModel]:
    """All models that are there, by name. What is damaged is not among them: a pull repairs it."""
    folders = sorted((home / "models").glob("*/model.json"))
    return sorted(filter(None, map(_read, folders)), key=lambda model: model.name)


def present(home: Path, name: str, report: Progress, check: bool, sha256: str | None = None) -> Path | None:
    """The model of that name, if it is there with the right sizes, and for `check` the right hashes; reports it."""
    model = _read(home / "models" / component(name) / "model.json")
    if model is None or (sha256 is not None and model.files[0].sha256 != sha256):
        return None
    if check and not _verify(model, report):
        return None
    report("present", model.size_bytes, model.size_bytes)
    return model.path


def _read(record: Path) -> PulledModel | None:
    try:
        fields = json.loads(record.read_text("utf-8"))
        files = tuple(File(**file) for file in fields.pop("files"))
        model = PulledModel(path=record.parent / files[0].name, files=files, **fields)
        if component(model.name) != record.parent.name:
            return None
        sizes = [(record.parent / file.name).stat().st_size for file in files]
    except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError):
        return None
    return model if sizes == [file.size_bytes for file in files] else None


def _verify(model: PulledModel, report: Progress) -> bool:
    """Read all files of a model and compare their hashes."""
    done = 0
    for file in model.files:
        if digest(model.path.parent / file.name, report, done, model.size_bytes) != file.sha256:
            return False
        done += file.size_bytes
    return True


def digest(path: Path, report: Progress, before: int = 0, total: int | None = None) -> str:
    """SHA-256 of a file."""
    seen = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            seen.update(chunk)
            before += len(chunk)
            report("check", before, total)
    return seen.hexdigest()


@contextmanager
def locked(home: Path, name: str, report: Progress) -> Iterator[None]:
    """Be the only one who pulls `name`, and remove what dead pulls have left, of any name."""
    locks = home / "models" / ".locks"
    locks.mkdir(parents=True, exist_ok=True)
    with (locks / component(name)).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("wait", 0, None)
            fcntl.flock(lock, fcntl.LOCK_EX)
        _sweep(home, component(name))
        yield


def _sweep(home: Path, held: str) -> None:
    for folder in (home / "models" / ".pulling").glob("*"):
        owner = folder.name.rpartition(".")[0]
        with (home / "models" / ".locks" / owner).open("w") as lock:
            try:
                if owner != held:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue  # alive
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def staging(home: Path, name: str) -> Iterator[Path]:
    """A directory for a pull under way. It is gone afterwards, whatever happens."""
    parent = home / "models" / ".pulling"
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=component(name) + ".", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def install(home: Path, folder: Path, name: str, files: tuple[File, ...], source: str, licence: str) -> Path:
    """Make the staged `folder`, whose files have been synced, the model `name`; the path of its first file."""
    record = {
        "name": name,
        "files": [asdict(file) for file in files],
        "source": source,
        "licence": licence,
        "pulled_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    with (folder / "model.json").open("w", encoding="utf-8") as out:
        json.dump(record, out, indent=2)
        sync(out.fileno())
    _sync_folder(folder)
    target = home / "models" / component(name)
    if target.exists():  # damaged, or it would not be replaced
        target.rename(folder.parent / "replaced")
    folder.rename(target)
    _sync_folder(target.parent)
    return target / files[0].name


def sync(descriptor: int) -> None:
    """Bring a file to disk, where the file system knows how."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


def check_space(home: Path, name: str, needed: int) -> None:
    """Refuse to start what can't end well."""
    home.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(home).free
    if free < needed + SPARE_BYTES:
        raise PullError(
            f"{name}: needs {needed + SPARE_BYTES:,} bytes of disk under {home}, {free:,} are free; "
            "free some, or set EVERWARM_HOME to another disk"
        )
