"""What `everwarm agents why` says, on a tiny model and a real store; its estimates beside what happens."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import everwarm
from everwarm.llm import LLM, Completion
from everwarm.text.why import Explanation, explain, may_be_compared
from tiny import Tiny

TEXT = "You look after files.\n{}\n" + "\n".join(f"Rule {number}: do the right thing." for number in range(30))


@pytest.fixture
def path(tmp_path: Path, home: Path) -> Path:
    Tiny(context=4096).write(tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


@pytest.fixture
def llm(path: Path) -> Iterator[LLM]:
    with everwarm.load(path) as llm:
        yield llm


def ask(llm: LLM, line: str, *said: str, agent: str | None = None, **more: Any) -> Completion:
    roles = ("user", "assistant")
    messages = [{"role": "system", "content": TEXT.format(line)}]
    messages += [{"role": roles[number % 2], "content": text} for number, text in enumerate(said)]
    return llm.generate(messages=messages, agent=agent, max_tokens=3, temperature=0.0, **more)


def why(llm: LLM, name: str, active: tuple[str, ...] = ()) -> Explanation:
    agents = llm.agents
    manifest = agents.manifest(agents.find(name))
    others = [agents.manifest(other) for other in agents.listed("default")]
    return explain(manifest, [other for other in others if may_be_compared(other, manifest)], active)


def test_a_request_that_left_its_history_is_compared_with_that(llm: LLM) -> None:
    ask(llm, "Date: 2026-11-16", "Hi", agent="ada")
    second = ask(llm, "Date: 2026-11-17", "Hi", agent="ada")
    found = why(llm, "ada")
    assert (found.cached_tokens, found.prompt_tokens) == (second.cached_tokens, second.prompt_tokens)
    assert (found.compared_with, found.advice and found.advice.rules) == ("ada", ("dates-last",))
    assert found.difference is not None
    assert "Date: 2026-11-16" in found.difference.old
    assert "Date: 2026-11-17" in found.difference.new
    assert (found.difference.old[found.difference.column], found.difference.new[found.difference.column]) == ("6", "7")
    assert found.setting(("claude-billing-header",)) == "claude-billing-header,dates-last"


def test_the_explanation_survives_a_restart(path: Path) -> None:
    with everwarm.load(path) as llm:
        ask(llm, "Date: 2026-11-16", "Hi", agent="ada")
        ask(llm, "Date: 2026-11-17", "Hi", agent="ada")
        before = why(llm, "ada")
    with everwarm.load(path) as llm:
        assert why(llm, "ada") == before
        assert before.difference is not None


def test_a_new_conversation_is_compared_with_the_most_similar_other_one(llm: LLM) -> None:
    ask(llm, "Date: 2026-11-16", "Hi", agent="ada")
    llm.generate("You look after nothing at all.", agent="bob", max_tokens=2)
    second = ask(llm, "Date: 2026-12-24", "Something else")
    found = why(llm, second.receipt.agent)
    assert (found.compared_with, found.cached_tokens) == ("ada", second.cached_tokens)
    assert found.advice is not None


def test_a_session_that_went_on_is_explained_by_its_beginning(llm: LLM) -> None:
    ask(llm, "Date: 2026-11-16", "Hi", agent="ada")
    first = ask(llm, "Date: 2026-12-24", "Hello", agent="eve")
    third = ask(llm, "Date: 2026-12-24", "Hello", first.text, "More", agent="eve")
    found = why(llm, "eve")
    assert third.receipt.match == "extended"
    assert (found.compared_with, found.cached_tokens, found.prompt_tokens) == (
        "ada", first.cached_tokens, first.prompt_tokens,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("lines", "rules"),
    [
        (("Date: 2026-11-16", "Date: 2026-11-17"), ("dates-last",)),
        (("Working directory: /home/ada", "Working directory: /srv/bob"), ("environment-last",)),
        (("Today is 2026-11-16.\ncwd: /a", "Today is 2026-11-17.\ncwd: /b"), ("dates-last", "environment-last")),
    ],
)
def test_what_a_rule_is_said_to_save_is_what_it_saves(
    path: Path, lines: tuple[str, str], rules: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with everwarm.load(path) as llm:
        without = [ask(llm, line, "Hi", agent=f"agent {number}") for number, line in enumerate(lines)][1]
        found = why(llm, "agent 1")
    assert found.advice is not None
    assert found.advice.rules == rules
    monkeypatch.setenv("EVERWARM_HOME", str(tmp_path / "other"))
    with everwarm.load(path, prompt_rules=found.setting(())) as llm:
        with_ = [ask(llm, line, "Hi", agent=f"agent {number}") for number, line in enumerate(lines)][1]
    assert with_.receipt.rules == rules
    saved = with_.cached_tokens - without.cached_tokens
    assert abs(found.advice.saved_tokens - saved) <= 0.05 * saved + 20  # the beginning of a moved line is equal, too


def test_when_there_is_nothing_to_explain_it_says_so(llm: LLM) -> None:
    answers = {"first": ask(llm, "Be brief.", "Hi", agent="first")}
    answers["again"] = ask(llm, "Be brief.", "Hi", agent="again")
    longer = ask(llm, "Be brief.", "Hi", agent="longer")
    answers["longer"] = ask(llm, "Be brief.", "Hi", longer.text, "Hum", agent="longer")
    answers["first"] = ask(llm, "Be brief.", "Hi", answers["first"].text, "Hum", agent="first")
    llm.generate(tokens=[1, 2, 3, 4], agent="ids", max_tokens=1)
    answers["ids"] = llm.generate(tokens=[1, 2, 9, 4], agent="ids", max_tokens=1)
    for name, answer in answers.items():
        found = why(llm, name)
        assert found.difference is None
        assert found.summary.startswith("nothing to explain: ")
        assert f"{answer.cached_tokens:,} of {answer.prompt_tokens:,} tokens were reused" in found.summary
    assert "token ids" in why(llm, "ids").summary
    assert "went on from its history" in why(llm, "first").summary
    assert "no similar history" in why(llm, llm.generate("Alone", max_tokens=1).receipt.agent).summary


def test_a_longer_prompt_differs_where_the_history_was_changed(llm: LLM) -> None:
    first = ask(llm, "Be kind.", "Hi", agent="ada")
    ask(llm, "Be kind.", "Hi", "Not " + first.text, "And?", agent="ada")
    found = why(llm, "ada")
    assert found.difference is not None
    assert "assistant↵Not " in found.difference.new
    assert found.advice is None
