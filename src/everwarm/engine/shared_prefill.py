"""Sequences whose prompts begin alike, at the same time: one of them computes a block, the others take it over.

Called before each step. A sequence takes over the full blocks that others have sealed since. Of those whose next block
is the same, only one computes in the step; the others wait for that block. If the one leaves, another goes on.
"""

from everwarm.engine.sequence import Sequence


def without_repetition(running: list[Sequence]) -> list[Sequence]:
    """Those that compute something of their own in the next step, in their order: all but those whose next block is
    computed by another, which has come further or is more important.
    """
    first: dict[object, Sequence] = {}
    for one in running:
        key: object = one
        if one.pending > 1 and not one.idle:  # nobody waits for what is computed ahead
            one.turn.catch_up()
            key = one.turn.next_block() or one
        best = first.get(key)
        if best is None or (one.priority, one.turn.kv.length) > (best.priority, best.turn.kv.length):
            first[key] = one
    if len(first) == len(running):
        return running
    computing = set(map(id, first.values()))
    return [one for one in running if id(one) in computing]
