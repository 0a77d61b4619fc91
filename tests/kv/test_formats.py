"""docs/formats.md says what is in the files, and the `safetensors` package reads it."""

import json
import re
from pathlib import Path

import pytest
import xxhash
from safetensors import safe_open
from safetensors.numpy import load_file

from everwarm.weights.pack.file import Entry, write_pack
from kv import fake
from kv.fake import BLOCK_TOKENS, TOKEN_BYTES, export_agent, kv_bytes, open_store, talk

PAGE = (Path(__file__).parent.parent.parent / "docs" / "formats.md").read_text(encoding="utf-8")
HISTORY = list(range(100, 112))


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    store = open_store(tmp_path / "agents")
    talk(store, "alice", HISTORY)
    export_agent(store, "alice", tmp_path / "export.safetensors")
    key = store.histories.manifest(store.find("alice")).blocks[0]
    block = fake.block_path(store, key)
    store.close()
    write_pack(tmp_path / "p.safetensors", "w", [Entry("a", "vector", (2,), 8)], lambda e, b: b.fill(0), "0")
    return {
        "Block": block,
        "Manifest": next(tmp_path.glob("agents/*/manifests/*")),
        "Export": tmp_path / "export.safetensors",
        "Pack": tmp_path / "p.safetensors",
        "`model.json`": next(tmp_path.glob("agents/*/model.json")),
        "`tenants.json`": tmp_path / "agents" / "tenants.json",
    }


APART = {"kind", "positions", "ends", "lease"}
"""Only in files of models whose layers have windows or a state, or in object storage."""


def test_the_page_tells_what_other_kinds_of_layers_add(tmp_path: Path) -> None:
    with fake.having("window", "state"):
        store = open_store(tmp_path / "agents")
        for end in (20, 30, 40):
            talk(store, "alice", list(range(end)))
        store.close()
    found: set[str] = set()
    for path in (tmp_path / "agents").rglob("*.safetensors"):
        with safe_open(path, "np") as file:
            found |= set(file.metadata())
    assert found == (documented("Block", "metadata") | documented("Manifest", "metadata")) - {"lease"}


def documented(section: str, head: str) -> set[str]:
    """Names in the first column of the table with this head."""
    text = PAGE.split(f"\n## {section}\n")[1].split("\n## ")[0]
    table = text.split(f"\n| {head} |")[1].split("\n\n")[0]
    return {name for row in table.splitlines()[2:] for name in re.findall(r"`([^`]+)`", row.split("|")[1])}


@pytest.mark.parametrize("section", ["Block", "Manifest", "Export", "Pack"])
def test_metadata_are_those_of_the_page(files: dict[str, Path], section: str) -> None:
    with safe_open(files[section], "np") as file:
        assert set(file.metadata()) == documented(section, "metadata") - APART
        row = next(line for line in PAGE.splitlines() if line.startswith(f"| [{section.lower()}]"))
        assert f"`{file.metadata()['format']}`, {file.metadata()['version']} |" in row


@pytest.mark.parametrize("section", ["Block", "Manifest", "Export"])
def test_tensors_are_those_of_the_page(files: dict[str, Path], section: str) -> None:
    assert set(load_file(files[section])) == documented(section, "tensor")


def test_a_block_read_by_the_package_is_what_was_computed(files: dict[str, Path]) -> None:
    kv = load_file(files["Block"])["kv.0"]
    assert kv.tobytes() == kv_bytes(HISTORY[:BLOCK_TOKENS]).tobytes()
    with safe_open(files["Block"], "np") as file:
        assert json.loads(file.metadata()["tokens"]) == HISTORY[:BLOCK_TOKENS]


def test_a_manifest_read_by_the_package_names_its_blocks(files: dict[str, Path]) -> None:
    tensors = load_file(files["Manifest"])
    assert tensors["tokens"].tolist() == HISTORY
    assert tensors["blocks"][0].tobytes().hex() == files["Block"].stem


def test_an_export_read_by_the_package_has_a_row_per_block(files: dict[str, Path]) -> None:
    kv = load_file(files["Export"])["kv.0"]
    assert kv.shape == (2, BLOCK_TOKENS * TOKEN_BYTES)
    assert kv.tobytes()[: len(HISTORY) * TOKEN_BYTES] == kv_bytes(HISTORY).tobytes()


@pytest.mark.parametrize("section", ["Block", "Manifest", "Export"])
def test_the_checksum_is_that_of_the_whole_file_with_zeros_in_its_place(files: dict[str, Path], section: str) -> None:
    data = files[section].read_bytes()
    begin = b'{"__metadata__":{"checksum":"'
    assert data[8:].startswith(begin)
    digits = data[8 + len(begin) :][:32]
    assert xxhash.xxh3_128_hexdigest(data.replace(digits, b"0" * 32, 1)).encode() == digits
    assert (int.from_bytes(data[:8], "little") + 8) % 4096 == 0


@pytest.mark.parametrize("section", ["`model.json`", "`tenants.json`"])
def test_lists_have_a_version_and_a_checksum(files: dict[str, Path], section: str) -> None:
    file = json.loads(files[section].read_text())
    assert set(file) == {"version", "checksum", "said"}
    said = json.dumps([file["version"], file["said"]], sort_keys=True)
    assert file["checksum"] == xxhash.xxh3_128_hexdigest(said.encode())
    if section == "`model.json`":
        assert set(file["said"]) == documented(section, "in `said`")
