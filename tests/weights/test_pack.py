"""Packs: a valid safetensors file, mapped at the next start, never trusted blindly."""

import fcntl
import json
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import packing
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

import everwarm
from everwarm.cli import weights
from everwarm.cli.app import run
from everwarm.errors import PackError
from everwarm.kernels.native import NativeBackend
from everwarm.weights.gguf.file import GGUFFile
from everwarm.weights.pack import file as pack
from everwarm.weights.pack import identity
from everwarm.weights.pack.file import Pack
from everwarm.weights.pack.source import FileSource, PackSource, packed_source
from forked import FORKS
from tiny import Tiny
from waiting_until import PATIENCE_S

PROMPT = list(range(40, 90))


@pytest.fixture
def model(tmp_path: Path, home: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    Tiny(type="Q4_K", layers=2, tied=False).write(path)
    return path


def logits(model: Path, **options: str) -> np.ndarray:
    with everwarm.load(model, **options) as llm:
        return llm.logits(PROMPT).view(np.uint32)


def the_pack(home: Path) -> Path:
    (path,) = (home / "packs").glob("*.safetensors")
    return path


def damage(path: Path, at: int, value: int | None = None) -> None:
    """A byte of a file becomes another, as a failing disk would do it."""
    data = bytearray(path.read_bytes())
    data[at] = data[at] ^ 0xFF if value is None else value
    path.write_bytes(data)


def test_fresh_mapped_and_in_memory_are_the_same_bits(model: Path, home: Path) -> None:
    in_memory = logits(model, pack="off")
    assert not (home / "packs").exists()
    assert (logits(model) == in_memory).all()
    before = the_pack(home).stat().st_mtime_ns
    assert (logits(model) == in_memory).all()
    assert the_pack(home).stat().st_mtime_ns == before


def test_the_safetensors_package_reads_it(model: Path, home: Path) -> None:
    logits(model)
    path = the_pack(home)
    opened = Pack(path)
    with safe_open(path, framework="numpy") as file:
        assert file.metadata()["format"] == "everwarm-pack"
        names = set(file.keys())
        assert set(opened.entries) <= names
        assert all(name.startswith("__padding_") for name in names - set(opened.entries))
        for name in opened.entries:
            assert file.get_tensor(name).tobytes() == opened.data(name).tobytes()
    header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    assert header % 4096 == 0
    assert all(opened.data(name).ctypes.data % 64 == 0 for name in opened.entries)


def test_a_mapped_tensor_costs_no_memory_of_its_own(model: Path, home: Path) -> None:
    logits(model)
    with everwarm.load(model) as llm:
        assert isinstance(llm._source, PackSource)
        norm = llm.weights.get("output_norm.weight")
        assert np.shares_memory(norm, llm._source.pack.data("output_norm.weight"))
        assert norm.flags.writeable is False


@pytest.mark.parametrize(
    ("what", "spoil"),
    [
        ("truncated", lambda path: os.truncate(path, path.stat().st_size - 1)),
        ("header", lambda path: os.truncate(path, 100)),
        ("can't be opened", lambda path: os.truncate(path, 0)),
        ("header", lambda path: path.write_bytes(b"hello, this is no pack at all")),
        ("header", lambda path: damage(path, 9)),
        ("header", lambda path: damage(path, 7)),
        (
            "layout",
            lambda path: path.write_bytes(path.read_bytes().replace(pack.LAYOUT.encode(), b"panel16-group32-0")),
        ),
        ("version", lambda path: path.write_bytes(path.read_bytes().replace(b'"version": "1"', b'"version": "0"'))),
        (
            "weights_id",
            lambda path: path.write_bytes(path.read_bytes().replace(b'"weights_id": "', b'"weights_ix": "')),
        ),
    ],
)
def test_what_is_not_a_whole_pack_of_this_model_is_built_again(
    model: Path, home: Path, caplog: pytest.LogCaptureFixture, what: str, spoil: object
) -> None:
    expected = logits(model)
    good = the_pack(home).read_bytes()
    spoil(the_pack(home))  # type: ignore[operator]
    with pytest.raises(PackError):
        Pack(the_pack(home), identity.digest(GGUFFile(model)))
    with caplog.at_level(logging.WARNING):
        assert (logits(model) == expected).all()
    assert what in caplog.text
    assert "building the pack again" in caplog.text
    assert the_pack(home).read_bytes() == good


Header = dict[str, Any]


def swap(header: Header, tensors: Header) -> None:
    """Two tensors of one size point at each other's bytes; their checksums follow."""
    a, b = "blk.0.ffn_gate.weight", "blk.0.ffn_up.weight"
    header[a], header[b] = header[b], header[a]
    tensors[a], tensors[b] = tensors[b], tensors[a]


def overlap(header: Header, tensors: Header) -> None:
    header["blk.1.ffn_up.weight"] = header["blk.0.ffn_up.weight"]
    tensors["blk.1.ffn_up.weight"] = tensors["blk.0.ffn_up.weight"]


def rename(header: Header, tensors: Header) -> None:
    """The same bytes under each other's names, in the order of the file: only the plan knows better."""
    for each in (header, tensors):
        items = list(each.items())
        each.clear()
        names = {"blk.0.ffn_gate.weight": "blk.0.ffn_up.weight", "blk.0.ffn_up.weight": "blk.0.ffn_gate.weight"}
        each.update((names.get(name, name), value) for name, value in items)


def floats(header: Header, tensors: Header) -> None:
    for entry in header.values():
        if "data_offsets" in entry:
            entry["data_offsets"] = [float(offset) if offset else 0 for offset in entry["data_offsets"]]


UP = "blk.0.ffn_up.weight"
LIES: dict[str, Callable[[Header, Header], object]] = {
    "swap": swap,
    "overlap": overlap,
    "rename": rename,
    "floats": floats,
    "transpose": lambda h, t: t["blk.0.attn_k.weight"].update(shape=t["blk.0.attn_k.weight"]["shape"][::-1]),
    "fewer rows": lambda h, t: t["token_embd.weight"].update(shape=[16, 256]),
    "kind": lambda h, t: t[UP].update(kind="Q8_0"),
    "kind of a vector": lambda h, t: t["blk.0.attn_norm.weight"].update(kind="Q4_1"),
    "vector of a matrix": lambda h, t: t[UP].update(kind="vector"),
    "negative": lambda h, t: t[UP].update(shape=[-256, -256]),
    "huge": lambda h, t: t[UP].update(shape=[2**31 - 1, 32]),
    "beyond 64 bits": lambda h, t: t[UP].update(shape=[2**70, 2**70]),
    "text": lambda h, t: t[UP].update(shape="ab"),
    "truth": lambda h, t: t[UP].update(shape=[True, 256]),
    "null": lambda h, t: t[UP].update(shape=None),
    "no checksum": lambda h, t: t[UP].update(checksum=None),
    "long checksum": lambda h, t: t[UP].update(checksum="0" * 99),
    "past the end": lambda h, t: h[UP].update(data_offsets=[0, 2**60]),
    "backwards": lambda h, t: h[UP].update(data_offsets=h[UP]["data_offsets"][::-1]),
    "three offsets": lambda h, t: h[UP].update(data_offsets=[0, 64, 128]),
    "gone": lambda h, t: (h.pop(UP), t.pop(UP)),
    "only described": lambda h, t: h.pop(UP),
    "added": lambda h, t: (h.update(x=h[UP]), t.update(x=t[UP])),
    "list": lambda h, t: h["__metadata__"].update(weights_id=["x"]),
}


@pytest.mark.parametrize("name", LIES)
def test_a_pack_that_lies_about_its_tensors_is_built_again(
    model: Path, home: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """Its checksums are right; what it says is not what this model needs."""
    expected = logits(model)
    path = the_pack(home)
    good = path.read_bytes()
    length = int.from_bytes(good[:8], "little")
    header = json.loads(good[8 : 8 + length])
    tensors = json.loads(header["__metadata__"]["tensors"])
    LIES[name](header, tensors)
    header["__metadata__"]["tensors"] = json.dumps(tensors)
    path.write_bytes(good[:8] + json.dumps(header).encode().ljust(length) + good[8 + length :])
    assert path.read_bytes() != good
    with caplog.at_level(logging.WARNING):
        assert (logits(model) == expected).all()
    assert caplog.text.count("building the pack again") == 1
    assert path.read_bytes() == good


def test_a_swap_of_bytes_and_checksums_is_noticed_where_the_pack_was_written(
    model: Path, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The header is the one that would be written for these bytes; but they were others."""
    expected = logits(model)
    path = the_pack(home)
    opened = Pack(path)
    a, b = (opened.entries[f"blk.0.ffn_{name}.weight"] for name in ("gate", "up"))
    good = path.read_bytes()
    changed = bytearray(good)
    for here, there in ((a, b), (b, a)):
        start, end = opened._offsets[here.name]
        changed[start:end] = opened.data(there.name).tobytes()
        at = good.index(here.checksum.encode())
        changed[at : at + 16] = there.checksum.encode()
    path.write_bytes(changed)
    assert [*Pack(path).altered()] == []
    with caplog.at_level(logging.WARNING):
        assert (logits(model) == expected).all()
    assert "its checksums are not those of the pack that was written here; building the pack again" in caplog.text
    assert path.read_bytes() == good


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_change_of_a_header_goes_unnoticed(packed: Path, tmp_path: Path, data: st.DataObject) -> None:
    good = packed.read_bytes()
    length = 8 + int.from_bytes(good[:8], "little")
    at = data.draw(st.integers(0, length - 1))
    size = data.draw(st.integers(0, 4))
    new = data.draw(st.binary(max_size=4) | st.sampled_from([b"0", b"9", b" ", b'"', b"1e3", b"-1", b"0.", b"true"]))
    changed = good[:at] + new + good[at + size :]
    path = tmp_path / "changed.safetensors"
    path.write_bytes(changed)
    if changed[:length] == good[:length]:
        return
    try:
        opened = Pack(path, Pack(packed).metadata["weights_id"])
        opened.check(list(Pack(packed).entries.values()))
    except PackError:
        return
    # Two things may differ without a lie: a checksum, which its tensor then does not fit, and who wrote it, for people.
    sums = [[entry.checksum for entry in each.entries.values()] for each in (opened, Pack(packed))]
    assert (
        [*opened.altered()] if sums[0] != sums[1] else opened.metadata["everwarm"] != Pack(packed).metadata["everwarm"]
    )


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    Tiny(type="Q4_0", layers=1, width=32, heads=1, kv_heads=1, head_dim=32, ffn=32).write(folder / "tiny.gguf")
    with GGUFFile(folder / "tiny.gguf") as file:
        packed_source(file, NativeBackend("portable", 1, "f16"), folder)
    return the_pack(folder)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["link", "pipe", "link to a device"])
def test_what_stands_in_the_place_of_a_pack_is_not_opened(
    model: Path, home: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    expected = logits(model)
    path = the_pack(home)
    elsewhere = path.rename(home / "elsewhere.safetensors")
    before = elsewhere.read_bytes()
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(elsewhere if kind == "link" else "/dev/zero")
    with caplog.at_level(logging.WARNING):
        assert (logits(model) == expected).all()
    assert "regular file; building the pack again" in caplog.text
    assert path.is_file()
    assert not path.is_symlink()
    assert elsewhere.read_bytes() == before
    assert run(["weights", "verify"]) == 0


def test_half_written_packs_of_those_who_are_gone_are_removed(model: Path, home: Path) -> None:
    logits(model)
    path = the_pack(home)
    path.unlink()
    gone, busy, link = (path.with_name(f".{path.name}.{pid}.0badcafe.part") for pid in (1, 2, 3))
    gone.write_bytes(b"x")
    link.symlink_to(path)
    with busy.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        logits(model)
    assert set(path.parent.iterdir()) == {path, busy, link}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", [identity.REMEMBERED, identity.PACKS])
def test_memories_that_are_no_files_are_none(model: Path, home: Path, name: str) -> None:
    expected = logits(model)
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero"), lambda path: path.write_text("[" * 100_000)):
        (home / name).unlink()
        make(home / name)
        assert (logits(model) == expected).all()
        (home / name).unlink(missing_ok=True)
        (home / name).write_text("{}")


def test_an_altered_tensor_is_found_and_replaced(model: Path, home: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = logits(model)
    path = the_pack(home)
    opened = Pack(path)
    start = opened.data("blk.1.ffn_up.weight").ctypes.data - opened.data("token_embd.weight").ctypes.data
    first = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    assert [*opened.altered()] == []
    damage(path, first + start + 5)
    assert [*Pack(path).altered()] == ["blk.1.ffn_up.weight"]
    with caplog.at_level(logging.ERROR):
        assert (logits(model, verify="eager") == expected).all()
    assert "tensor blk.1.ffn_up.weight was altered" in caplog.text
    assert (logits(model, verify="eager") == expected).all()
    assert [*Pack(the_pack(home)).altered()] == []


def test_a_pack_that_was_touched_is_compared_before_it_is_used(
    model: Path, home: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has to ask for it: its ctime is not the one that was remembered."""
    expected = logits(model)
    path = the_pack(home)
    waited: list[bool] = []
    join = threading.Thread.join
    monkeypatch.setattr(threading.Thread, "join", lambda self, *args: (waited.append(True), join(self, *args))[1])

    def compared_first() -> bool:
        waited.clear()
        with everwarm.load(model):
            return bool(waited)

    assert not compared_first()
    path.chmod(0o600)  # its bytes are the same
    assert compared_first()
    assert not compared_first()
    damage(path, path.stat().st_size - 100)
    with caplog.at_level(logging.ERROR):
        assert (logits(model) == expected).all()
    assert "was altered" in caplog.text
    assert (logits(model) == expected).all()  # packed again
    assert [*Pack(the_pack(home)).altered()] == []


def test_another_model_gets_a_pack_of_its_own(tmp_path: Path, home: Path) -> None:
    for seed in (1, 2):
        Tiny(type="Q4_0", layers=1, seed=seed).write(tmp_path / f"{seed}.gguf")
        logits(tmp_path / f"{seed}.gguf")
    assert len(list((home / "packs").iterdir())) == 2
    assert (logits(tmp_path / "1.gguf") != logits(tmp_path / "2.gguf")).any()


def test_a_model_that_changed_under_its_name_is_noticed(tmp_path: Path, home: Path) -> None:
    path = tmp_path / "model.gguf"
    Tiny(type="Q4_0", layers=1, seed=1).write(path)
    first = logits(path)
    Tiny(type="Q4_0", layers=1, seed=2).write(path)
    assert (logits(path) != first).any()
    assert (logits(path) == logits(path, pack="off")).all()


def test_the_weights_id_is_remembered_and_does_not_depend_on_the_file(
    model: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with GGUFFile(model) as file:
        found = identity.weights_id(file, home)
        assert found == identity.digest(file)
    monkeypatch.setattr(identity, "digest", lambda file: pytest.fail("read again"))
    with GGUFFile(model) as file:
        assert identity.weights_id(file, home) == found
    monkeypatch.undo()
    copy = model.with_name("copy.gguf")
    copy.write_bytes(model.read_bytes())
    with GGUFFile(copy) as file:
        assert identity.weights_id(file, home) == found
    (home / identity.REMEMBERED).write_text("{ damaged")
    with GGUFFile(copy) as file:
        assert identity.weights_id(file, home) == found


def test_a_disk_that_is_full_or_read_only_means_memory(
    model: Path, home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = logits(model, pack="off")
    monkeypatch.setattr(pack.shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    with caplog.at_level(logging.WARNING), everwarm.load(model) as llm:
        assert isinstance(llm._source, FileSource)
        assert (llm.logits(PROMPT).view(np.uint32) == expected).all()
    assert caplog.text.count("running from memory") == 1
    assert list((home / "packs").iterdir()) == []
    monkeypatch.undo()
    (home / "packs").rmdir()
    (home / "packs").write_text("a file where the directory should be")
    assert (logits(model) == expected).all()


def test_two_processes_that_pack_at_once_end_with_one_good_file(model: Path, home: Path) -> None:
    gate, results = FORKS.Barrier(3), FORKS.Queue()
    given = (model, PROMPT, dict(os.environ), gate, results)
    processes = [FORKS.Process(target=packing.load, args=given) for _ in range(3)]
    for process in processes:
        process.start()
    found = {results.get(timeout=PATIENCE_S) for _ in processes}
    for process in processes:
        process.join()
    assert found == {logits(model, pack="off").tobytes()}
    assert [*Pack(the_pack(home)).altered()] == []


def test_the_weights_commands(model: Path, home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    logits(model)
    capfd.readouterr()
    assert run(["weights", "ls", "--json"]) == 0
    (row,) = json.loads(capfd.readouterr().out)
    assert row["tensors"] == 21
    assert run(["weights", "verify"]) == 0
    damage(the_pack(home), the_pack(home).stat().st_size - 70)
    capfd.readouterr()
    assert run(["weights", "verify", row["weights_id"][:8], "--json"]) == 1
    (result,) = json.loads(capfd.readouterr().out)
    assert result["ok"] is False
    assert len(result["altered"]) == 1
    assert run(["weights", "rm"]) == 2
    assert run(["weights", "rm", "nonsense"]) == 2
    assert run(["weights", "rm", "--all", "--dry-run"]) == 0
    assert the_pack(home).exists()
    assert run(["weights", "rm", row["weights_id"][:8]]) == 0
    assert list((home / "packs").iterdir()) == []


def test_times_that_jump_change_nothing(
    model: Path, home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Files from the future and from before 1970, and a clock that was set back between two loads."""
    expected = logits(model)
    good = the_pack(home).read_bytes()
    for seconds in (0, -(10**9), 10**10):
        monkeypatch.setattr("time.time", lambda seconds=seconds: float(seconds))
        for path in (model, the_pack(home), home / identity.REMEMBERED):
            os.utime(path, (seconds, seconds))
        assert (logits(model) == expected).all()
        assert (logits(model, weight_budget="60%") == expected).all()
        capfd.readouterr()
        assert run(["weights", "ls", "--json"]) == 0
        assert json.loads(capfd.readouterr().out)[0]["state"] == "good header"
    assert the_pack(home).read_bytes() == good
    assert weights._when(1e18) == weights._when(-1e18) == "unknown"


@pytest.mark.timeout(60)
def test_the_weights_commands_and_what_is_no_pack(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (home / "packs").mkdir(parents=True)
    os.mkfifo(home / "packs" / "a.safetensors")
    (home / "packs" / "b.safetensors").symlink_to("nowhere")
    (home / "packs" / "c.safetensors").mkdir()
    assert run(["weights", "ls", "--json"]) == 0
    rows = json.loads(capfd.readouterr().out)
    assert sum("regular file" in row["state"] for row in rows) == 3
    assert run(["weights", "verify"]) == 1
    assert capfd.readouterr().out.count("DAMAGED") == 3
