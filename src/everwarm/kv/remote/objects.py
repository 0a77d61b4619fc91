"""Objects in a bucket, as the store needs them: five calls, and a few errors that mean something.

`Bucket` makes them with `obstore`, which knows S3, GCS and Azure. Every call is one attempt: trying again, deadlines
and the circuit breaker are in `kv.remote.calls`. Tests put a layer of faults between the two.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from everwarm.errors import ConfigError
from everwarm.kv.warm.blockstore import AwayError

REQUEST_TIMEOUT = "10s"
CONNECT_TIMEOUT = "3s"
SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl")


@dataclass(frozen=True, slots=True)
class Version:
    """Which content an object has: what a compare-and-swap compares."""

    e_tag: str | None
    version: str | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """An object in a listing."""

    name: str
    size: int
    modified: float  # seconds since 1970, by the storage's clock
    version: Version


class ExistsError(OSError):
    """An object of this name is there already."""


class ChangedError(OSError):
    """The object is not the one that was to be replaced."""


class RefusedError(AwayError):
    """The storage understands and says no: rights, keys, region, bucket. Asking again does not help at once."""


class Objects(Protocol):
    """Named bytes. A missing object is a FileNotFoundError, a storage that fails an AwayError."""

    def get(self, name: str, start: int = 0, end: int | None = None) -> tuple[memoryview, Found]:
        """Bytes of an object, all of them or a range that may end behind it; and what it is as a whole."""

    def put(self, name: str, data: bytes, replacing: Version | None) -> Version:
        """Create it (ExistsError if it is there), or replace just this version of it (ChangedError)."""

    def overwrite(self, name: str, data: bytes) -> Version:
        """Whatever is there now."""

    def head(self, name: str) -> Found: ...

    def list(self, prefix: str) -> Iterator[Found]: ...

    def folders(self) -> Sequence[str]:
        """What names begin with, up to their first slash."""

    def delete(self, name: str) -> None:
        """It may be gone already."""


class Bucket:
    """Objects below a prefix of a bucket."""

    def __init__(self, store: Any) -> None:
        """`store`: one of obstore's."""
        self._store = store

    @staticmethod
    def open(url: str) -> "Bucket":
        """A bucket by its URL. Credentials, region and endpoint come from the environment, as the cloud's own tools
        take them. Nothing is asked yet. Raises ConfigError.
        """
        try:
            from obstore.store import from_url
        except ImportError:
            raise ConfigError(f"{url}: object storage needs the package obstore: pip install 'everwarm[s3]'") from None
        scheme = url.partition("://")[0]
        if scheme not in SCHEMES or "://" not in url:
            raise ConfigError(
                f"--warm-url {url}: expected s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX"
            )
        client: Any = {"timeout": REQUEST_TIMEOUT, "connect_timeout": CONNECT_TIMEOUT}
        if scheme in ("s3", "s3a"):
            client["allow_http"] = os.environ.get("AWS_ENDPOINT_URL", os.environ.get("AWS_ENDPOINT", "")).startswith(
                "http://"
            )
        try:
            once: Any = {"max_retries": 0}
            return Bucket(from_url(url, client_options=client, retry_config=once))
        except Exception as error:  # obstore has an error of its own for every kind of wrong setting
            raise ConfigError(f"--warm-url {url}: {_words(error)}") from None

    def get(self, name: str, start: int = 0, end: int | None = None) -> tuple[memoryview, Found]:
        import obstore

        try:
            with _Errors(name):
                options: Any = None if end is None else {"range": (start, end)}
                result = obstore.get(self._store, name, options=options)
                return memoryview(result.bytes()), _found(result.meta)
        except AwayError as error:
            if end is None or "range" not in str(error).lower():
                raise
        data, found = self.get(name)  # an empty object has no range at all
        return data[start:end], found

    def put(self, name: str, data: bytes, replacing: Version | None) -> Version:
        import obstore

        mode: Any = "create"
        if replacing is not None:
            said = {"e_tag": replacing.e_tag, "version": replacing.version}
            mode = {name: value for name, value in said.items() if value is not None}
        with _Errors(name):
            return _version(obstore.put(self._store, name, data, mode=mode, use_multipart=False))

    def overwrite(self, name: str, data: bytes) -> Version:
        import obstore

        with _Errors(name):
            return _version(obstore.put(self._store, name, data, use_multipart=False))

    def head(self, name: str) -> Found:
        import obstore

        with _Errors(name):
            return _found(obstore.head(self._store, name))

    def list(self, prefix: str) -> Iterator[Found]:
        import obstore

        with _Errors(prefix):
            for page in obstore.list(self._store, prefix or None):
                yield from map(_found, page)

    def folders(self) -> Sequence[str]:
        import obstore

        with _Errors(""):
            return sorted(obstore.list_with_delimiter(self._store)["common_prefixes"])

    def delete(self, name: str) -> None:
        import obstore

        try:
            with _Errors(name):
                obstore.delete(self._store, name)
        except FileNotFoundError:
            pass


def _found(meta: Any) -> Found:
    return Found(meta["path"], meta["size"], meta["last_modified"].timestamp(), _version(meta))


def _version(meta: Any) -> Version:
    return Version(meta.get("e_tag"), meta.get("version"))


class _Errors:
    """What obstore raises inside, in our words."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None or not isinstance(error, Exception):
            return
        from obstore import exceptions as of

        if isinstance(error, FileNotFoundError | of.NotFoundError):
            if "NoSuchBucket" in str(error):
                raise RefusedError("there is no such bucket") from None
            raise FileNotFoundError(2, "no such object", self._name) from None
        if isinstance(error, of.AlreadyExistsError):
            raise ExistsError(17, "exists already", self._name) from None
        if isinstance(error, of.PreconditionError):
            raise ChangedError(11, "somebody has changed it", self._name) from None
        if refusal := _refusal(error):
            raise RefusedError(refusal) from None
        if isinstance(error, of.BaseError | OSError):
            raise AwayError(_words(error)) from None


_REFUSALS = (
    ("NoSuchBucket", "there is no such bucket"),
    ("ExpiredToken", "the access keys have expired"),
    ("RequestTimeTooSkewed", "the clock of this machine is wrong by minutes, so that requests are refused"),
    ("InvalidAccessKeyId", "the access key is not known there"),
    ("SignatureDoesNotMatch", "the secret access key is wrong"),
    ("PermanentRedirect", "the bucket is in another region: set AWS_REGION"),
    ("AuthorizationHeaderMalformed", "the bucket is in another region: set AWS_REGION"),
    ("IllegalLocationConstraint", "the bucket is in another region: set AWS_REGION"),
    ("x-amz-bucket-region", "the bucket is in another region: set AWS_REGION"),
    ("BareRedirect", "the bucket is in another region: set AWS_REGION"),
    ("AccessDenied", "these keys may not do this there"),
)


def _refusal(error: Exception) -> str:
    """Why the storage says no; empty if it is a failure that may pass."""
    from obstore import exceptions as of

    said = str(error) + repr(error)
    for word, means in _REFUSALS:
        if word in said:
            return means
    if isinstance(error, of.PermissionDeniedError | of.UnauthenticatedError):
        return f"it is refused: {_words(error)}"
    return ""


def _words(error: BaseException) -> str:
    """One line of what may be many, without the debugging part."""
    said = str(error).split("Debug source:")[0]
    return " ".join(said.split())[:300]
