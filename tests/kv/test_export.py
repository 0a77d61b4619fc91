"""Exports: what is in them, what continues from them, and what hostile ones can't do."""

import errno
import functools
import json
import os
import random
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file

from everwarm.errors import StoreError
from everwarm.kv import container
from everwarm.kv.disk.files import Files
from everwarm.kv.ids import ModelIds
from everwarm.kv.layout import Group, Layout
from everwarm.kv.store import AgentStore
from everwarm.kv.tools import export
from everwarm.kv.tools.exported import Export
from everwarm.kv.tools.import_ import import_agent
from kv import fake
from kv.fake import BLOCK_TOKENS, CAPACITY, TOKEN_BYTES, export_agent, kv_bytes, model_ids, open_store, talk
from kv.simulated_disk import FaultyFiles, RecordedFiles, SimulatedDisk

HISTORY = list(range(100, 150))  # six full blocks and a partial one
Change = Callable[[dict[str, str], dict[str, np.ndarray]], None]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Alice, exported from one machine."""
    store = open_store(tmp_path / "there")
    talk(store, "alice", HISTORY, [7, 8])
    export_agent(store, "alice", tmp_path / "alice.safetensors")
    store.close()
    return tmp_path / "alice.safetensors"


def craft(file: Path, change: Change) -> None:
    """Rewrite an export with a right checksum, whatever else is wrong with it."""
    with safe_open(file, "np") as source:
        said = dict(source.metadata())
    tensors = load_file(file)
    said.pop("checksum")
    ordered = {name: tensors[name] for name in ("tokens", "text", "kv.0")}
    change(said, ordered)
    kinds = {np.dtype(np.uint8): "U8", np.dtype("<u4"): "U32"}
    parts = container.encode(said, [(container.Tensor(n, kinds[a.dtype], a.shape), a) for n, a in ordered.items()])
    file.write_bytes(b"".join(bytes(part) for part in parts))


def reseal(file: bytes) -> bytes:
    """The same file with the checksum that it should have."""
    length = int.from_bytes(file[:8], "little") + 8
    blank, _ = container.split_checksum(file[:length])
    digits = container.checksum(blank, [np.frombuffer(file[length:], np.uint8)])
    return container.with_checksum(blank, digits) + file[length:]


def snapshot(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file() and p.name != "lock"}


def refused(store: AgentStore, file: Path, reason: str, **options: Any) -> None:
    """StoreError, and the store is as it was: on disk, in memory, in its counts."""
    root = fake.disk(store).root
    before = (
        snapshot(root),
        set(store.index.tree.nodes),
        set(store.agents.by_name),
        store.warm.bytes,
        store.index.pool.in_use,
    )
    with pytest.raises(StoreError, match=reason):
        import_agent(store, file, **options)
    after = (
        snapshot(root),
        set(store.index.tree.nodes),
        set(store.agents.by_name),
        store.warm.bytes,
        store.index.pool.in_use,
    )
    assert after[0].keys() == before[0].keys()
    assert after[0] == before[0]
    assert after[2:] == before[2:]
    roots = {key for key, node in store.index.tree.nodes.items() if node.parent is None}
    assert after[1] - roots == before[1] - roots


# Out ------------------------------------------------------------------------------------------------------------------


def test_an_export_is_a_safetensors_file_with_the_documented_names(file: Path) -> None:
    tensors = load_file(file)
    assert list(tensors["tokens"]) == [*HISTORY, 7, 8]
    body = json.loads(zlib.decompress(tensors["text"].tobytes()))
    assert body["runs"] == [[" ".join(map(str, [*HISTORY, 7, 8])), 0, 52]]
    kv = tensors["kv.0"].reshape(-1, TOKEN_BYTES)[:51]  # all but the last token have been computed
    assert (kv == kv_bytes([*HISTORY, 7])).all()
    with safe_open(file, "np") as source:
        said = source.metadata()
    assert set(said) == {
        "checksum", "format", "version", "everwarm", "name", "model", "kv_type", "weights_id", "numerics_id", "layout",
        "block_tokens", "kv_tokens",
    }  # fmt: skip
    assert (said["format"], said["version"], said["kv_tokens"], said["block_tokens"]) == (
        "everwarm-export", "1", "51", "8",
    )  # fmt: skip


def test_an_export_is_private_and_leaves_nothing_else(file: Path) -> None:
    assert file.stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in file.parent.iterdir()) == ["alice.safetensors", "there"]


def test_no_salt_leaves_the_machine(file: Path) -> None:
    tenants = json.loads((file.parent / "there" / "tenants.json").read_text())["said"]
    data = file.read_bytes()
    for salt in tenants.values():
        assert salt.encode() not in data
        assert bytes.fromhex(salt) not in data


def test_an_export_replaces_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path / "there")
    talk(store, "alice", HISTORY)
    (tmp_path / "precious").write_text("data")
    with pytest.raises(StoreError, match="exists already"):
        export_agent(store, "alice", tmp_path / "precious")
    with pytest.raises(StoreError, match="no such agent"):
        export_agent(store, "bob", tmp_path / "bob")
    with pytest.raises(StoreError, match="can't be written"):
        export_agent(store, "alice", tmp_path / "no" / "such" / "directory")
    store.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["precious", "there"]
    assert (tmp_path / "precious").read_text() == "data"


def test_an_export_follows_no_link_that_waits_for_it(tmp_path: Path) -> None:
    store = open_store(tmp_path / "there")
    talk(store, "alice", HISTORY)
    (tmp_path / "precious").write_text("data")
    (tmp_path / "file").symlink_to(tmp_path / "precious")
    with pytest.raises(StoreError, match="exists already"):
        export_agent(store, "alice", tmp_path / "file")
    moved = export_agent(store, "alice", tmp_path / ("x" * 255))  # a name that leaves no room for a longer one
    store.close()
    assert (moved.tokens, (tmp_path / "precious").read_text()) == (50, "data")


# An export of seven blocks: header, tokens, text, then each block.
CALLS = {"create": 1, "write": 10, "sync": 1, "close": 1, "rename": 1, "sync_directory": 1}


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, 0])
@pytest.mark.parametrize(("kind", "nth"), [(kind, nth) for kind, count in CALLS.items() for nth in range(1, count + 1)])
def test_an_export_that_fails_at_any_operation_leaves_nothing_behind(
    tmp_path: Path, kind: str, nth: int, error: int
) -> None:
    files = FaultyFiles()
    store = open_store(tmp_path / "there", files=files)
    talk(store, "alice", HISTORY)
    store.flush()
    files.heal()
    export_agent(store, "alice", tmp_path / "first")
    assert {call: count for call, count in files.calls.items() if call != "any"} == CALLS
    files.arm(kind, nth, error, lasting=False)
    if kind == "write" and not error:  # not all of it is written at once: no fault
        export_agent(store, "alice", tmp_path / "file")
    else:
        with pytest.raises(StoreError, match=r"file: can't be written: "):
            export_agent(store, "alice", tmp_path / "file")
        assert files.calls[kind] == nth
        assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "there"]
        export_agent(store, "alice", tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == (tmp_path / "first").read_bytes()
    assert talk(store, "alice", [*HISTORY, 1]).cached_tokens == 50
    store.close()


def test_an_export_that_was_acknowledged_survives_a_loss_of_power(tmp_path: Path) -> None:
    """And before that there is none, or a whole one, under its name."""
    files = RecordedFiles(tmp_path / "disk")
    (tmp_path / "disk").mkdir()
    store = open_store(tmp_path / "disk" / "home" / "agents", files=files)
    talk(store, "alice", HISTORY)
    store.flush()
    begun = len(files.log)
    export_agent(store, "alice", tmp_path / "disk" / "home" / "file")
    whole = (tmp_path / "disk" / "home" / "file").read_bytes()
    log = files.log
    store.close()
    chance = random.Random(1)
    for end in range(begun, len(log) + 1):
        disk = SimulatedDisk()
        for operation in log[:end]:
            disk.do(operation)
        for _ in range(20):
            tree = disk.crash(lambda _: chance.random() < 0.5, chance)
            found = tree.get(Path("home/file"))
            assert found in (None, whole)
            assert found == whole or end < len(log)


def test_blocks_that_change_between_the_two_readings_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path / "there")
    talk(store, "alice", HISTORY)
    read, count = export._read, [0]

    def other(*arguments: Any) -> None:
        read(*arguments)
        count[0] += 1
        if count[0] == 10:
            arguments[2][:] = 1

    monkeypatch.setattr(export, "_read", other)
    with pytest.raises(StoreError, match="has changed meanwhile; export it again"):
        export_agent(store, "alice", tmp_path / "file")
    store.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["there"]


def test_what_is_only_in_memory_is_exported_too(tmp_path: Path, file: Path) -> None:
    store = open_store(None)
    talk(store, "alice", HISTORY, [7, 8])
    export_agent(store, "alice", tmp_path / "hot")
    store.close()
    assert load_file(tmp_path / "hot")["kv.0"].tobytes() == load_file(file)["kv.0"].tobytes()


def test_export_beside_a_process_that_writes(tmp_path: Path) -> None:
    store = open_store(tmp_path / "there")
    talk(store, "alice", HISTORY)
    beside = open_store(tmp_path / "there", writing=False)
    assert export_agent(beside, "alice", tmp_path / "alice").blocks == 7
    talk(store, "alice", [*HISTORY, 1])  # the end that `beside` knows of is replaced
    assert export_agent(beside, "alice", tmp_path / "later").tokens == 51
    beside.close()
    store.close()


@pytest.mark.parametrize("how", ["gone", "altered"])
def test_an_export_ends_before_a_lost_block_and_keeps_the_history(tmp_path: Path, how: str) -> None:
    store = open_store(tmp_path / "there")
    talk(store, "alice", HISTORY)
    blocks = store.histories.manifest(store.find("alice")).blocks
    store.close()
    path = fake.block_path(store, blocks[3])
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1] + b"!")
    store = open_store(tmp_path / "there", writing=False)
    moved = export_agent(store, "alice", tmp_path / "alice")
    store.close()
    assert (moved.tokens, moved.kv_tokens, moved.blocks, moved.lost_blocks) == (50, 24, 3, 4)
    here = open_store(tmp_path / "here")
    import_agent(here, tmp_path / "alice")
    receipt = talk(here, "alice", [*HISTORY, 1])
    assert (receipt.cached_tokens, receipt.match) == (24, "extended")
    here.close()


# In -------------------------------------------------------------------------------------------------------------------


def test_an_imported_agent_goes_on_exactly_where_it_was(tmp_path: Path, file: Path) -> None:
    store = open_store(tmp_path / "here")
    moved = import_agent(store, file)
    assert (moved.agent, moved.tokens, moved.kv_tokens, moved.blocks) == ("alice", 52, 51, 7)
    receipt = talk(store, "alice", [*HISTORY, 7, 8, 9])  # compares every byte with what computing gives
    assert (receipt.tier, receipt.cached_tokens, receipt.match) == ("warm", 51, "extended")
    store.close()
    store = open_store(tmp_path / "here")
    assert talk(store, "alice", [*HISTORY, 7, 8, 9, 10]).cached_tokens == 53
    store.delete("alice")
    assert (list(tmp_path.glob("here/*/blocks/*")), store.warm.bytes) == ([], 0)
    store.close()


def test_nobody_else_finds_what_was_imported(tmp_path: Path, file: Path) -> None:
    store = open_store(tmp_path / "here")
    import_agent(store, file)
    assert talk(store, "bob", HISTORY).cached_tokens == 0
    assert talk(store, None, [*HISTORY, 7, 8]).cached_tokens == len(HISTORY)  # bob's, not alice's
    store.close()


def test_a_trusted_import_is_shared_with_its_tenant_and_no_other(tmp_path: Path, file: Path) -> None:
    store = open_store(tmp_path / "here")
    import_agent(store, file, tenant="us", trust=True)
    assert talk(store, "bob", HISTORY, tenant="them").cached_tokens == 0
    assert talk(store, "bob", HISTORY, tenant="us").cached_tokens == 49
    store.close()


def test_a_hostile_export_poisons_only_itself(tmp_path: Path, file: Path) -> None:
    def lie(said: dict[str, str], tensors: dict[str, np.ndarray]) -> None:
        tensors["kv.0"] = np.full_like(tensors["kv.0"], 66)

    craft(file, lie)
    store = open_store(tmp_path / "here")
    import_agent(store, file, name="mallory")
    store.fork("mallory", "fork")
    assert talk(store, "bob", HISTORY).cached_tokens == 0
    assert talk(store, None, HISTORY).match == "exact"  # of bob's
    store.close()
    store = open_store(tmp_path / "here")
    assert talk(store, "carol", HISTORY).cached_tokens == 49  # right bytes, or `talk` would have said so
    store.close()


def test_trust_does_not_replace_what_was_computed_here(tmp_path: Path, file: Path) -> None:
    def lie(said: dict[str, str], tensors: dict[str, np.ndarray]) -> None:
        tensors["kv.0"] = np.full_like(tensors["kv.0"], 66)

    store = open_store(tmp_path / "here")
    talk(store, "bob", HISTORY)
    store.close()
    craft(file, lie)
    store = open_store(tmp_path / "here")
    import_agent(store, file, trust=True)
    assert talk(store, "carol", HISTORY[:48]).cached_tokens == 47
    store.close()


def test_an_imported_conversation_without_a_name_is_not_gone_on_from_unasked(tmp_path: Path) -> None:
    there = open_store(tmp_path / "there")
    name = talk(there, None, HISTORY).agent
    export_agent(there, name, tmp_path / "file")
    there.close()
    store = open_store(tmp_path / "here")
    import_agent(store, tmp_path / "file")
    assert (store.find(name).anonymous, store.agents.by_text) == (False, {})
    store.close()


def test_a_name_that_is_taken_is_refused_and_another_can_be_given(tmp_path: Path, file: Path) -> None:
    store = open_store(tmp_path / "here")
    talk(store, "alice", [1, 2, 3])
    refused(store, file, "'alice' exists already")
    import_agent(store, file, "alice of there")
    assert talk(store, "alice", [1, 2, 3, 4]).cached_tokens == 3
    assert talk(store, "alice of there", [*HISTORY, 1]).cached_tokens == 50
    store.close()


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        (model_ids(weights="x" * 64), "another model than fake: it needs 'fake', weights id 'wwwwwwwwwwwwwwww'"),
        (model_ids(numerics="x" * 64), "other kernels or settings .* it needs 'fake'"),
        (model_ids(kv_type="q8"), "another KV type than q8: it needs 'fake'.*KV type 'f16'"),
        (
            ModelIds("w" * 64, "n" * 64, Layout(BLOCK_TOKENS, (Group("full", 2, 8, 8, "f16", 512),)), "fake", "f16"),
            "other kernels or settings",
        ),
    ],
)
def test_another_model_is_refused_by_name(tmp_path: Path, file: Path, ids: ModelIds, reason: str) -> None:
    store = open_store(tmp_path / "here", ids=ids)
    refused(store, file, reason)
    store.close()


def test_every_truncation_and_every_altered_byte_is_refused(tmp_path: Path, file: Path) -> None:
    store = open_store(tmp_path / "here")
    whole = file.read_bytes()
    text = whole.rindex(b"}") + 2  # the rest of the header is padding
    places = [*range(0, text, 13), *range(text, len(whole), 197), len(whole) - 1]
    for at in places:
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        with pytest.raises(StoreError):
            import_agent(store, file)
        file.write_bytes(whole[:at])
        with pytest.raises(StoreError):
            import_agent(store, file)
    file.write_bytes(whole + b"\0")
    refused(store, file, "its header says")
    file.write_bytes(whole)
    import_agent(store, file)
    store.close()


def _set(**fields: str) -> Change:
    return lambda said, tensors: said.update(fields)


def _drop(field: str) -> Change:
    def drop(said: dict[str, str], tensors: dict[str, np.ndarray]) -> None:
        said.pop(field, None)
        tensors.pop(field, None)

    return drop


def _tensor(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Change:
    return lambda said, tensors: tensors.update({name: change(tensors[name])})


def _text(body: object) -> Change:
    packed = np.frombuffer(zlib.compress(json.dumps(body).encode()), np.uint8)
    return _tensor("text", lambda _: packed)


def _said(message: object) -> Change:
    return _text({"runs": [["hi", 0, 52]], "messages": [message]})


def _token(token: int) -> Change:
    """The last token, which has no KV, is another."""
    return _tensor("tokens", lambda tokens: np.append(tokens[:-1], np.uint32(token)))


def nested(depth: int) -> object:
    value: object = "x"
    for number in range(depth):
        value = [value] if number % 2 else {"k": value}
    return value


HOSTILE: dict[str, tuple[Change, str]] = {
    "another format": (_set(format="everwarm-agent"), "format is 'everwarm-agent'"),
    "a newer version": (_set(version="2"), "version '2' of the format everwarm-export, this everwarm reads 1"),
    "more KV than tokens": (_set(kv_tokens="60"), "KV of 60 tokens"),
    "less than no KV": (_set(kv_tokens="-8"), "KV of -8 tokens"),
    "more KV than blocks": (_set(kv_tokens="20"), "not those of 3 blocks"),
    "a count that is none": (_set(kv_tokens="many"), "can't be read"),
    "blocks of another size": (_set(block_tokens="16"), "not those of"),
    "blocks of no size": (_set(block_tokens="0"), "KV of 51"),
    "a name that is a path and has a NUL": (_set(name='"../../x\\u0000"'), "control characters"),
    "an empty name": (_set(name='""'), "at least one character"),
    "a long name": (_set(name=json.dumps("x" * 10_000)), "may have 256 characters"),
    "half a character": (_set(name='"\\ud800"'), "control characters"),
    "a name that is not JSON": (_set(name="alice"), "can't be read"),
    "no name": (_drop("name"), "can't be read"),
    "no tokens": (_drop("tokens"), "can't be read"),
    "no text": (_drop("text"), "not those of"),
    "no KV": (_drop("kv.0"), "not those of"),
    "a block too few": (_tensor("kv.0", lambda kv: kv[:-1]), "not those of 7 blocks"),
    "blocks of fewer bytes": (_tensor("kv.0", lambda kv: kv[:, :-1].copy()), "not those of"),
    "tokens in a square": (_tensor("tokens", lambda tokens: tokens.reshape(2, 26)), "not those of"),
    "tokens as bytes": (_tensor("tokens", lambda tokens: tokens.astype(np.uint8)), "not those of"),
    "one more tensor": (lambda said, tensors: tensors.update(more=np.zeros(3, np.uint8)), "not those of"),
    "fewer tokens than KV": (_tensor("tokens", lambda tokens: tokens[:40]), "KV of 51 tokens, but there are 40"),
    "a text of fewer tokens": (_text({"runs": [["hi", 0, 3]], "messages": None}), "does not belong"),
    "a text of negative tokens": (_text({"runs": [["hi", 0, -3], ["x", 0, 55]], "messages": None}), "does not belong"),
    "a text without runs": (_text({"messages": None}), "can't be read"),
    "a text that is a list": (_text([1, 2]), "can't be read"),
    "a text that is not packed": (_tensor("text", lambda text: text[::-1].copy()), "can't be read"),
    "a text that unpacks to a lot": (_text({"runs": [["x" * 5_000_000, 0, 52]], "messages": None}), "more than"),
    "messages that are none": (_text({"runs": [["hi", 0, 52]], "messages": ["hi"]}), "messages"),
    "messages without a role": (_said({"content": "hi"}), "each must be an object with a role"),
    "a role that is a list": (_said({"role": ["user"], "content": "hi"}), "each must be an object with a role"),
    "messages nested 79 deep": (_said({"role": "user", "content": nested(79)}), "nested more than 80 deep"),
    "messages nested 900 deep": (_said({"role": "user", "content": nested(900)}), "nested more than 80 deep"),
    "keys nested in objects": (_said({"role": "user", "x": {"y": nested(78)}}), "nested more than 80 deep"),
    "a message with no number": (_said({"role": "user", "content": "hi", "x": float("nan")}), "a number that is none"),
    "a message with half a character": (_said({"role": "user", "content": "\ud800"}), "half a character"),
    "a key with half a character": (_said({"role": "user", "\udfff": 1}), "half a character"),
    "a token beyond the vocabulary": (_token(1000), "token 1,000 is not in the model's vocabulary of 1,000"),
    "the greatest token there can be": (_token(2**32 - 1), "token 4,294,967,295 is not in the model's vocabulary"),
    "a token that is negative as an int": (_token(2**31), "token 2,147,483,648 is not in the model's vocabulary"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_exports_are_refused(tmp_path: Path, file: Path, what: str) -> None:
    change, reason = HOSTILE[what]
    craft(file, change)
    store = open_store(tmp_path / "here", vocab_size=1000)
    talk(store, "bob", HISTORY[:10])
    refused(store, file, reason)
    store.close()


def test_messages_as_deep_as_clients_may_send_them_are_taken(tmp_path: Path, file: Path) -> None:
    craft(file, _said({"role": "user", "content": nested(77)}))
    store = open_store(tmp_path / "here", vocab_size=1000)
    assert import_agent(store, file).tokens == 52
    store.close()


def test_tokens_are_checked_later_where_the_vocabulary_was_not_known(
    tmp_path: Path, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As `everwarm agents import` does it: no model is loaded. What was said is kept."""
    message = {"role": "user", "content": "hi"}

    def change(said: dict[str, str], tensors: dict[str, np.ndarray]) -> None:
        _said(message)(said, tensors)
        _token(2**32 - 1)(said, tensors)

    craft(file, change)
    store = open_store(tmp_path / "here")
    import_agent(store, file)
    store.close()
    store = open_store(tmp_path / "here", vocab_size=1000)
    with store.open_turn("alice", CAPACITY) as turn:
        assert (turn.history.ids, turn.history.runs, turn.history.messages) == ([], (), (message,))
        assert "token 4,294,967,295 is not in the model's vocabulary of 1,000" in turn.history.lost
    assert "its tokens can't be used" in caplog.text
    assert talk(store, "alice", [*HISTORY, 7]).committed
    assert talk(store, "alice", [*HISTORY, 7, 8]).cached_tokens == 51
    store.close()


