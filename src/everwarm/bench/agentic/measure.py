"""Decode of a workload with and without drafts, in turns, so that a noisy neighbour hits both."""

import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from everwarm.bench.agentic.workloads import WORKLOADS, Task
from everwarm.bench.speed import Work, measure
from everwarm.events import End, Event
from everwarm.llm import LLM

PREFILL = Work("prefill", 512)


@dataclass(slots=True)
class Run:
    """One run of a workload: what all agents together took."""

    tok_s: float
    passes: int
    drafted: int
    accepted: int
    tokens: list[list[int]] = field(repr=False, default_factory=list)  # of each agent's answer


@dataclass(slots=True)
class Result:
    """A workload with and without drafts, run by run."""

    workload: str
    agents: int
    without: list[Run] = field(default_factory=list)
    drafted: list[Run] = field(default_factory=list)

    @property
    def tok_s(self) -> tuple[float, float]:
        """Without and with drafts, the medians."""
        return statistics.median(run.tok_s for run in self.without), statistics.median(
            run.tok_s for run in self.drafted
        )

    @property
    def ratio(self) -> float:
        """With drafts over without: the median over pairs of runs."""
        pairs = zip(self.without, self.drafted, strict=True)
        return statistics.median(drafted.tok_s / without.tok_s for without, drafted in pairs)

    @property
    def acceptance(self) -> float | None:
        """Of the rows that were computed for drafts, those that were right; None if there were none."""
        drafted = sum(run.drafted for run in self.drafted)
        return sum(run.accepted for run in self.drafted) / drafted if drafted else None

    @property
    def tokens_per_pass(self) -> float:
        tokens = sum(len(answer) for run in self.drafted for answer in run.tokens)
        return tokens / sum(run.passes for run in self.drafted)

    @property
    def same(self) -> bool:
        """Whether all runs gave the same tokens."""
        return all(run.tokens == self.without[0].tokens for run in (*self.without, *self.drafted))


def prompt_of(llm: LLM, task: Task) -> list[int]:
    """The tokens of a task as the model's chat template writes it."""
    segments, add_bos = llm.segments(messages=task.messages, tools=task.tools or None)
    return llm.tokenizer.encode(segments, add_bos=add_bos)


class Comparison:
    """One workload by so many agents at once. `llm` must have been loaded with drafts."""

    def __init__(self, llm: LLM, name: str, agents: int, max_tokens: int) -> None:
        """The prompts are computed, so that what follows is decode alone; then a short run warms up."""
        self._llm, self._max_tokens = llm, max_tokens
        self.result = Result(name, agents)
        self.tasks = [WORKLOADS[name](number) for number in range(agents)]
        self.prompts = [prompt_of(llm, task) for task in self.tasks]
        for prompt in self.prompts:
            llm.generate(tokens=prompt, max_tokens=1)
        self._both(min(max_tokens, 48))

    def run(self) -> None:
        """Once without drafts, once with them."""
        without, drafted = self._both(self._max_tokens)
        self.result.without.append(without)
        self.result.drafted.append(drafted)

    def _both(self, max_tokens: int) -> tuple[Run, Run]:
        llm, drafts = self._llm, self._llm.drafts
        assert drafts is not None, "the model was loaded without drafts"
        try:
            llm.drafts = None
            without = _run(llm, self.tasks, self.prompts, max_tokens)
        finally:
            llm.drafts = drafts
        return without, _run(llm, self.tasks, self.prompts, max_tokens)


def prefill_tok_s(llm: LLM, runs: int) -> float:
    return statistics.median(measure(llm, PREFILL) for _ in range(runs))


def _run(llm: LLM, tasks: Sequence[Task], prompts: Sequence[list[int]], max_tokens: int) -> Run:
    """All agents at once, from the first token until all have their last. Their prompts are known. The answers are not
    kept: the next run must not find them.
    """
    begun = threading.Barrier(len(tasks))
    times: list[tuple[float, float]] = []
    answers: dict[int, tuple[list[int], End]] = {}

    def answer(number: int) -> None:
        stamps, tokens = [], []
        options = {"keep": False, "max_tokens": max_tokens} | dict(tasks[number].sampling)
        begun.wait()
        for event in llm.stream(tokens=prompts[number], **options):
            if isinstance(event, Event):
                stamps.append(time.perf_counter())
                tokens.append(event.token)
            else:
                answers[number] = tokens, event
        times.append((stamps[0], stamps[-1]))

    threads = [threading.Thread(target=answer, args=(number,)) for number in range(len(tasks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    receipts = [answers[number][1].receipt for number in range(len(tasks))]
    tokens = [answers[number][0] for number in range(len(tasks))]
    return Run(
        _rate(times, tokens),
        passes=sum(receipt.passes for receipt in receipts),
        drafted=sum(receipt.drafted_tokens for receipt in receipts),
        accepted=sum(receipt.accepted_tokens for receipt in receipts),
        tokens=tokens,
    )


def _rate(times: Sequence[tuple[float, float]], tokens: Sequence[list[int]]) -> float:
    """Tokens per second."""
    begin, end = min(first for first, _ in times), max(last for _, last in times)
    return (sum(map(len, tokens)) - 1) / max(end - begin, 1e-9)
