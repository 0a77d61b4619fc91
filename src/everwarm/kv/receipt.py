"""What an answer says about its cache: where its prefix came from, how much of it, and why not more."""

from dataclasses import dataclass


@dataclass(slots=True)
class Receipt:
    """Filled in as the turn goes on; whole when it ends."""

    agent: str
    tier: str = "cold"  # hot, warm (something was read from disk) or cold (nothing was reused)
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, not computed again
    match: str = "none"  # exact, extended, diverged, shared (another history's prefix), none
    reason: str = ""  # in words: why so many and not more
    diverged_at_token: int | None = None
    diverged_at_char: int | None = None  # of the rendered text, where a template or a client changed earlier turns
    restored_bytes: int = 0
    restored_blocks: int = 0
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