def _header(text: bytes) -> bytes:
    length = -(-(8 + len(text)) // 4096) * 4096 - 8
    return length.to_bytes(8, "little") + text.ljust(length)


BEGIN = b'{"__metadata__":{"checksum":"' + b"0" * 32 + b'","format":"everwarm-export","version":"1"}'

BYTES: dict[str, bytes] = {
    "nothing": b"",
    "a few bytes": b"hello",
    "a text": b"hello, this is no export at all" * 1000,
    "a header of 2^63 bytes": (1 << 63).to_bytes(8, "little") + b"{}",
    "a header of 2^64 bytes": b"\xff" * 8 + bytes(8184),
    "a header that is not JSON": _header(BEGIN[:-1]),
    "a header without metadata": _header(b'{"tokens":{"dtype":"U32","shape":[1],"data_offsets":[0,4]}}') + bytes(4),
    "metadata that are a list": _header(b'{"__metadata__":["checksum"]}'),
    "metadata that are numbers": _header(BEGIN[:-1] + b',"kv_tokens":3}}'),
    "deep nesting": _header(BEGIN + b',"x":' + b"[" * 100_000),
    "a tensor outside": _header(BEGIN + b',"tokens":{"dtype":"U32","shape":[1],"data_offsets":[4096,4100]}}'),
    "tensors that overlap": _header(
        BEGIN + b',"tokens":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},'
        b'"text":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'
    )
    + bytes(8),
    "a negative shape": _header(BEGIN + b',"tokens":{"dtype":"U8","shape":[-4,-1],"data_offsets":[0,4]}}') + bytes(4),
    "a tensor larger than any file": _header(
        BEGIN + b',"tokens":{"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,18446744073709551616]}}'
    ),
    "a type that is none": _header(BEGIN + b',"tokens":{"dtype":"F8","shape":[4],"data_offsets":[0,4]}}') + bytes(4),
    "a type that is a list": _header(BEGIN + b',"tokens":{"dtype":[],"shape":[4],"data_offsets":[0,4]}}') + bytes(4),
    "a shape of endless dimensions": _header(
        BEGIN + b',"tokens":{"dtype":"U8","shape":[' + b"999999999," * 90_000 + b'9],"data_offsets":[0,4]}}'
    ),
    "a shape that is infinite": _header(BEGIN + b',"tokens":{"dtype":"U8","shape":[1e999],"data_offsets":[0,4]}}'),
}


@pytest.mark.parametrize("what", BYTES)
@pytest.mark.timeout(120)
def test_bytes_that_are_no_export_are_refused(tmp_path: Path, what: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(BYTES[what])
    store = open_store(tmp_path / "here")
    refused(store, path, str(path))
    store.close()


def test_things_that_are_no_files_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    store = open_store(tmp_path / "here")
    for name in ("pipe", "here", "loop", "nothing", "a\0b", "x" * 5000):
        refused(store, tmp_path / name, str(tmp_path))
    store.close()


def test_a_link_to_an_export_is_refused(tmp_path: Path, file: Path) -> None:
    (tmp_path / "link").symlink_to(file)
    store = open_store(tmp_path / "here")
    refused(store, tmp_path / "link", "is a symbolic link, expected a regular file")
    store.close()


@given(at=st.integers(0, 900), byte=st.integers(0, 255))
@settings(max_examples=60)
def test_a_header_with_any_byte_changed_and_a_right_checksum_is_refused_or_harmless(at: int, byte: int) -> None:
    data = _short_export()
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "file"
        file.write_bytes(reseal(data[: 8 + at] + bytes([byte]) + data[9 + at :]))
        store = open_store(Path(directory) / "here")
        try:
            name = import_agent(store, file).agent
        except StoreError:
            assert not list(Path(directory).glob("here/*/blocks/*"))
            assert store.agents.by_name == {}
        else:
            assert talk(store, name, HISTORY[:13]).cached_tokens == 12
        store.close()


@functools.cache
def _short_export() -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        store = open_store(Path(directory) / "there")
        talk(store, "alice", HISTORY[:12])
        export_agent(store, "alice", Path(directory) / "file")
        store.close()
        return (Path(directory) / "file").read_bytes()


def test_a_file_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Export.read

    def then_change(self: Export, progress: Any) -> Any:
        content = read(self, progress)
        with file.open("r+b") as data:
            data.seek(-1000, os.SEEK_END)
            data.write(b"!")
        return content

    monkeypatch.setattr(Export, "read", then_change)
    store = open_store(tmp_path / "here")
    refused(store, file, "changed while it was being read")
    store.close()


def test_an_import_larger_than_the_quota_is_refused_and_evicts_nothing(tmp_path: Path, file: Path) -> None:
    store = open_store(tmp_path / "here")
    talk(store, "bob", [5, *HISTORY[:20]])
    store.shared.quota = 6 * store.warm.block_bytes
    refused(store, file, "the quota is")
    store.close()


def test_an_import_does_not_push_out_what_is_pinned(tmp_path: Path, file: Path) -> None:
    store = open_store(tmp_path / "here")
    talk(store, "bob", [5, *HISTORY])
    store.pin("bob")
    store.shared.quota = 12 * store.warm.block_bytes
    refused(store, file, "quota")
    store.close()


def test_an_import_pushes_out_what_was_not_used_for_long(tmp_path: Path, file: Path) -> None:
    store = open_store(tmp_path / "here")
    talk(store, "bob", [5, *HISTORY])
    store.shared.quota = 10 * store.warm.block_bytes + 10_000
    import_agent(store, file)
    assert store.warm.bytes <= store.shared.quota
    assert talk(store, "alice", [*HISTORY, 7, 8, 9]).cached_tokens == 51
    store.close()


class Failing(Files):
    """The operation of this number fails, once."""

    def __init__(self) -> None:
        self.left = 1 << 30

    def _count(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise OSError(28, "No space left on device")


def _failing(name: str) -> Callable[..., Any]:
    def operation(self: Failing, *arguments: Any) -> Any:
        self._count()
        return getattr(Files, name)(self, *arguments)

    return operation


for _name in ("create", "write", "sync", "rename", "sync_directory"):
    setattr(Failing, _name, _failing(_name))


@pytest.mark.parametrize("trust", [False, True])
def test_an_import_that_fails_at_any_operation_leaves_nothing_behind(tmp_path: Path, file: Path, trust: bool) -> None:
    files = Failing()
    store = open_store(tmp_path / "here", files=files)
    talk(store, "bob", [5, *HISTORY])
    for number in range(1, 1000):
        files.left = number
        try:
            import_agent(store, file, trust=trust)
        except StoreError:
            assert "alice" not in {name for _, name in store.agents.by_name}
            assert len(list(tmp_path.glob("here/*/blocks/*"))) == 7
            assert len(list(tmp_path.glob("here/*/manifests/*"))) == 1
            continue
        break
    assert number > 30
    assert files.left > 0
    assert store.warm.bytes == sum(p.stat().st_size for p in tmp_path.glob("here/*/*/*"))
    files.left = 1 << 30
    assert talk(store, "alice", [*HISTORY, 7, 8, 9]).cached_tokens == 51
    store.close()
    assert store.index.pool.in_use == 0


def test_a_store_that_can_not_be_written_imports_nothing(tmp_path: Path, file: Path) -> None:
    store = open_store(tmp_path / "here")
    beside = open_store(tmp_path / "here")
    with pytest.raises(StoreError, match="is writing in it"):
        import_agent(beside, file)
    beside.close()
    store.close()
    memory = open_store(None)
    with pytest.raises(StoreError, match="switched off"):
        import_agent(memory, file)
    memory.close()


def test_a_history_that_has_lost_all_of_its_kv_moves_too(tmp_path: Path) -> None:
    store = open_store(tmp_path / "there")
    talk(store, "alice", HISTORY)
    store.close()
    for path in tmp_path.glob("there/*/blocks/*"):
        path.unlink()
    store = open_store(tmp_path / "there")
    export_agent(store, "alice", tmp_path / "file")
    store.close()
    assert load_file(tmp_path / "file")["kv.0"].shape == (0, BLOCK_TOKENS * TOKEN_BYTES)
    here = open_store(tmp_path / "here")
    import_agent(here, tmp_path / "file")
    receipt = talk(here, "alice", [*HISTORY, 1])
    assert (receipt.cached_tokens, receipt.diverged_at_token) == (0, None)
    here.close()
