"""What can be wrong with a bucket is found out at the start, in one line, and nothing is written."""

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from everwarm.errors import ConfigError, EverwarmError
from everwarm.kv.remote.objects import Bucket, RefusedError
from everwarm.kv.remote.opening import CLUSTER, SECRET_FILE, SECRET_VARIABLE, open_warm
from everwarm.kv.warm.sealed import sealed
from kv.faulty_objects import FaultyObjects
from kv.replicas import URL, objects_in_memory
from kv.s3 import Server


@pytest.fixture(autouse=True)
def _no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)


@pytest.fixture
def objects() -> FaultyObjects:
    return FaultyObjects(objects_in_memory())


def refused(url: str, home: Path, objects: FaultyObjects | None = None, **options: bool) -> str:
    """Why it can't be opened, in one line."""
    with pytest.raises(EverwarmError) as caught:
        open_warm(url, home, 1 << 20, objects=objects, **options).close()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("url", ["bucket", "file:///tmp/x", "ftp://host/x", "https://example.com/x", "s3:bucket"])
def test_a_url_that_is_none(tmp_path: Path, url: str) -> None:
    assert "expected s3://BUCKET/PREFIX" in refused(url, tmp_path)


def test_no_such_bucket(s3: Server, tmp_path: Path) -> None:
    assert "there is no such bucket" in refused("s3://no-such-bucket/x", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore")
    monkeypatch.setattr("everwarm.kv.remote.calls.FAILURES", 2)
    for name, value in Server("http://127.0.0.1:9", None).environment.items():
        monkeypatch.setenv(name, value)
    assert "the storage can't be used" in refused("s3://bucket/x", tmp_path)


@contextmanager
def answering(status: int, code: str, headers: dict[str, str] | None = None) -> Iterator[Server]:
    """An S3 server that says no to everything, as the real one would."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.command)
            body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>no</Message></Error>".encode()
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        do_PUT = do_HEAD = do_DELETE = do_GET  # noqa: N815

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield Server(f"http://127.0.0.1:{server.server_port}", None)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert set(asked) <= {"GET"}, "something was written"


@pytest.mark.parametrize(
    ("status", "code", "headers", "told"),
    [
        (403, "AccessDenied", {}, "these keys may not do this"),
        (400, "ExpiredToken", {}, "the access keys have expired"),
        (403, "InvalidAccessKeyId", {}, "the access key is not known"),
        (403, "SignatureDoesNotMatch", {}, "the secret access key is wrong"),
        (403, "RequestTimeTooSkewed", {}, "the clock of this machine is wrong"),
        (400, "AuthorizationHeaderMalformed", {}, "another region: set AWS_REGION"),
        (301, "PermanentRedirect", {"x-amz-bucket-region": "eu-west-1"}, "another region: set AWS_REGION"),
        (404, "NoSuchBucket", {}, "there is no such bucket"),
    ],
)
def test_what_the_storage_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, code: str, headers: dict[str, str], told: str
) -> None:
    pytest.importorskip("obstore")
    with answering(status, code, headers) as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        assert told in refused("s3://bucket/prefix", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_keys_that_may_only_read(tmp_path: Path) -> None:
    real = objects_in_memory()
    open_warm(URL, tmp_path, 1 << 20, objects=real).close()

    class ReadOnly(FaultyObjects):
        def put(self, *args):  # type: ignore[no-untyped-def]
            raise RefusedError("these keys may not do this there")

    assert "these keys may not do this" in refused(URL, tmp_path, ReadOnly(real))


def test_a_bucket_of_another_version(tmp_path: Path, objects: FaultyObjects, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("everwarm.kv.warm.sealed.VERSION", "7")
        objects.overwrite(CLUSTER.name, sealed({"format": "everwarm-cluster", "fingerprint": "?"}))
    before = [(found.name, found.version) for found in objects.list("")]
    assert "version '7', this everwarm reads 1" in refused(URL, tmp_path, objects)
    assert [(found.name, found.version) for found in objects.list("")] == before


def test_something_else_under_that_name(tmp_path: Path, objects: FaultyObjects) -> None:
    objects.overwrite(CLUSTER.name, b"{}")
    assert "cluster.json" in refused(URL, tmp_path, objects)
    objects.overwrite(CLUSTER.name, sealed(["other"]))
    assert "not a record of everwarm" in refused(URL, tmp_path, objects)


def test_two_clusters_with_different_salts(tmp_path: Path, objects: FaultyObjects) -> None:
    open_warm(URL, tmp_path / "one", 1 << 20, objects=objects).close()
    before = [(found.name, found.version) for found in objects.list("")]
    assert "belongs to a cluster whose secret is not here" in refused(URL, tmp_path / "two", objects)
    (tmp_path / "two").mkdir(exist_ok=True)
    (tmp_path / "two" / SECRET_FILE).write_text("another secret, long enough")
    assert "belongs to another cluster" in refused(URL, tmp_path / "two", objects)
    (tmp_path / "two" / SECRET_FILE).write_text("short")
    assert "it needs at least 16" in refused(URL, tmp_path / "two", objects)
    assert [(found.name, found.version) for found in objects.list("")] == before


def test_the_secret_of_a_cluster_opens_it_on_any_machine(
    tmp_path: Path, objects: FaultyObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(open_warm(URL, tmp_path / "one", 1 << 20, objects=objects)) as one:
        path = tmp_path / "one" / SECRET_FILE
        assert path.stat().st_mode & 0o077 == 0
        monkeypatch.setenv(SECRET_VARIABLE, path.read_text())
        with closing(open_warm(URL, tmp_path / "two", 1 << 20, objects=objects)) as two:
            assert two.secret == one.secret
        monkeypatch.setenv(SECRET_VARIABLE, "short")
        assert "it needs at least 16" in refused(URL, tmp_path / "two", objects)


def test_tools_make_no_store(tmp_path: Path, objects: FaultyObjects) -> None:
    assert "there is no warm tier" in refused(URL, tmp_path, objects, create=False)
    assert list(objects.list("")) == []
    assert list(tmp_path.iterdir()) == []


def test_a_first_start_whose_response_is_lost(tmp_path: Path, objects: FaultyObjects) -> None:
    put, lost = objects.put, []

    def once(*args):  # type: ignore[no-untyped-def]
        version = put(*args)
        if not lost:
            lost.append(True)
            objects.losing = 0.0
            from everwarm.kv.warm.blockstore import AwayError

            raise AwayError("the response was lost")
        return version

    objects.put = once  # type: ignore[method-assign]
    open_warm(URL, tmp_path, 1 << 20, objects=objects).close()
    assert lost


def test_without_obstore_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(ConfigError, match=r"pip install 'everwarm\[s3\]'"):
        Bucket.open("s3://bucket/prefix")
