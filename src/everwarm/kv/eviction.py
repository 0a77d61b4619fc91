"""What goes first when memory or the quota is full. The whole policy is in this file; other files carry it out.

What somebody gave a name to is worth more than what nobody did, and what is pinned is worth most. Among equals the
longest unused goes first, and the end of a history goes before its beginning: a beginning may be shared.
"""

from enum import Enum, IntEnum, auto


class Worth(IntEnum):
    """How much a block is worth, by its owners."""

    UNNAMED = 0  # no agent with a name owns it
    NAMED = 1
    PINNED = 2


def worth(named: bool, pinned: bool) -> Worth:
    return Worth.PINNED if pinned else Worth.NAMED if named else Worth.UNNAMED


# In memory ------------------------------------------------------------------------------------------------------------


def rank_in_memory(worth: Worth, lasting: bool) -> int:
    """Ranks 0 to 2 can come back from disk or belong to nobody; ranks 3 to 5 would have to be computed again."""
    return int(worth) + (0 if lasting else 3)


RANKS = 6
WHILE_SAVING = (0, 1)
"""Ranks that leave memory while other blocks are on their way to disk: pinned ones stay if waiting may help."""
AT_REST = (0, 1, 2)
AS_A_LAST_RESORT = (0, 3, 4)
"""Nothing else can go and nothing is being saved: blocks that have to be computed again if they are wanted."""


# On disk --------------------------------------------------------------------------------------------------------------


class Stage(Enum):
    """What is deleted when the quota is full."""

    GARBAGE = auto()  # blocks that no history leads to, and files in quarantine
    EMPTY_CONVERSATIONS = auto()  # manifests without a name whose own blocks are gone
    UNNAMED_BLOCKS = auto()
    CONVERSATIONS = auto()  # histories without a name, as a whole
    OTHER_MODELS = auto()  # agents of models that are not loaded; pinned ones stay
    NAMED_BLOCKS = auto()  # their histories stay and are computed again when they are needed


FROM_DISK = tuple(Stage)
"""In this order. Pinned agents are not in it: nothing takes their blocks."""


def at_rest(anonymous: bool, used: float) -> tuple[bool, float]:
    """The order among histories of models that are not loaded: those without a name, then the longest unused."""
    return not anonymous, used
