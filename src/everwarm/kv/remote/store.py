"""A `BlockStore` whose blobs are objects in a bucket. Many processes write in it at once.

    PREFIX/cluster.json                                the version, and whose cluster it is
    PREFIX/<weights id>-<numerics id>/model.json       and the rest as in a directory
    PREFIX/<...>/blocks/<key>.safetensors              created once, never changed
    PREFIX/<...>/manifests/<digest>.safetensors        replaced by compare-and-swap on the ETag
    PREFIX/quarantine/                                 objects that were not what they should be
    PREFIX/collector.json                              what the collector has marked (`kv.tools.collector`)

A response may get lost after its work was done. A block that is there already is therefore no error, and a manifest
that has changed is compared with what was to be written: it may be ours.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from itertools import count

from everwarm.errors import StoreError
from everwarm.kv import container
from everwarm.kv.container import Part
from everwarm.kv.remote.calls import Calls
from everwarm.kv.remote.objects import ChangedError, ExistsError, Found, Objects, Version
from everwarm.kv.warm.blockstore import BLOCKS, MANIFESTS, QUARANTINE, AwayError, Blob, ConflictError

READ_S = 10.0
"""What one read may take with all its attempts."""
WRITE_S = 20.0
HEADER = 16 << 10
"""What is read of a manifest to see its header."""
GRACE_S = 3600.0
"""An object that was written so recently is never collected."""
COMMITS = 4
CLOCK = "clock"
CLOCK_S = 600.0
"""So long the difference between the storage's clock and ours is believed."""
OWN = frozenset({"cluster.json", "collector.json", CLOCK})
"""Objects of the store itself."""


class NobodysLease:
    """Everybody may write."""

    def release(self) -> None:
        """Nothing is held."""


class _Header:
    """What the beginning of a stored manifest tells."""

    def __init__(self, generation: int | None, checksum: str, version: Version) -> None:
        self.generation, self.checksum, self.version = generation, checksum, version


