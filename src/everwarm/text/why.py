"""Why an agent's last request reused no more: what changed in its prompt, and what would have helped.

A request that left the agent's own history is compared with that history, as it was. One that began a new conversation
is compared with the most similar other history of the tenant: most often an earlier session of the same program.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from everwarm.kv.last_turn import LastTurn, Reuse
from everwarm.kv.manifest import Manifest
from everwarm.kv.receipt import Cause
from everwarm.text.text_changes import Advice, Excerpt, NewText, TextChanges, common_characters

MOST_OTHERS = 200
"""Other histories that a new conversation is compared with, the latest used."""
SIMILAR = 0.2
"""So much of a prompt must be in another history, line by line, for it to count as similar."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """What became of a request. Without a `difference` there is nothing to explain."""

    agent: str
    summary: str  # a sentence
    prompt_tokens: int = 0
    cached_tokens: int = 0
    rules: tuple[str, ...] = ()  # that have changed the prompt
    compared_with: str | None = None  # the other agent; the same one: its own history before the request
    difference: Excerpt | None = None
    same_tokens: int = 0  # behind the difference, in both texts: another order of the text would have saved them
    advice: Advice | None = None

    def setting(self, active: Sequence[str]) -> str | None:
        """The value of `--prompt-rules` that switches on what is advised, beside the rules that are on."""
        return None if self.advice is None else ",".join([*active, *self.advice.rules])

    def as_json(self, active: Sequence[str]) -> dict[str, Any]:
        advice = None
        if self.advice is not None:
            advice = asdict(self.advice) | {"prompt_rules": self.setting(active)}
        return asdict(self) | {"advice": advice}


def may_be_compared(other: Manifest, agent: Manifest) -> bool:
    """Whether a history of the same model was there when the agent began."""
    same = other.tenant == agent.tenant and other.name != agent.name
    return same and other.created <= agent.created


def explain(agent: Manifest, others: Iterable[Manifest], active: Sequence[str] = ()) -> Explanation:
    """`agent` and `others`, which are read only if they are needed, have their text. `active`: rules that are on."""
    last = agent.last
    if last is None and agent.generation > 1:
        return Explanation(agent.name, "nothing to explain: nothing was kept of its last request")
    if last is not None and last.left is not None:
        return _own_change(agent, last, active)
    if last is None or last.cause in (Cause.NEW, Cause.SHARED):
        reuse = last.reuse if last is not None else Reuse(len(agent.tokens), 0)
        return _other_change(agent, reuse, others, active, "its request")
    first = last.first
    if (
        last.cause in (Cause.EXTENDED, Cause.EXACT)
        and first is not None
        and first.cached_tokens < first.prompt_tokens / 2
    ):
        begun = _other_change(agent, first, others, active, "its last request went on from its history; its first one")
        if begun.difference is not None:
            return begun
    return _nothing(agent, last.reuse, _why_nothing(last), last.rules)


def _why_nothing(last: LastTurn) -> str:
    if last.cause in (Cause.EXTENDED, Cause.EXACT):
        return "its last request went on from its history"
    if last.cause == Cause.DIVERGED:
        return f"its last request was sent as token ids, which {last.reason}"
    return f"its prompt did not change, but KV was missing: {last.reason}"


def _nothing(agent: Manifest, reuse: Reuse, why: str, rules: tuple[str, ...] = ()) -> Explanation:
    summary = f"nothing to explain: {why}; {reuse.cached_tokens:,} of {reuse.prompt_tokens:,} tokens were reused"
    return Explanation(agent.name, summary, reuse.prompt_tokens, reuse.cached_tokens, rules)


def _own_change(agent: Manifest, last: LastTurn, active: Sequence[str]) -> Explanation:
    assert last.left is not None
    new = NewText(agent.runs, last.reuse.prompt_tokens)
    old = new.text[: last.left.begin] + last.left.text  # what stands before is equal
    return _explained(agent, last.reuse, old, new, agent.name, active, "its last request", last.rules)


def _other_change(
    agent: Manifest, reuse: Reuse, others: Iterable[Manifest], active: Sequence[str], who: str
) -> Explanation:
    new = NewText(agent.runs, reuse.prompt_tokens)
    found = _most_similar(new.text, others)
    rules = () if agent.last is None else agent.last.rules
    if found is None:
        return _nothing(agent, reuse, "no similar history was known when it began", rules)
    return _explained(agent, reuse, _text(found), new, found.name, active, who, rules)


def _explained(
    agent: Manifest, reuse: Reuse, old: str, new: NewText, with_: str, active: Sequence[str], who: str,
    rules: tuple[str, ...],
) -> Explanation:  # fmt: skip
    changes = TextChanges(old, new, _first_of_user(agent.messages, new.text))
    if not changes.differ:
        return _nothing(agent, reuse, f"its prompt and the history of {with_!r} begin with the same text", rules)
    excerpt = changes.excerpt()
    before = "its own history as it was" if with_ == agent.name else f"the most similar other history, {with_!r},"
    summary = (
        f"{who} reused {reuse.cached_tokens:,} of {reuse.prompt_tokens:,} tokens; "
        f"{before} differs from it at character {excerpt.character:,}, in line {excerpt.line:,}"
    )
    return Explanation(
        agent.name, summary, reuse.prompt_tokens, reuse.cached_tokens, rules, with_, excerpt, changes.same_tokens(),
        changes.advice([*active, *rules]),
    )  # fmt: skip


def _most_similar(text: str, others: Iterable[Manifest]) -> Manifest | None:
    """The history that has most of the lines of a text; of several, the one with which it has most in common from the
    beginning.
    """
    lines = {line for line in text.split("\n") if line.strip()}
    whole = sum(map(len, lines))
    best: tuple[float, int] = (0.0, 0)
    found = None
    for other in others:
        said = _text(other)
        known = lines.intersection(said.split("\n"))
        score = sum(map(len, known)) / whole if whole else 0.0, common_characters(text, said)
        if score[0] >= SIMILAR and score > best:
            best, found = score, other
    return found


def _text(manifest: Manifest) -> str:
    return "".join(run.text for run in manifest.runs)


def _first_of_user(messages: Sequence[Any] | None, text: str) -> int | None:
    """Where the first message of the user begins in a rendered text; None if it can't be told."""
    at = 0
    for message in messages or ():
        role, content = (
            (message.get("role"), _plain(message.get("content"))) if isinstance(message, Mapping) else ("", "")
        )
        if role == "user":
            found = re.search(rf"(?<!\w){re.escape(content[:200])}", text[at:]) if content else None
            return None if found is None else at + found.start()
        end = content[-200:]
        at = max(at, text.find(end, at) + len(end))  # what a rule has changed may not be there as it was sent
    return None


def _plain(content: object) -> str:
    """The first text of a message."""
    parts = content if isinstance(content, list) else [content]
    texts = (part.get("text") if isinstance(part, Mapping) else part for part in parts)
    return next((text.strip() for text in texts if isinstance(text, str)), "")
