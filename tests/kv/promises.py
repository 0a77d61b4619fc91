"""What was promised of each agent, kept as marks in the recording of what was done to files.

Marks stand between the operations in the order in which things happened. So for a crash after any operation, the marks
before it say in which states each agent may be found: the one that was acknowledged last, or one that was begun after
it. An agent that was removed and acknowledged has the state ABSENT, and no other.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from everwarm.kv.store import AgentStore
from everwarm.types import Run

Who = tuple[str, str]  # tenant and name


@dataclass(frozen=True)
class State:
    """Of an agent: its history, whether it is pinned and whether it has no name of its own."""

    tokens: tuple[int, ...] = ()
    pinned: bool = False
    anonymous: bool = False

    @property
    def text(self) -> str:
        return spelt(self.tokens)

    @property
    def may_go(self) -> bool:
        """Whether the quota may take it away at any time."""
        return self.anonymous and not self.pinned


ABSENT = State()


def spelt(tokens: Iterable[int]) -> str:
    """The text that belongs to these tokens in all tests."""
    return " ".join(map(str, tokens))


@dataclass(frozen=True)
class Begun:
    """An agent is about to change: from now on it may be found in this state, too."""

    who: Who
    state: State
    number: int


@dataclass(frozen=True)
class Born:
    """A conversation without a name is about to be saved. Its name is known afterwards."""

    tenant: str
    state: State


@dataclass(frozen=True)
class Acknowledged:
    """What was begun under this number is safe: it or something later is found from now on."""

    number: int


@dataclass(frozen=True)
class Settled:
    """From now on the agent is found in this state and no other."""

    who: Who
    state: State


class Promises:
    """The states in which each agent may be found."""

    def __init__(self) -> None:
        self._possible: dict[Who, list[tuple[int, State]]] = {}
        self._born: set[tuple[str, State]] = set()

    def copy(self) -> "Promises":
        other = Promises()
        other._possible = {who: list(states) for who, states in self._possible.items()}
        other._born = set(self._born)
        return other

    def __str__(self) -> str:
        return f"{sorted(self._possible.items())} {sorted(map(str, self._born))}"

    def note(self, mark: object) -> None:
        match mark:
            case Begun(who, state, number):
                self._possible.setdefault(who, [(0, ABSENT)]).append((number, state))
            case Born(tenant, state):
                self._born.add((tenant, state))
            case Acknowledged(number):
                for who, states in self._possible.items():
                    at = next((i for i, (begun, _) in enumerate(states) if begun == number), None)
                    if at is not None:
                        self._possible[who] = states[at:]
            case Settled(who, state):
                self._possible[who] = [(0, state)]

    @property
    def everyone(self) -> list[Who]:
        """All who were ever spoken of."""
        return list(self._possible)

    def of(self, who: Who) -> set[State]:
        states = {state for _, state in self._possible.get(who, [(0, ABSENT)])}
        return states | {ABSENT} if any(state.may_go for state in states) else states

    def check(self, found: dict[Who, State]) -> None:
        """Raises AssertionError unless these agents, and no others, may be there."""
        for who in sorted({*self._possible, *found}):
            state, promised = found.get(who, ABSENT), self.of(who)
            nameless = "-" in who[1]  # such names are made of a group and a digest
            if state in promised or (nameless and (who[0], state) in self._born):
                continue
            wanted = " or ".join(str(one) for one in sorted(promised, key=str))
            raise AssertionError(f"{who}: found {state}, promised {wanted}")


def found_in(store: AgentStore) -> dict[Who, State]:
    """Every agent that the store knows, read as a turn would read it. Its text must be that of its tokens."""
    found = {}
    for who, agent in list(store.agents.by_name.items()):
        if not (agent.generation or agent.unsaved):
            continue  # a turn has been opened and has said nothing yet
        history = store.history(agent)
        assert not history.lost, f"{who}: {history.lost}"
        state = State(tuple(history.ids), agent.pinned, agent.anonymous)
        assert history.runs == (Run(state.text, False, len(state.tokens)),), (
            f"{who}: the text is not that of its tokens"
        )
        found[who] = state
    return found
