"""Asks llama.cpp for the tokens of every nasty string and writes the golden files that the tests compare with.

    PYTHONPATH=src .venv-peers/bin/python tests/golden/make_tokens.py FAMILY=PATH[:PRE] ... [options]

For each family (`llama-bpe=ggml-vocab-llama-bpe.gguf`, `deepseek-v3=tokenizer.json:deepseek-v3`,
`gpt-oss=o200k_base.tiktoken:gpt-4o`) it compares our tokens with llama.cpp's on the full vocabulary and prints one line
of mismatches. For the families in `--write` it reduces the
vocabulary to what the strings need, asks again, and writes `tokens/FAMILY.json.xz`: the small vocabulary and digests.
Those in `--write-full` are written without their vocabulary. `--pretokenizers` writes digests for every name of a
pre-tokenizer, on a vocabulary made for that. Needs the environment that `make peers` builds.
"""

import argparse
import ctypes
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import llama_cpp

sys.path.insert(0, str(Path(__file__).parents[1]))

from everwarm.text.pretokenizers import PRETOKENIZERS
from everwarm.text.tokenizer import Tokenizer
from golden.pairs import pairs_vocabulary
from golden.token_digests import Golden, deviations, digest, digests, write
from golden.vocabularies import Fields, load, reduce, write_gguf
from text.nasty import nasty_strings

MODES = {"plain": False, "special": True}
UNREADABLE = b"[UNK_BYTE_0x"  # what llama.cpp shows for a token that is not written in the byte alphabet


class Peer:
    """A vocabulary in llama.cpp."""

    def __init__(self, fields: Fields) -> None:
        with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
            write_gguf(fields, Path(file.name))
            self._llama = llama_cpp.Llama(file.name, vocab_only=True, verbose=False)
        self._vocab = llama_cpp.llama_model_get_vocab(self._llama.model)
        self._size = llama_cpp.llama_vocab_n_tokens(self._vocab)

    def ids(self, mode: str) -> list[list[int]]:
        return [self._llama.tokenize(text.encode(), add_bos=False, special=MODES[mode]) for text in nasty_strings()]

    def pieces(self, special: bool) -> list[bytes]:
        buffer = ctypes.create_string_buffer(1 << 16)
        lengths = (
            llama_cpp.llama_token_to_piece(self._vocab, id_, buffer, len(buffer), 0, special)
            for id_ in range(self._size)
        )
        return [buffer.raw[:length] for length in lengths]

    def facts(self) -> dict[str, Any]:
        vocab = self._vocab
        return {
            "bos_id": llama_cpp.llama_vocab_bos(vocab),
            "eos_id": llama_cpp.llama_vocab_eos(vocab),
            "eog_ids": [id_ for id_ in range(self._size) if llama_cpp.llama_vocab_is_eog(vocab, id_)],
            "add_bos": llama_cpp.llama_vocab_get_add_bos(vocab),
            "add_eos": llama_cpp.llama_vocab_get_add_eos(vocab),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY=PATH[:PRE]")
    parser.add_argument("--write", default="", metavar="FAMILY,...")
    parser.add_argument("--write-full", default="", metavar="FAMILY,...")
    parser.add_argument("--pretokenizers", action="store_true")
    options = parser.parse_args()
    llama_cpp.llama_log_set(_quiet, ctypes.c_void_p(0))

    print("family                        strings  plain  special  pieces  facts   tokens  build s")
    for family in options.families:
        name, _, rest = family.partition("=")
        path, _, pre = rest.partition(":")
        fields = load(Path(path), pre, name)
        golden, ids = compare(name, fields)
        if name in options.write.split(","):
            golden, _ = compare(name, reduce(fields, {id_ for one in ids for id_ in one}), note=" (reduced)")
            write(golden)
        elif name in options.write_full.split(","):
            write(Golden(name, {}, golden.facts, golden.digests))
    if options.pretokenizers:
        vocabulary = pairs_vocabulary()
        answers = {pre: compare(pre, vocabulary | {"tokenizer.ggml.pre": pre})[0] for pre in PRETOKENIZERS}
        add_bos = [pre for pre, golden in answers.items() if golden.facts["add_bos"]]
        plain = {pre: golden.digests["plain"] for pre, golden in answers.items()}
        write(Golden("pretokenizers", {}, {"add_bos": add_bos}, plain))


def compare(name: str, fields: Fields, note: str = "") -> tuple[Golden, list[list[int]]]:
    """llama.cpp's answers, and its ids of all strings. Prints how many of ours differ, and the first that does."""
    peer = Peer(fields)
    begin = time.perf_counter()
    ours = Tokenizer.from_metadata(fields)
    seconds = time.perf_counter() - begin

    asked = {mode: peer.ids(mode) for mode in MODES}
    wrong = [
        (mode, text, ids)
        for mode, answers in asked.items()
        for text, ids in zip(nasty_strings(), answers, strict=True)
        if ids != ours.encode(text, special=MODES[mode]) and text not in deviations(name, mode)
    ]
    pieces = {special: peer.pieces(special) for special in (False, True)}
    wrong_pieces = [
        (special, id_)
        for special, answers in pieces.items()
        for id_, piece in enumerate(answers)
        if piece != ours.token_bytes(id_, special=special) and not piece.startswith(UNREADABLE)
    ]
    facts = peer.facts()
    wrong_facts = [key for key, value in facts.items() if value != _plain(getattr(ours, key))]
    facts["pieces"] = [digest(b"\0".join(pieces[special])) for special in (False, True)]

    counts = [sum(1 for mode, *_ in wrong if mode == which) for which in MODES]
    print(
        f"{name + note:28} {len(nasty_strings()):8,} {counts[0]:6} {counts[1]:8} {len(wrong_pieces):7} "
        f"{len(wrong_facts):6} {ours.vocab_size:8,} {seconds:8.3f}",
        *wrong_facts,
        *wrong_pieces[:1],
        *wrong[:1],
        flush=True,
    )
    answers = {mode: digests(ids) for mode, ids in asked.items()}
    return Golden(name, fields, facts, answers), [ids for mode in MODES for ids in asked[mode]]


def _plain(value: object) -> object:
    """A value of ours as llama.cpp gives it."""
    return -1 if value is None else sorted(value) if isinstance(value, frozenset) else value


@llama_cpp.llama_log_callback
def _quiet(_level: int, _text: bytes, _data: ctypes.c_void_p) -> None:
    pass


if __name__ == "__main__":
    main()
