"""What a receipt says about the cache: how the prompt and the history fit, and why no more of it was reused.

In: a receipt with its counts, the history, and what went wrong while blocks were looked up. Out: the match, the cause
and the reason in the receipt, and what is kept of them with the agent.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from everwarm.kv.agent import Agent
from everwarm.kv.histories import Histories, History
from everwarm.kv.index.tree import common_tokens
from everwarm.kv.last_turn import LastTurn, Left, Reuse
from everwarm.kv.receipt import Cause, Receipt, Why


@dataclass(frozen=True, slots=True)
class Asked:
    """Whose prompt it is, and what is known of its past."""

    tokens: bytes  # big-endian
    tenant: str
    agent: Agent | None
    origin: Agent | None  # whose history it goes on from
    history: History
    wholly_known: bool  # all of its tokens were computed before


def explain(receipt: Receipt, asked: Asked, why: Why | None, histories: Histories) -> None:
    """Say in the receipt how the prompt and the history fit, and what kept more from being reused. `why`: what the
    look-up says about that.
    """
    history = asked.history
    common, known = common_tokens(history.tokens, asked.tokens), len(history.tokens) // 4
    if known and common < min(known, receipt.prompt_tokens):
        receipt.diverged_at_token = common
    fit = _compare(receipt, common, known, asked.wholly_known)
    receipt.match, found = fit or ("none", histories.why_unknown(asked.tenant, asked.agent))
    if not receipt.cached_tokens and known:
        receipt.match = "none"
    expected = min(common, history.kv_tokens, receipt.prompt_tokens - 1)
    if history.lost:
        why = why or Why(Cause.LOST, history.lost)
    elif receipt.cached_tokens >= expected:
        why = None
    elif why is None and receipt.cached_tokens < receipt.known_tokens:
        why = _why_computed_again(receipt, [position for position in history.positions if position <= common])
    elif why is None and known and asked.origin is not None:
        why = histories.index.why_lost(asked.origin.chain(), receipt.cached_tokens)
    receipt.explain(why or found)


def _why_computed_again(receipt: Receipt, positions: Sequence[int]) -> Why:
    """Of tokens whose windows or states are not there. `positions`: where they were kept when the history was saved."""
    known, cached = receipt.known_tokens, receipt.cached_tokens
    words = (
        f"known up to token {known:,}, it can be gone on from {cached:,}: {known - cached:,} tokens are computed again"
    )
    if gone := [position for position in positions if cached < position <= known]:
        return Why(Cause.EVICTED, f"what was kept at token {gone[-1]:,} is not there any more; {words}")
    return Why(Cause.RECOMPUTED, words)


def _compare(receipt: Receipt, common: int, known: int, wholly_known: bool) -> tuple[str, Why] | None:
    """How the prompt and a history of `known` tokens, `common` of them in common, fit. None: nothing is known."""
    if wholly_known and receipt.cached_tokens == receipt.prompt_tokens - 1:
        return "exact", Why(Cause.EXACT, "exact")
    if known and receipt.diverged_at_token is not None:
        at = "" if receipt.diverged_at_char is None else f", character {receipt.diverged_at_char}"
        return "diverged", Why(Cause.DIVERGED, f"diverged at token {common}{at}")
    if known:
        return "extended", Why(Cause.EXTENDED, "extended")
    if receipt.cached_tokens:
        return "shared", Why(Cause.SHARED, "prefix of another history")
    return None


def count_shared(receipt: Receipt, tokens: int) -> None:
    """So many tokens of the prompt were computed by another turn while this one was on its way."""
    receipt.cached_tokens += tokens
    if receipt.tier == "cold" and not receipt.hardly_reused:
        receipt.tier = "hot"
    if receipt.match == "none":
        receipt.match = "shared"
        receipt.explain(Why(Cause.SHARED, "computed for another request at the same time"))


def last_turn(receipt: Receipt, history: History, *, forked: bool, token_s: float | None = None) -> LastTurn:
    """What is kept to explain this turn later. `history`: as it was before; `forked`: it is another agent's. `token_s`:
    what computing a token of it takes.
    """
    before, at = history.last, receipt.diverged_at_char
    first = None if before is None or forked else before.first or before.reuse
    return LastTurn(
        Reuse(receipt.prompt_tokens, receipt.cached_tokens),
        receipt.cause,
        receipt.reason,
        receipt.rules,
        Left.of(history.runs, at) if at is not None and history.runs else None,
        first,
        token_s,
    )
