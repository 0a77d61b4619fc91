"""Write the table of docs/models.md: every architecture, and how near we are to two other programs on its tiny models.

    python scripts/models_page.py

The models and what transformers and llama.cpp compute on them are in tests/golden/oracles. What is between the marks is
replaced; the rest of the page, with measured speeds, is written by hand.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from everwarm.kernels import _native
from everwarm.kernels.native import NativeBackend
from everwarm.model.architectures import ARCHITECTURES
from golden.oracles.case import TOKENS, Case
from golden.oracles.cases import CASES
from golden.oracles.quantise import as_q4_1
from model.test_transformer import logits, opened

PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- table: begin (python scripts/models_page.py) -->", "<!-- table: end -->"


def errors(case: Case, folder: Path) -> tuple[float, float, float, str]:
    """Of the reference backend (greatest), the native one (median) and the native one with packed matrices (median),
    each relative to the spread of the logits; and the share of tokens that llama.cpp finds most likely, too.
    """
    golden, path = dict(np.load(case.golden)), case.unpack(folder)
    tokens = golden["tokens"].tolist()

    def apart(found: np.ndarray) -> np.ndarray:
        return np.asarray(np.abs(found[:: case.step, TOKENS] - golden["logits"]).max(-1) / golden["std"])

    def native(path: Path) -> np.ndarray:
        backend = NativeBackend(_native.supported_isas()[0], 1, "f16")
        return apart(logits(opened(path, backend, case.context), tokens))

    found = logits(opened(path, context=case.context), tokens)
    same = "-"
    if not case.no_llama_cpp:
        clear = golden["llama_cpp_margin"] > 2 * (2e-3 + golden["llama_cpp_difference"]) * golden["std"]
        best = found[:: case.fine_step].argmax(-1)
        same = f"{(best == golden['llama_cpp_best'])[clear].mean():.0%} of {clear.sum()}"
    packed = as_q4_1(path, folder / f"{case.name}-packed.gguf")
    return float(apart(found).max()), float(np.median(native(path))), float(np.median(native(packed))), same


def main() -> None:
    rows = [
        "| architecture | tiny model | reference | native, f32 weights | native, packed | same token as llama.cpp |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    with tempfile.TemporaryDirectory() as folder:
        for name in ARCHITECTURES:
            for case in (case for case in CASES if case.architecture == name):
                reference, native, packed, same = errors(case, Path(folder))
                rows.append(f"| `{name}` | {case.name} | {reference:.0e} | {native:.1e} | {packed:.2f} | {same} |")
                print(rows[-1], file=sys.stderr)
    page = PAGE.read_text()
    before, after = page.split(BEGIN)[0], page.split(END)[1]
    PAGE.write_text(before + BEGIN + "\n\n" + "\n".join(rows) + "\n\n" + END + after)


if __name__ == "__main__":
    main()
