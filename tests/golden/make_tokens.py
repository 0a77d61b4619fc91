"""Asks llama.cpp for the tokens of every nasty string and writes the golden files that the tests compare with.

    PYTHONPATH=src python tests/golden/make_tokens.py FAMILY=PATH[:PRE] ... [--write NAME,NAME] [--pretokenizers]

needs `llama-cpp-python`. For each family (say `llama-bpe=ggml-vocab-llama-bpe.gguf`, `deepseek-v3=tokenizer.json:deepseek-v3`)
it compares our ids with llama.cpp's on the full vocabulary and prints one line. For those named in `--write` it also
reduces the vocabulary to what the strings need, asks again, and writes `tokens/FAMILY.json.xz`: vocabulary and digests.
`--pretokenizers` does the same for every name of a pre-tokenizer, on a vocabulary made for that.
"""

import argparse
import ctypes
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import llama_cpp

sys.path.insert(0, str(Path(__file__).parents[1]))

from golden.pairs import pairs_vocabulary
from golden.token_digests import Golden, deviations, digests, write
from golden.vocabularies import Fields, load, reduce, write_gguf
from text.nasty import nasty_strings

from everwarm.text.pretokenizers import PRETOKENIZERS
from everwarm.text.tokenizer import Tokenizer

MODES = {"plain": False, "special": True}
Ids = dict[str, list[list[int]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY=PATH[:PRE]")
    parser.add_argument("--write", default="", help="families whose golden file is written")
    parser.add_argument("--keep-full", default="", help="families whose golden file refers to the full vocabulary")
    parser.add_argument("--pretokenizers", action="store_true")
    options = parser.parse_args()
    llama_cpp.llama_log_set(_quiet, ctypes.c_void_p(0))

    print(f"{'family':28} {'strings':>8} {'plain':>6} {'special':>8} {'tokens':>8} {'build s':>8}   (mismatches)")
    for family in options.families:
        name, _, rest = family.partition("=")
        path, _, pre = rest.partition(":")
        fields = load(Path(path), pre)
        asked = compare(name, fields)
        if name in options.write.split(","):
            used = {id_ for ids in asked.values() for string in ids for id_ in string}
            reduced = reduce(fields, used)
            write(Golden(name, reduced, {mode: digests(ids) for mode, ids in compare(f"{name} (reduced)", reduced).items()}))
        elif name in options.keep_full.split(","):
            write(Golden(name, {}, {mode: digests(ids) for mode, ids in asked.items()}))
    if options.pretokenizers:
        vocabulary = pairs_vocabulary()
        found = {}
        for pre in PRETOKENIZERS:
            found[pre] = digests(compare(pre, vocabulary | {"tokenizer.ggml.pre": pre}, ["plain"])["plain"])
        write(Golden("pretokenizers", {}, found))


def compare(name: str, fields: Fields, modes: Iterable[str] = MODES) -> Ids:
    """llama.cpp's ids of all strings. Prints how many of ours differ, and the first that does."""
    asked = {mode: ask(fields, MODES[mode]) for mode in modes}
    begin = time.perf_counter()
    tokenizer = Tokenizer.from_metadata(fields)
    seconds = time.perf_counter() - begin
    wrong = {mode: 0 for mode in MODES}
    first = ""
    for mode, all_ids in asked.items():
        for string, ids in zip(nasty_strings(), all_ids, strict=True):
            ours = tokenizer.encode(string, special=MODES[mode])
            if ours != ids and string not in deviations(name, mode):
                wrong[mode] += 1
                first = first or f"{mode} {string!a:.60}: llama.cpp {ids[:12]}, ours {ours[:12]}"
    print(
        f"{name:28} {len(nasty_strings()):8,} {wrong['plain']:6} {wrong['special']:8} {tokenizer.vocab_size:8,} {seconds:8.3f}",
        first,
        flush=True,
    )
    return asked


def ask(fields: Fields, special: bool) -> list[list[int]]:
    with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
        write_gguf(fields, Path(file.name))
        llama = llama_cpp.Llama(file.name, vocab_only=True, verbose=False)
        return [llama.tokenize(string.encode(), add_bos=False, special=special) for string in nasty_strings()]


@llama_cpp.llama_log_callback
def _quiet(_level: int, _text: bytes, _data: ctypes.c_void_p) -> None:
    pass


if __name__ == "__main__":
    main()
