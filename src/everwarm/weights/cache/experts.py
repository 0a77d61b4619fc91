"""Which experts to keep: those that a pass is most likely to use next.

In: uses, pass by pass; what is kept. Out: whom to evict for an expert that was just read. Tensors of other kinds are
used once by every pass, so that a fixed choice of them is best; which experts are used changes from token to token.

How likely that is, is taken to be the mean of two averages over the passes so far: how lately an expert was used (each
pass counts half of the one after it) and how often (a pass of `OFTEN` passes ago counts half). Neighbouring tokens use
many of the same experts, so the first alone, which is nearly LRU, is good for texts that stay with their subject; the
second alone is good where tokens have nothing to do with each other. See ADR 20 for what each gives.
"""

import math
from collections.abc import Callable, Collection, KeysView, Mapping

LATELY, OFTEN = 1.0, 30.0
"""Half-lives, in passes."""

MARGIN = 1.2
"""How much likelier an expert must be than those that it replaces."""

_FAST, _SLOW = math.pow(0.5, 1 / LATELY), math.pow(0.5, 1 / OFTEN)

_Uses = tuple[int, float, float]
"""The last pass that has used an expert, and both sums of its uses as of that pass."""


def _likelihood(uses: _Uses, number: int) -> float:
    """As of a pass."""
    last, lately, often = uses
    age = number - last
    return 0.5 * ((1.0 - _FAST) * lately * math.pow(_FAST, age) + (1.0 - _SLOW) * often * math.pow(_SLOW, age))


class HotExperts:
    """Uses of experts by name, and the order in which kept ones go."""

    def __init__(
        self,
        names: Collection[str],
        sizes: Mapping[str, int],
        kept: KeysView[str],
        evictable: Callable[[str], bool],
    ) -> None:
        """`kept` are the tensors that are kept now, experts and others."""
        self.names = frozenset(names)
        self._sizes, self._kept, self._evictable = sizes, kept, evictable
        self._pass = 0
        self._uses: dict[str, _Uses] = {}
        self._leaving: list[tuple[float, str]] | None = None  # least likely last; None until a pass needs it

    def use(self, name: str) -> None:
        """This pass uses it. No lock: one entry of a dictionary is written."""
        last, lately, often = self._uses.get(name, (self._pass, 0.0, 0.0))
        age = self._pass - last
        if age or not lately:
            self._uses[name] = (self._pass, 1.0 + lately * math.pow(_FAST, age), 1.0 + often * math.pow(_SLOW, age))

    def end_pass(self) -> None:
        self._pass += 1
        self._leaving = None

    def make_way(self, needed: int, newcomer: str) -> list[str] | None:
        """Kept ones that have `needed` bytes together and are clearly less likely than the newcomer, which this pass
        has used; None if there are not so many. Those that this pass has used, too, stay.
        """
        if needed <= 0:
            return []
        if self._leaving is None:
            self._leaving = self._ranked()
        limit = _likelihood(self._uses.get(newcomer, _NEVER), self._pass) / MARGIN
        found: list[tuple[float, str]] = []
        while needed > 0 and self._leaving:
            entry = self._leaving.pop()
            likelihood, name = entry
            if name not in self._kept or self._uses.get(name, _NEVER)[0] == self._pass:
                continue
            if likelihood >= limit:
                self._leaving.append(entry)
                break
            found.append(entry)
            needed -= self._sizes[name]
        if needed > 0:
            self._leaving.extend(reversed(found))
            return None
        return [name for _, name in found]

    def make_way_for_others(self, needed: int) -> list[str] | None:
        """The least likely that have `needed` bytes together, for what every pass uses; None if all have less."""
        found: list[str] = []
        for _, name in reversed(self._ranked()) if needed > 0 else ():
            found.append(name)
            needed -= self._sizes[name]
            if needed <= 0:
                break
        return found if needed <= 0 else None

    def _ranked(self) -> list[tuple[float, str]]:
        """Kept ones with how likely they were after the last pass: each may still be used in this one."""
        number, uses = self._pass - 1, self._uses
        kept = filter(self._evictable, self._kept & self.names)
        return sorted(((_likelihood(uses.get(name, _NEVER), number), name) for name in kept), reverse=True)


_NEVER: _Uses = (0, 0.0, 0.0)
