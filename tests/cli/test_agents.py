"""`everwarm agents`: what it prints, what it changes, what it refuses."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from everwarm.cli.app import run
from everwarm.errors import StoreError
from everwarm.kv.disk.directory import DirectoryStore
from everwarm.kv.store import AgentStore
from everwarm.kv.tools.export import export_agent
from everwarm.kv.tools.import_ import import_agent
from everwarm.llm import load
from everwarm.types import Run
from kv.fake import model_ids, open_store, talk
from kv.test_export import craft
from tiny import Tiny

Cli = Callable[..., tuple[int, str, str]]
HISTORY = list(range(100, 150))
Q8 = model_ids(numerics="q" * 64, kv_type="q8")


@pytest.fixture
def cli(home: Path, capfd: pytest.CaptureFixture[str]) -> Cli:
    def call(*arguments: object) -> tuple[int, str, str]:
        capfd.readouterr()
        code = run(["agents", *(str(argument) for argument in arguments)])
        sys.stdout.flush()
        captured = capfd.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def root(home: Path) -> Path:
    """Alice and bob, and someone without a name."""
    root = home / "agents"
    store = open_store(root)
    talk(store, "alice", HISTORY)
    talk(store, "bob", [*HISTORY, 1])
    talk(store, None, HISTORY[5:20])
    store.close()
    return root


@pytest.fixture
def other_model(root: Path) -> Path:
    """Alice of another model, too."""
    store = open_store(root, ids=Q8)
    talk(store, "alice", HISTORY[:30])
    store.close()
    return root


def names(cli: Cli) -> list[str]:
    return sorted(row["agent"] for row in json.loads(cli("ls", "--json")[1])["agents"])


def words(text: str) -> str:
    return " ".join(text.split())


class TestLooking:
    """Commands that only read work beside a process that writes."""

    @pytest.fixture(autouse=True)
    def held(self, root: Path) -> Iterator[None]:
        held = DirectoryStore(root).lock()
        yield
        held.release()

    def test_ls_hides_those_without_a_name(self, cli: Cli) -> None:
        code, out, _ = cli("ls")
        assert code == 0
        assert "alice" in out
        assert "anonymous" not in out
        assert "2 agents, 1 without a name" in words(out)
        assert "anonymous" in cli("ls", "--all")[1]

    def test_ls_json_has_rows_and_totals(self, cli: Cli, root: Path) -> None:
        answer = json.loads(cli("ls", "--json", "--all")[1])
        row = next(row for row in answer["agents"] if row["agent"] == "bob")
        assert (row["tokens"], row["kv_tokens"], row["blocks"], row["lost_blocks"]) == (51, 51, 7, 0)
        assert (row["model"], row["kv_type"], row["tenant"], row["pinned"]) == ("fake", "f16", "default", False)
        assert row["shared_bytes"] == 6 * (4096 + 512)
        files = [path for path in root.rglob("*") if path.is_file()]
        totals = answer["totals"]
        assert (totals["agents"], totals["anonymous"], totals["quarantined"]) == (3, 1, 0)
        assert totals["blocks"] == len([path for path in files if path.parent.name == "blocks"])
        assert totals["bytes"] == sum(path.stat().st_size for path in files)

    def test_show_tells_of_blocks_that_are_lost(self, cli: Cli, root: Path) -> None:
        answer = json.loads(cli("show", "bob", "--json")[1])
        manifest = json.loads(cli("show", "alice", "--json")[1])
        assert (answer["lost"], answer["generation"], answer["weights_id"]) == ([], 1, "w" * 64)
        assert manifest["messages"] is None
        for path in sorted(root.glob("*/blocks/*"))[:3]:
            path.unlink()
        assert json.loads(cli("show", "bob", "--json")[1])["lost_blocks"] >= 1
        assert "lost blocks" in cli("show", "bob")[1]

    def test_verify(self, cli: Cli) -> None:
        code, out, _ = cli("verify")
        assert code == 0
        assert "3 agents: all as it was written" in words(out)

    def test_gc_dry_run(self, cli: Cli) -> None:
        code, _, err = cli("gc", "--dry-run")
        assert (code, err) == (0, "0 files, 0 bytes could go\n")

    def test_export(self, cli: Cli, tmp_path: Path) -> None:
        code, out, _ = cli("export", "alice", tmp_path / "file")
        assert (code, out) == (0, f"{tmp_path / 'file'}\n")

    @pytest.mark.parametrize(
        "arguments",
        [
            ("rm", "alice"), ("rm", "--all"), ("fork", "alice", "carol"), ("pin", "alice"), ("verify", "--repair"),
            ("gc",), ("evict", "alice"),
        ],
    )  # fmt: skip
    def test_commands_that_write_say_who_holds_the_lock(self, cli: Cli, arguments: tuple[str, ...]) -> None:
        code, out, err = cli(*arguments)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert f"process {os.getpid()}" in err
        assert "is writing in it" in err


class TestChanging:
    def test_rm_removes_agents_and_their_blocks(self, cli: Cli, root: Path) -> None:
        assert cli("rm", "bob", "--dry-run")[2].startswith("would remove bob of fake")
        assert names(cli) == ["alice", "bob"]
        answer = json.loads(cli("rm", "bob", "--json")[1])
        assert [row["agent"] for row in answer["removed"]] == ["bob"]
        assert names(cli) == ["alice"]
        assert cli("rm", "--all")[0] == 0
        assert list(root.glob("*/*/*.safetensors")) == []

    def test_rm_of_several_removes_none_if_one_is_unknown(self, cli: Cli, root: Path) -> None:
        code, _, err = cli("rm", "alice", "nobody")
        assert (code, err.count("\n")) == (2, 1)
        assert names(cli) == ["alice", "bob"]

    def test_fork_and_pin(self, cli: Cli, root: Path) -> None:
        assert cli("fork", "alice", "carol")[0] == 0
        assert cli("pin", "carol")[0] == 0
        assert json.loads(cli("show", "carol", "--json")[1])["pinned"] is True
        assert json.loads(cli("pin", "carol", "--off", "--json")[1])["pinned"] is False
        assert json.loads(cli("show", "carol", "--json")[1])["pinned"] is False
        code, _, err = cli("fork", "alice", "carol")
        assert (code, err.count("\n")) == (2, 1)

    def test_evict_says_that_nothing_is_in_memory(self, cli: Cli, root: Path) -> None:
        code, out, err = cli("evict", "alice")
        assert (code, out) == (0, "")
        assert "nothing is in memory" in err
        assert json.loads(cli("evict", "alice", "--json")[1])["freed_bytes"] == 0

    def test_verify_names_what_is_damaged_and_repair_mends_it(self, cli: Cli, root: Path) -> None:
        path = sorted(root.glob("*/blocks/*"))[0]
        path.write_bytes(path.read_bytes()[:-1] + b"!")
        code, out, _ = cli("verify")
        assert code == 1
        assert f"DAMAGED {path}: checksum" in words(out)
        report = json.loads(cli("verify", "--json")[1])
        assert (report["clean"], [finding["path"] for finding in report["damaged"]]) == (False, [str(path)])
        assert cli("verify", "--repair")[0] == 0
        assert cli("verify")[0] == 0
        assert names(cli) == ["alice", "bob"]

    def test_gc_removes_what_it_said_it_would(self, cli: Cli, root: Path) -> None:
        (root / ".x.1.part").write_bytes(b"half")
        said = cli("gc", "--dry-run")[1]
        assert said.startswith("would remove")
        assert cli("gc")[1] == said.replace("would remove", "removed")
        assert not (root / ".x.1.part").exists()

    def test_gc_by_age_and_quota(self, cli: Cli, root: Path) -> None:
        store = open_store(root, clock=lambda: 0.0)
        store.pin("alice")
        talk(store, "bob", [*HISTORY, 1, 2])  # long ago
        store.close()
        plan = json.loads(cli("gc", "--dry-run", "--json", "--warm-quota", "20KiB")[1])
        assert plan["excess"] > 0
        assert plan["dry_run"] is True
        cli("gc", "--warm-age", 1)
        assert names(cli) == ["alice"]

    def test_an_agent_of_several_models_needs_a_choice(self, cli: Cli, other_model: Path) -> None:
        code, _, err = cli("rm", "alice")
        assert (code, err.count("\n")) == (2, 1)
        assert f"{Q8.directory} (fake, q8)" in err
        assert cli("rm", "alice", "--model", Q8.directory)[0] == 0
        assert json.loads(cli("show", "alice", "--json")[1])["kv_type"] == "f16"

    def test_tenants_see_their_own(self, cli: Cli, root: Path) -> None:
        store = open_store(root)
        talk(store, "alice", HISTORY, tenant="them")
        store.close()
        assert json.loads(cli("show", "alice", "--tenant", "them", "--json")[1])["tenant"] == "them"
        assert cli("rm", "--all", "--tenant", "them")[0] == 0
        assert names(cli) == ["alice", "bob"]


class TestMoving:
    def test_an_export_is_imported_by_name_only_once(self, cli: Cli, root: Path, tmp_path: Path) -> None:
        cli("export", "alice", tmp_path / "file")
        code, _, err = cli("import", tmp_path / "file")
        assert (code, err.count("\n")) == (2, 1)
        assert "--as" in err
        moved = json.loads(cli("import", tmp_path / "file", "--as", "carol", "--json")[1])
        assert (moved["agent"], moved["tokens"], moved["blocks"]) == ("carol", 50, 7)
        assert names(cli) == ["alice", "bob", "carol"]

    def test_the_model_that_is_needed_is_named(self, cli: Cli, tmp_path: Path) -> None:
        there = open_store(tmp_path / "there", ids=Q8)
        talk(there, "alice", HISTORY)
        export_agent(there, "alice", tmp_path / "file")
        there.close()
        code, _, err = cli("import", tmp_path / "file")
        assert (code, err.count("\n")) == (2, 1)
        assert "it needs 'fake', weights id 'wwwwwwwwwwwwwwww'" in err
        assert "KV type 'q8', which has not run here; known are: none" in err

    def test_a_quota_that_is_too_small_is_refused(self, cli: Cli, root: Path, tmp_path: Path) -> None:
        cli("export", "alice", tmp_path / "file")
        code, _, err = cli("import", tmp_path / "file", "--as", "carol", "--warm-quota", "20KiB")
        assert (code, err.count("\n")) == (2, 1)
        assert "quota" in err
        assert names(cli) == ["alice", "bob"]

    def test_foreign_files_are_refused_in_one_line(self, cli: Cli, root: Path, tmp_path: Path) -> None:
        (tmp_path / "text").write_text("hello, this is no export")
        for path in (tmp_path / "text", tmp_path / "nothing", tmp_path, next(root.glob("*/blocks/*")), "a\0b", ""):
            code, out, err = cli("import", path)
            assert (code, out, err.count("\n")) == (2, "", 1), err


def test_bad_names_are_refused_in_one_line(cli: Cli, root: Path) -> None:
    for name in ("../../etc/passwd", "", "x" * 10_000, "🦊", "a\0b", "\x1b[31m", "line\nfeed"):
        for arguments in (("show", name), ("rm", name), ("fork", "alice", name), ("pin", name), ("evict", name)):
            if arguments[0] == "fork" and name in ("../../etc/passwd", "🦊"):
                continue
            code, out, err = cli(*arguments)
            assert (code, out, err.count("\n")) == (2, "", 1), err
            assert "\x1b" not in err
    assert cli("rm")[0] == 2
    assert cli("rm", "alice", "--all")[0] == 2
    assert cli("gc", "--warm-quota", "much")[0] == 2
    assert names(cli) == ["alice", "bob"]


def test_what_manifests_say_does_not_steer_the_terminal(cli: Cli, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everwarm.kv.store.check_name", lambda name, what: name)
    store = open_store(home / "agents", ids=model_ids().__class__(**{
        **{field: getattr(model_ids(), field) for field in ("weights_id", "numerics_id", "layout", "kv_type")},
        "name": "[bold]m\x1b]0;title\x07",
    }))  # fmt: skip
    hostile = "[/b] \x1b[31m\x9b2J\r\n\u202e[link=http://x]\ud800"
    with store.open_turn(hostile, 100) as turn:
        turn.acquire([1, 2])
        turn.append([3])
        said = {"role": hostile, "content": [{"type": "text", "text": hostile}, hostile, {"image": hostile}, None]}
        turn.commit((Run("x", False, 3),), (said, "no message", None))
    store.close()
    for arguments in (("ls",), ("ls", "--json"), ("show", hostile), ("show", hostile, "--json")):
        code, out, err = cli(*arguments)
        assert code == 0
        assert not set("\x1b\x9b\r\u202e\x07") & set(out + err)
        assert "[/b]" in out + err
    code, _, err = cli("ls", "--model", "none")
    assert (code, err.count("\n"), "\x1b" in err) == (2, 1, False)
    monkeypatch.undo()


def test_a_conversation_is_shown(cli: Cli, home: Path, tmp_path: Path) -> None:
    Tiny().write(tmp_path / "tiny.gguf")
    with load(tmp_path / "tiny.gguf", threads=1) as llm:
        llm.generate(messages=[{"role": "user", "content": "Hi [bold]\nthere"}], agent="alice", max_tokens=3)
    code, out, _ = cli("show", "alice")
    assert code == 0
    assert "\nuser:\nHi [bold]\nthere\n\nassistant:\n" in out


def test_an_imported_agent_answers_exactly_as_at_home(
    cli: Cli, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Tiny(context=512).write(tmp_path / "tiny.gguf")
    first = [{"role": "user", "content": "Tell me a story of a fox. " * 8}]

    def answer(agent: str, messages: list[dict[str, Any]]) -> tuple[list[Any], Any]:
        with load(tmp_path / "tiny.gguf", threads=2, restore="always") as llm:
            events = list(llm.stream(messages=messages, agent=agent, max_tokens=12, ignore_eos=True, top_logprobs=5))
            said = [*messages, {"role": "assistant", "content": "".join(event.text for event in events[:-1])}]
            again = [*said, {"role": "user", "content": "And then?"}]
            more = list(llm.stream(messages=again, agent=agent, max_tokens=12, ignore_eos=True, top_logprobs=5))
            return more[:-1], more[-1].receipt

    def goes_on(agent: str) -> tuple[list[Any], Any]:
        with load(tmp_path / "tiny.gguf", threads=1, restore="always") as llm:
            again = [*llm.conversation(agent), {"role": "user", "content": "Really?"}]
            events = list(llm.stream(messages=again, agent=agent, max_tokens=12, ignore_eos=True, top_logprobs=5))
            return events[:-1], events[-1].receipt

    answer("alice", first)
    assert cli("export", "alice", tmp_path / "alice")[0] == 0
    monkeypatch.setenv("EVERWARM_HOME", str(tmp_path / "elsewhere"))
    code, _, err = cli("import", tmp_path / "alice")
    assert (code, "has not run here" in err) == (2, True)
    with load(tmp_path / "tiny.gguf", threads=1) as llm:
        llm.generate("x", max_tokens=1)
    assert cli("import", tmp_path / "alice")[0] == 0
    away, receipt = goes_on("alice")
    assert (receipt.tier, receipt.match) == ("warm", "extended")
    assert receipt.cached_tokens > 250
    monkeypatch.setenv("EVERWARM_HOME", str(home))
    at_home, told = goes_on("alice")
    assert away == at_home  # tokens, texts and logarithms of probabilities
    assert told.tokens_digest == receipt.tokens_digest
    with load(tmp_path / "tiny.gguf", threads=1) as llm:
        ids = llm.agents.histories.manifest(llm.agents.find("alice")).tokens
        cold = list(llm.stream(tokens=[int(i) for i in ids[:-12]], cache=False, max_tokens=12, ignore_eos=True))
    assert [event.token for event in cold[:-1]] == [event.token for event in away]


@pytest.mark.parametrize("trust", [False, True])
def test_only_a_trusted_import_is_shared(
    cli: Cli, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trust: bool
) -> None:
    there = open_store(tmp_path / "there")
    talk(there, "alice", HISTORY)
    export_agent(there, "alice", tmp_path / "file")
    there.close()
    open_store(home / "agents").close()
    assert cli("import", tmp_path / "file", *(["--trust"] if trust else []))[0] == 0
    store = open_store(home / "agents")
    assert talk(store, "bob", HISTORY).cached_tokens == (49 if trust else 0)
    store.close()


def test_a_store_of_someone_else_is_one_line(cli: Cli, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object, path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("everwarm.kv.disk.lock.StoreLock.__init__", refuse)
    for arguments in (("rm", "alice"), ("gc",), ("verify", "--repair")):
        code, out, err = cli(*arguments)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert "Permission denied" in err


def test_nothing_is_made_where_there_is_nothing(cli: Cli, home: Path) -> None:
    for arguments in (("ls",), ("verify",), ("verify", "--repair"), ("gc",), ("gc", "--dry-run")):
        assert cli(*arguments)[0] == 0
    assert cli("rm", "--all")[0] == 0
    assert not home.exists()


def test_a_reader_that_goes_away_is_no_error(home: Path, root: Path) -> None:
    code = "from everwarm.cli import main; main()"
    command = f"{sys.executable} -c '{code}' agents ls --json | head -c 1"
    result = subprocess.run(["sh", "-c", command], capture_output=True, timeout=60, check=False)
    assert result.stderr == b""


def test_python_can_export_and_import(home: Path, tmp_path: Path) -> None:
    Tiny().write(tmp_path / "tiny.gguf")
    with load(tmp_path / "tiny.gguf", threads=1) as llm:
        llm.generate("Hello", agent="alice", max_tokens=3)
        assert isinstance(llm.agents, AgentStore)
        moved = export_agent(llm.agents, "alice", tmp_path / "alice")
        assert import_agent(llm.agents, tmp_path / "alice", "bob").tokens == moved.tokens
        with pytest.raises(StoreError, match="exists already"):
            import_agent(llm.agents, tmp_path / "alice")
        assert llm.generate("Hello", agent="bob", max_tokens=3).receipt.match == "exact"


@pytest.mark.parametrize("token", [260, 2**31, 2**32 - 1])
def test_tokens_beyond_the_vocabulary_are_refused_by_a_loaded_model_and_ignored_by_a_later_one(
    cli: Cli, home: Path, tmp_path: Path, token: int
) -> None:
    """`everwarm agents import` knows no vocabulary, so the model must notice when the agent talks."""
    Tiny(context=256).write(tmp_path / "tiny.gguf")
    first = [{"role": "user", "content": "Tell me a story."}]
    with load(tmp_path / "tiny.gguf", threads=1) as llm:
        llm.generate(messages=first, agent="alice", max_tokens=8, ignore_eos=True)
        export_agent(llm.agents, "alice", tmp_path / "file")

    def lie(said: dict[str, str], tensors: dict[str, np.ndarray]) -> None:
        tensors["tokens"] = tensors["tokens"].copy()
        tensors["tokens"][5:] = token

    craft(tmp_path / "file", lie)
    with load(tmp_path / "tiny.gguf", threads=1) as llm:
        with pytest.raises(StoreError, match=f"token {token:,} is not in the model's vocabulary of 260"):
            import_agent(llm.agents, tmp_path / "file", "bob")
        with pytest.raises(StoreError, match="no such agent"):
            llm.agents.find("bob")
    assert cli("import", tmp_path / "file", "--as", "bob")[0] == 0
    assert cli("show", "bob")[0] == 0
    with load(tmp_path / "tiny.gguf", threads=1) as llm:
        again = [*llm.conversation("bob"), {"role": "user", "content": "And then?"}]
        assert again[:1] == first
        found = llm.generate(messages=again, agent="bob", max_tokens=8, ignore_eos=True)
        assert found.tokens == llm.generate(messages=again, cache=False, max_tokens=8, ignore_eos=True).tokens
        assert found.receipt.committed
        assert f"token {token:,} is not in the model's vocabulary" in str(found.receipt.reason)


# why ------------------------------------------------------------------------------------------------------------------


def test_why_shows_the_difference_and_what_would_have_helped(cli: Cli, home: Path, tmp_path: Path) -> None:
    Tiny(context=1024).write(tmp_path / "tiny.gguf")
    rules = "\n".join(f"Rule {number}: do it well." for number in range(10))
    with load(tmp_path / "tiny.gguf") as llm:
        for date in ("2026-11-16", "2026-11-17"):
            system = {"role": "system", "content": f"Help.\nDate: {date}\n[red]{rules}"}
            messages = [system, {"role": "user", "content": "Hi"}]
            llm.generate(messages=messages, agent="ada", max_tokens=2, temperature=0.0)
    code, out, err = cli("why", "ada")
    assert (code, err) == (0, "")
    old, new, caret = (
        next(at for at in out.splitlines() if at.strip().startswith(word)) for word in ("old", "new", "^")
    )
    assert "Date: 2026-11-16" in old
    assert "[red]" in new
    assert (old[caret.index("^")], new[caret.index("^")]) == ("6", "7")
    assert "--prompt-rules claude-billing-header,dates-last" in out
    assert "Another order would have saved about" in out
    shown = json.loads(cli("why", "ada", "--json")[1])
    assert shown["advice"]["rules"] == ["dates-last"]
    assert shown["difference"]["line"] == 3


def test_why_says_when_there_is_nothing_to_explain(cli: Cli, root: Path) -> None:
    code, out, _ = cli("why", "bob")
    assert code == 0
    assert "Nothing to explain: " in out
    assert "50 of 51 tokens were reused" in out
    code, _, err = cli("why", "nobody")
    assert (code, "no such agent" in err) == (2, True)