class ObjectStore:
    """Blobs as objects."""

    many_writers = True

    def __init__(self, objects: Objects, url: str, secret: bytes, calls: Calls | None = None) -> None:
        self.objects = objects
        self.url = url.rstrip("/")
        self.secret: bytes | None = secret
        self.calls = calls or Calls()
        self._lock = threading.Lock()
        self._ahead: tuple[float, float] | None = None  # when we looked at the storage's clock; its lead over ours
        self._versions: dict[Blob, tuple[int, Version]] = {}  # of manifests, as we last saw them, with generations
        self._unsure: dict[Blob, set[str]] = {}  # checksums of manifests that we wrote without hearing of it

    @property
    def identity(self) -> str:
        return f"{self.url} {id(self)}"

    def lock(self) -> NobodysLease:
        return NobodysLease()

    def prepare(self, model: str) -> None:
        """Nothing has to be made, and nothing is half-written."""

    def close(self) -> None:
        """Nothing is held."""

    # Reading ----------------------------------------------------------------------------------------------------------

    def models(self) -> list[str]:
        try:
            found = self.calls.run(self.objects.folders, READ_S)
        except OSError as error:
            raise StoreError(f"{self.url}: can't be read: {error.strerror or error}") from None
        return [folder for folder in found if folder != QUARANTINE]

    def list(self, model: str, area: str) -> Iterator[tuple[Blob, int]]:
        yield from ((blob, found.size) for blob, found in self.found(model, area))

    def found(self, model: str, area: str) -> Iterator[tuple[Blob, Found]]:
        """The same with what the storage knows of them. Raises OSError."""
        prefix = "/".join(part for part in (model, area) if part)
        for one in self._listed(prefix + "/" if prefix else ""):
            name = one.name[len(prefix) + 1 :] if prefix else one.name
            if name and "/" not in name:
                yield Blob(model, area, name), one

    def changed(self, model: str) -> Iterator[Blob]:
        """Manifests that are not as we last saw them. Raises OSError."""
        for blob, found in self.found(model, MANIFESTS):
            with self._lock:
                known = self._versions.get(blob)
            if blob.is_data and (known is None or known[1].e_tag != found.version.e_tag):
                yield blob

    def read(self, blob: Blob) -> bytes:
        return self.read_version(blob)[0]

    def read_version(self, blob: Blob) -> tuple[bytes, Version]:
        data, found = self.calls.run(lambda: self.objects.get(_name(blob)), READ_S)
        if blob.area == MANIFESTS:
            self._saw(blob, bytes(data), found.version)
        return bytes(data), found.version

    def get(self, blob: Blob, buffers: Sequence[memoryview]) -> int:
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        wanted = sum(map(len, views))
        data, _ = self.calls.run(lambda: self.objects.get(_name(blob), 0, wanted), READ_S)
        return scatter(data, views)

    def part(self, blob: Blob, start: int, end: int) -> tuple[memoryview, int]:
        """Some of its bytes, and how many there are in all."""
        data, found = self.calls.run(lambda: self.objects.get(_name(blob), start, end), READ_S)
        return data, found.size

    def size(self, blob: Blob) -> int:
        return self.head(blob).size

    def head(self, blob: Blob) -> Found:
        return self.calls.run(lambda: self.objects.head(_name(blob)), READ_S)

    def fetch_ahead(self, blobs: Sequence[Blob]) -> None:
        """There is no place to bring them to."""

    def drop_copy(self, blob: Blob) -> bool:
        return False

    # Writing ----------------------------------------------------------------------------------------------------------

    def put(self, blob: Blob, parts: Sequence[Part]) -> None:
        self.put_bytes(blob, joined(parts))

    def put_bytes(self, blob: Blob, data: bytes) -> None:
        if blob.area != BLOCKS:
            self.calls.run(lambda: self.objects.overwrite(_name(blob), data), WRITE_S)
            with self._lock:
                self._versions.pop(blob, None)
            return
        try:
            self.calls.run(lambda: self.objects.put(_name(blob), data, None), WRITE_S)
        except ExistsError:
            self._renew(blob, data)

    def _renew(self, blob: Blob, data: bytes) -> None:
        """A block that is there already. If it is old, a collector may have marked it: written again it is young. If it
        has another size, it is damaged.
        """
        try:
            found = self.head(blob)
            if found.size == len(data) and self._is_young(found):
                return
        except FileNotFoundError:  # collected just now
            pass
        self.calls.run(lambda: self.objects.overwrite(_name(blob), data), WRITE_S)

    def _is_young(self, found: Found) -> bool:
        """By the storage's own clock. It is asked only where an object was there before us."""
        return found.modified > self.now() - GRACE_S / 2

    def now(self) -> float:
        """What the storage's clock says: that of an object that is written for this, now and then."""
        steady = time.monotonic()
        if self._ahead is None or steady > self._ahead[0] + CLOCK_S:
            self.calls.run(lambda: self.objects.overwrite(CLOCK, b"now"), WRITE_S)
            modified = self.calls.run(lambda: self.objects.head(CLOCK), READ_S).modified
            self._ahead = steady, modified - steady
        return steady + self._ahead[1]

    def sync(self, model: str, area: str) -> None:
        """What was put is safe."""

    def missing(self, blobs: Sequence[Blob]) -> Sequence[Blob]:
        """Those that are gone, or old enough to be marked: they are written again."""
        if not blobs:
            return []
        now, gone = None, []
        for blob in blobs:
            try:
                found = self.head(blob)
            except FileNotFoundError:
                gone.append(blob)
                continue
            now = now or self.now()
            if found.modified < now - GRACE_S / 2:
                gone.append(blob)
        return gone

    def commit(self, blob: Blob, parts: Sequence[Part], *, expected: int) -> None:
        data = joined(parts)
        header = _header(data, Version(None))
        for _ in range(COMMITS):
            version = self._version_of(blob, expected)
            with self._lock:  # until we hear of it
                self._unsure.setdefault(blob, set()).add(header.checksum)
            try:
                written = self.calls.run(lambda version=version: self.objects.put(_name(blob), data, version), WRITE_S)  # type: ignore[misc]
            except (ExistsError, ChangedError):
                with self._lock:
                    self._versions.pop(blob, None)
                found = self._look(blob)
                if found is not None and found.checksum == header.checksum:  # ours: its response was lost
                    self._known(blob, header.generation, found.version)
                    return
                continue  # somebody else was faster, or our own write whose outcome was unknown
            except OSError:
                with self._lock:
                    self._versions.pop(blob, None)
                raise
            self._known(blob, header.generation, written)
            return
        raise AwayError(f"{self.where(blob)}: others change it all the time")

    def _version_of(self, blob: Blob, expected: int) -> Version | None:
        """Which content a commit may replace; None if there must be none. Raises ConflictError."""
        with self._lock:
            known = self._versions.get(blob)
            unsure = self._unsure.get(blob, set())
        if known is not None and known[0] == expected and expected:
            return known[1]
        found = self._look(blob)
        stored = 0 if found is None else found.generation
        if stored != expected and not (found is not None and found.checksum in unsure):
            raise ConflictError(
                f"{self.where(blob)} has generation {stored} and not {expected}: something else has changed it"
            )
        return None if found is None else found.version

    def _look(self, blob: Blob) -> _Header | None:
        """What is stored now; None if nothing is."""
        try:
            data, found = self.calls.run(lambda: self.objects.get(_name(blob), 0, HEADER), READ_S)
            if found.size > len(data) and _header(bytes(data), found.version).generation is None:
                data, found = self.calls.run(lambda: self.objects.get(_name(blob)), READ_S)
        except FileNotFoundError:
            return None
        return _header(bytes(data), found.version)

    def _saw(self, blob: Blob, data: bytes, version: Version) -> None:
        with self._lock:
            generation = _header(data, version).generation
            if generation is None:
                self._versions.pop(blob, None)
            else:
                self._versions[blob] = generation, version

    def _known(self, blob: Blob, generation: int | None, version: Version) -> None:
        with self._lock:
            self._unsure.pop(blob, None)
            if generation is not None:
                self._versions[blob] = generation, version

    def delete(self, blob: Blob) -> None:
        self.calls.run(lambda: self.objects.delete(_name(blob)), WRITE_S)
        with self._lock:
            self._versions.pop(blob, None)

    def set_aside(self, blob: Blob) -> tuple[Blob | None, int]:
        name = ".".join(part for part in (blob.model, blob.area, blob.name) if part)
        try:
            data = self.read(blob)
            for number in count():
                moved = Blob("", QUARANTINE, f"{name}.{number}" if number else name)
                try:
                    self.calls.run(lambda moved=moved: self.objects.put(_name(moved), data, None), WRITE_S)  # type: ignore[misc]
                    break
                except ExistsError:
                    continue
            self.delete(blob)
            return moved, len(data)
        except OSError:  # away, or gone: then it is only not used
            return None, 0

    # The whole --------------------------------------------------------------------------------------------------------

    def usage(self, without: frozenset[str] = frozenset()) -> int:
        return sum(one.size for one in self._listed("") if one.name.split("/")[0] not in without)

    def free_bytes(self) -> int:
        """It grows."""
        return 1 << 60

    def half_written(self, blob: Blob) -> bool:
        return False

    def where(self, blob: Blob | None = None) -> str:
        return self.url if blob is None else f"{self.url}/{_name(blob)}"

    def _listed(self, prefix: str) -> Sequence[Found]:
        return self.calls.run(lambda: tuple(self.objects.list(prefix)), READ_S)


def _name(blob: Blob) -> str:
    return "/".join(part for part in (blob.model, blob.area, blob.name) if part)


def joined(parts: Sequence[Part]) -> bytes:
    return b"".join(bytes(part) if isinstance(part, bytes) else part.tobytes() for part in parts)


def scatter(data: memoryview, views: Sequence[memoryview]) -> int:
    """Fill the views from the beginning of the data; how many bytes there were, at most what fits."""
    done = 0
    for view in views:
        part = data[done : done + len(view)]
        view[: len(part)] = part
        done += len(part)
    return done


def _header(data: bytes, version: Version) -> _Header:
    try:
        length = container.header_length(data, 1 << 40)
        said, _ = container.read_metadata(data[:length])
        return _Header(int(said["generation"]), said["checksum"], version)
    except (StoreError, KeyError, ValueError):
        return _Header(None, "", version)
