"""What an answer says about its cache: where its prefix came from, how much of it, and why not more."""

from dataclasses import dataclass
from enum import StrEnum

COLD_BELOW = 0.1
"""A prompt of which a smaller share was reused counts as cold: it takes about as long as one that is new."""


class Cause(StrEnum):
    """Why so much of a prompt was reused and not more, as one of a few words. Metrics use them as labels."""

    EXACT = "exact"  # all of it
    EXTENDED = "extended"  # the whole history, and the prompt goes on
    DIVERGED = "diverged"  # the prompt differs from the history
    SHARED = "shared"  # the beginning of another history
    NEW = "new"  # nothing of it was ever computed
    INCOMPATIBLE = "incompatible"  # of another model, KV type, numerics or version
    EVICTED = "evicted"  # it was known once
    RECOMPUTED = "recomputed"  # it is known, but computing was sooner, or memory was short
    LOST = "lost"  # a file is damaged, gone, or can't be read
    OFF = "off"  # nothing was looked up


@dataclass(frozen=True, slots=True)
class Why:
    """A cause, and the details in words."""

    cause: Cause
    text: str


@dataclass(slots=True)
class Receipt:
    """Filled in as the turn goes on; complete when it ends."""

    agent: str
    tier: str = "cold"  # hot, warm (something was read from disk), cold (less than `COLD_BELOW` was reused)
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, not computed again
    known_tokens: int = 0  # of the prompt, computed before: more than the cached ones where windows are not kept there
    match: str = "none"  # exact, extended, diverged, shared (another history's prefix), none
    cause: Cause = Cause.NEW
    reason: str = ""  # the cause in words, with its details
    diverged_at_token: int | None = None
    diverged_at_char: int | None = None  # of the rendered text, where a template or a client changed earlier turns
    restored_bytes: int = 0
    restored_blocks: int = 0
    computing_s: float | None = None  # what computing the cached tokens would take, about, as measured; None: not known
    lookup_s: float = 0.0
    restore_s: float = 0.0
    read_s: float = 0.0  # of all readers together: several read at a time
    verify_s: float = 0.0
    tokens_digest: str = ""  # of the prompt's token ids: exactness is defined over them
    exact: bool = True  # whether this backend computes the same bits with and without a cache
    committed: bool | None = None  # None: not yet known
    saved_bytes: int = 0
    save_s: float = 0.0  # from the last token until the turn was safe
    error: str | None = None  # why it was not saved
    replayed_answers: int = 0  # came back spelt anew and keep the tokens that they were sampled with
    passes: int = 0  # steps of the engine that gave tokens of the answer; with the accepted ones, as many as it has
    drafted_tokens: int = 0  # computed ahead of the answer, in the hope that they come
    accepted_tokens: int = 0  # of these right
    tool_format: str | None = None  # how the answer's calls were written: as in `--tool-parser`, or `lenient`

    rules: tuple[str, ...] = ()  # the rules (`--prompt-rules`) that changed the prompt

    @property
    def hardly_reused(self) -> bool:
        return self.cached_tokens < COLD_BELOW * self.prompt_tokens

    def explain(self, why: Why) -> None:
        self.cause, self.reason = why.cause, why.text
