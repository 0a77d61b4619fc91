"""Reasoning before the answer: `<think>...</think>` and its kin, as the chat template tells.

Reasoning stands at the beginning of an answer. Many templates open it in the prompt, so that the answer begins inside.
Inside reasoning nothing is a tool call. White space next to the marks belongs to them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from everwarm.events import Content, Reasoning
from everwarm.text.output_parser import OutputParser
from everwarm.types import Segment


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The marks around reasoning."""

    begin: str
    end: str
    forced_end: str  # what a model is made to write when its budget is spent
    answer: tuple[str, str] | None = None  # marks around the answer that follows
    label: str = ""  # a word behind `begin`
    signs: tuple[str, ...] = ()  # texts in a template that tell of it; `begin` if there are none


def _pair(begin: str, end: str, *signs: str) -> ReasoningFormat:
    return ReasoningFormat(begin, end, f"\n{end}\n\n", signs=signs)


HARMONY = ReasoningFormat(
    "<|channel|>analysis<|message|>", "<|end|>", "<|end|><|start|>assistant", signs=("<|channel|>", "<|message|>")
)
"""Its own parser tells reasoning apart; this says how a budget ends it."""

_FORMATS = (
    HARMONY,
    _pair("<seed:think>", "</seed:think>", "seed:think"),
    ReasoningFormat("[THINK]", "[/THINK]", "[/THINK]"),
    ReasoningFormat("<|channel>", "<channel|>", "<channel|>", label="thought"),
    ReasoningFormat("<|inner_prefix|>", "<|inner_suffix|>", "<|inner_suffix|>"),
    ReasoningFormat(
        "<|START_THINKING|>", "<|END_THINKING|>", "<|END_THINKING|>", ("<|START_RESPONSE|>", "<|END_RESPONSE|>")
    ),
    ReasoningFormat(
        "<think>", "</think>", "\n</think>\n\n", ("<response>", "</response>"),
        signs=("<think>", "<response>", "end_of_role"),
    ),
    _pair("◁think▷", "◁/think▷"),
    _pair("<thought>", "</thought>"),
    _pair("<think>", "</think>", "</think>"),
)  # fmt: skip


def reasoning_format_of(source: str) -> ReasoningFormat | None:
    """What a template tells of; None if it tells of no reasoning."""
    return next((form for form in _FORMATS if all(sign in source for sign in form.signs or (form.begin,))), None)


def begins_inside(form: ReasoningFormat, prompt: Sequence[Segment]) -> bool:
    """Whether the prompt has opened reasoning, so that the answer begins inside."""
    tail = ""
    for segment in reversed(prompt):
        tail = segment.text + tail
        if len(tail) > 2 * len(form.begin) + 64:
            break
    return tail.rstrip().endswith(form.begin.rstrip())


@dataclass(frozen=True, slots=True)
class Thinking:
    """What a client asks for. None: as the template has it."""

    enabled: bool | None = None
    effort: str | None = None
    budget: int | None = None  # tokens of reasoning, at most

    def variables(self) -> Mapping[str, Any]:
        """For chat templates, under the names that they read."""
        enabled = self.enabled if self.effort != "none" else False
        found: dict[str, Any] = {"enable_thinking": True}
        if enabled is not None:
            found |= {"enable_thinking": enabled, "thinking": enabled}
        if self.effort not in (None, "none"):
            found["reasoning_effort"] = _EFFORTS.get(self.effort or "", self.effort)
        if self.budget is not None:
            found["thinking_budget"] = self.budget
        return found


_EFFORTS = {"minimal": "low", "xhigh": "high", "max": "high"}
"""Templates know low, medium and high."""


