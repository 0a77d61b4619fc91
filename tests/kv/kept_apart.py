"""What tests of layers with a window or a state share: a history of several marks, and the files of a store."""

from pathlib import Path

from everwarm.kv.chain import Key
from everwarm.kv.store import AgentStore
from kv.fake import BLOCK_TOKENS, directory, open_store
from kv.simulated_disk import UnsyncedFiles

EVERY = 8 * BLOCK_TOKENS
"""Tokens between two marks that all histories have in common."""
LONG = [10 + number % 97 for number in range(5 * EVERY + 3)]


def opened(root: Path) -> AgentStore:
    return open_store(root, files=UnsyncedFiles())


def files_of(store: AgentStore, kind: str) -> list[Path]:
    """Of one kind: `window`, `state`."""
    return list(directory(store).glob(f"blocks/*.{kind}.safetensors"))


def path_beside(store: AgentStore, key: Key, kind: str) -> Path:
    """Where what lies beside a block is saved."""
    return directory(store) / "blocks" / f"{key.hex()}.{kind}.safetensors"


def damage(path: Path, how: str) -> None:
    """The last byte of a file is flipped or missing, or all of it is."""
    data = bytearray(path.read_bytes())
    match how:
        case "flipped":
            data[-1] ^= 1
            path.write_bytes(data)
        case "truncated":
            path.write_bytes(data[:-1])
        case "missing":
            path.unlink()
