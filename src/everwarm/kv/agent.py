"""An agent in memory, and which names an agent may have."""

from dataclasses import dataclass, field

from everwarm.errors import StoreError
from everwarm.kv.index.tree import Node
from everwarm.kv.manifest import Manifest
from everwarm.waiting import Line

MOST_NAME = 256


@dataclass(slots=True, eq=False)
class Agent:
    """What is kept in memory of an agent. Its text is read from disk when a turn begins."""

    tenant: str
    name: str
    anonymous: bool = False
    group: str = ""
    pinned: bool = False
    final: bool = False  # a point of a history: it never changes
    generation: int = 0
    tokens: int = 0
    kv_tokens: int = 0
    salt: bytes = b""
    leaf: Node | None = None  # the end of its chain
    beside: list[Node] = field(default_factory=list)  # what lies beside its chain, where it can be gone on from
    created: float = 0.0
    used: float = 0.0
    text_digest: str = ""
    answers: tuple[str, ...] = ()  # digests of the texts that its answers follow
    unsaved: Manifest | None = None  # not on disk, or newer than what is there
    turn: Line[None] = field(default_factory=Line)
    waiting: int = 0  # turns that are open or wait

    @property
    def known(self) -> bool:
        """Whether it has a history."""
        return bool(self.generation or self.unsaved)

    @property
    def talks(self) -> bool:
        """Whether somebody owns its turn."""
        return bool(self.turn.inside)

    def chain(self) -> list[Node]:
        return self.leaf.path() if self.leaf else []

    def owned(self) -> list[Node]:
        """All that it owns: what lies beside its chain, then the chain."""
        return [*self.beside, *self.chain()]


def check_name(name: str, what: str) -> str:
    """The name, if it is 1 to 256 characters without control characters and surrogates. Raises StoreError."""
    if not isinstance(name, str) or not name:
        raise StoreError(f"{what}: a name must be a text of at least one character")
    if len(name) > MOST_NAME:
        raise StoreError(f"{what} {name[:20]!r}...: a name may have {MOST_NAME} characters, this has {len(name):,}")
    if any(ord(letter) < 32 or ord(letter) == 127 or 0xD800 <= ord(letter) < 0xE000 for letter in name):
        raise StoreError(f"{what} {name!r}: a name must not have control characters")
    return name