class ReasoningParser:
    """Tells reasoning from the answer, which another parser reads."""

    def __init__(self, form: ReasoningFormat, inner: OutputParser, *, inside: bool, controls: frozenset[str]) -> None:
        """`inside`: the prompt has opened it. `controls` are the control tokens of the vocabulary."""
        self._own = frozenset({form.begin, form.end}) & controls
        self._form = form
        self._inner = Unwrapped(form.answer, inner) if form.answer is not None else inner
        self.control_tokens = self._own | inner.control_tokens
        self._inside = inside
        self._held = ""  # not yet told apart
        self._at_start = True  # only white space has come: of the reasoning, or of the answer behind it
        self._over = False  # the answer itself has begun

    def feed(self, text: str) -> Sequence[Content]:
        if self._over and not self._at_start:
            return self._inner.feed(text)
        self._held += text
        return self._tell(ended=False)

    def control(self, name: str) -> Sequence[Content]:
        if self._inside and name == self._form.end:
            self._held = self._held.rstrip()
        before = self._tell(ended=True)
        if name not in self._own:  # it can't be quoted: what it begins is no reasoning
            if not self._over:
                self._leave()
            return [*before, *self._inner.control(name)]
        if not self._over and name == self._form.begin:
            self._inside = self._at_start = True
        elif not self._over:
            self._leave()
        return before

    def finish(self) -> Sequence[Content]:
        return [*self._tell(ended=True), *self._inner.finish()]

    def _tell(self, *, ended: bool) -> list[Content]:
        content: list[Content] = []
        if self._held and not self._inside and not self._over:
            self._open(ended)
        if self._held and self._inside:
            content += self._reasoning(ended)
        if self._held and self._over:
            content += self._answer()
        return content

    def _open(self, ended: bool) -> None:
        """At the beginning: reasoning, or the answer."""
        begun = self._held.lstrip()
        marks = [mark for mark in (self._form.begin, self._form.end) if mark not in self._own]
        for mark in marks:
            if begun.startswith(mark):
                self._held = begun[len(mark) :]
                if mark == self._form.end:
                    self._leave()
                else:
                    self._inside = True
                return
        if ended or not any(mark.startswith(begun) for mark in marks):
            self._over, self._at_start = True, False

    def _reasoning(self, ended: bool) -> list[Content]:
        form = self._form
        if self._at_start:
            self._held = self._held.lstrip()
            for known in (form.begin, form.label):  # some models repeat what the prompt has opened
                if not ended and len(self._held) < len(known) and known.startswith(self._held):
                    return []
                self._held = self._held.removeprefix(known).lstrip()
        at = -1 if form.end in self._own else self._held.find(form.end)
        if at >= 0:
            text, self._held = self._held[:at].rstrip(), self._held[at + len(form.end) :]
            self._leave()
        else:
            certain = len(self._held) if ended else certain_before(form.end, self._held)
            text, self._held = self._held[:certain], self._held[certain:]
            self._at_start = self._at_start and not text
        return [Reasoning(text)] if text else []

    def _leave(self) -> None:
        """The answer begins."""
        self._inside, self._over, self._at_start = False, True, True

    def _answer(self) -> list[Content]:
        if self._at_start:
            self._held = self._held.lstrip()
        text, self._held = self._held, ""
        if not text:
            return []
        self._at_start = False
        return list(self._inner.feed(text))


class Unwrapped:
    """An answer between marks, which are taken off; an answer without them stays as it is."""

    def __init__(self, marks: tuple[str, str], inner: OutputParser) -> None:
        self._begin, self._end = marks
        self._inner = inner
        self.control_tokens = inner.control_tokens
        self._held = ""
        self._wrapped: bool | None = None  # None: not yet known

    def feed(self, text: str) -> Sequence[Content]:
        self._held += text
        if self._wrapped is None:
            if len(self._held) < len(self._begin) and self._begin.startswith(self._held):
                return ()
            self._wrapped = self._held.startswith(self._begin)
            self._held = self._held.removeprefix(self._begin)
        return self._pass_on(self._certain())

    def control(self, name: str) -> Sequence[Content]:
        return [*self._pass_on(len(self._held)), *self._inner.control(name)]

    def finish(self) -> Sequence[Content]:
        if self._wrapped and self._held.strip() == self._end:
            self._held = ""
        return [*self._pass_on(len(self._held)), *self._inner.finish()]

    def _certain(self) -> int:
        if not self._wrapped:
            return len(self._held)
        at = self._held.find(self._end)
        if at < 0:
            return certain_before(self._end, self._held)
        behind = self._held[at + len(self._end) :]
        return len(self._held) if behind.strip() else len(self._held[:at].rstrip())

    def _pass_on(self, count: int) -> Sequence[Content]:
        text, self._held = self._held[:count], self._held[count:]
        return self._inner.feed(text) if text else ()


def certain_before(mark: str, text: str) -> int:
    """So much of a text is certain; behind it are white space and what may become the mark."""
    at = len(text)
    for start in range(max(0, len(text) - len(mark) + 1), len(text)):
        if mark.startswith(text[start:]):
            at = start
            break
    return len(text[:at].rstrip())
