"""Prompts that are given as token ids: what they spell is worked out after the last token, and kept."""

from pathlib import Path

from everwarm.llm import load
from tiny import Tiny


def test_a_history_of_token_ids_spells_what_they_decode_to(tmp_path: Path, home: Path) -> None:
    Tiny(context=256).write(tmp_path / "tiny.gguf")
    with load(tmp_path / "tiny.gguf", warm="on") as llm:
        ids = llm.tokenize("The first of two turns.")
        answer = llm.generate(tokens=ids, agent="alice", max_tokens=4, ignore_eos=True, temperature=0.0).tokens
        with llm.agents.open_turn("alice", 256) as turn:
            assert "".join(run.text for run in turn.history.runs) == llm.detokenize(ids + answer, special=True)
            assert sum(run.tokens for run in turn.history.runs) == len(ids + answer)
