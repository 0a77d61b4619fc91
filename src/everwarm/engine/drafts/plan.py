"""How many tokens of each draft are computed in a step: as many as make tokens come fastest, for all sequences.

Rows are tried in the order of their chances, the best first. After each, the step gives so many tokens on average and
takes so long; where their ratio is greatest, the step ends. If it is hardly better than without drafts, there are none.
"""

from collections.abc import Sequence

from everwarm.engine.drafts.proposal import Proposal
from everwarm.engine.drafts.row_cost import RowCost

MOST_DRAFT = 24
"""Tokens of one draft."""
LEAST_GAIN = 1.03
"""Drafts have to promise so many times the tokens per second: less would be lost to what is not foreseen."""
LONGER = 3.0
"""A step with drafts takes at most so many times as long as one without, or `STEP_S`."""
STEP_S = 0.115
"""Nobody notices a step that is no longer than this."""


def lengths(proposals: Sequence[tuple[int, Proposal]], other_rows: int, cost: RowCost) -> list[int]:
    """How many tokens of each proposal to compute. Each belongs to a sequence that decodes, behind so many tokens.
    `other_rows` are in the same step: prompts of other sequences.
    """
    chosen = [proposal.sure for _, proposal in proposals]
    candidates = [
        (-chance, number, before)
        for number, (before, proposal) in enumerate(proposals)
        for chance in proposal.chances[proposal.sure :]
    ]
    if not candidates or not cost.known:
        return chosen
    candidates.sort()
    tokens = float(len(proposals) + sum(chosen))
    rows = int(tokens) + other_rows
    depth = sum(before * (1 + sure) for (before, _), sure in zip(proposals, chosen, strict=True))
    without_s = cost.seconds(rows, depth)
    limit_s = max(STEP_S, LONGER * without_s)
    best, taken = LEAST_GAIN * tokens / without_s, 0
    for count, (chance, _, before) in enumerate(candidates, start=1):
        rows, depth, tokens = rows + 1, depth + before, tokens - chance
        seconds = cost.seconds(rows, depth)
        if seconds > limit_s:
            break
        if tokens > best * seconds:
            best, taken = tokens / seconds, count
    for _, number, _ in candidates[:taken]:
        chosen[number] += 1
    return chosen
