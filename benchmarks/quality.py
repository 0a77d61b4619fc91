"""Proves that our kernels cost no quality: perplexity per tensor type beside our f32 reference and beside llama.cpp.

    .venv/bin/python benchmarks/quality.py                      # everything; about half an hour on two cores
    .venv/bin/python benchmarks/quality.py --types Q4_0,Q8_0 --tokens 1024 --skip-reference

All files hold the same weights: SmolLM2, dequantised to F16 and quantised anew by llama.cpp; `original` is the file as
it came. Its width of 576 is no multiple of 256, so llama.cpp replaces most K-quants in it by other types. So they are
measured `padded` too: the same model 768 wide, with 12 heads over 4. What is added is zero, and weights and epsilon of
the norms are scaled to undo the mean over more elements, so it computes the same (checked when it is made).

All runners see the same token ids in the same windows; log-softmax is taken in f64. Behind ± stands the standard error
of the mean difference, token by token: what is not well above it is noise. The ceiling is the reference: 0 % over it.
Exits with 1 if a limit is exceeded: 0.3 % over the reference, 0.3 % over llama.cpp, 0.2 % over f16 KV with q8 KV (q4 is
measured only; beside both stands llama.cpp with KV of that type). The files (2 GB) stay in --models-dir.

llama.cpp runs in the environment that `make peers` builds. Without it, its column and all files that it has not made
yet are left out.
"""

import argparse
import json
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

HERE = Path(__file__).resolve().parent
PEERS = HERE.parent / ".venv-peers" / "bin" / "python"
PROSE = HERE.parent / "tests" / "data" / "prose.txt"
TYPES = ("original", "Q4_0", "Q4_1", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0", "F16")
K_QUANTS = ("Q4_K_M", "Q5_K_M", "Q6_K")
SUPER_BLOCK = 256  # elements; rows of K-quants are multiples of it
KV_MEASURED = ("original", "padded Q4_K_M")
LIMITS = {("f16", "reference"): 0.003, ("f16", "llama.cpp"): 0.003, ("q8", "f16 KV"): 0.002}  # (KV, over what)
MAX_PADDING_DIFFERENCE = 0.01  # of a logit: nothing but the order of additions may differ

Nll = npt.NDArray[np.float64]  # negative log-likelihood of each predicted token


@dataclass(frozen=True)
class Row:
    """One file with one type of KV: native kernels beside what they are compared with."""

    file: str
    kv: str
    tensors: str
    native: Nll
    others: dict[str, Nll]  # of `reference`, `llama.cpp`, `f16 KV`

    def over(self, other: str) -> tuple[float, float]:
        """How much higher our perplexity is, relative to the other's, and the standard error of that."""
        difference = self.native - self.others[other]
        return math.expm1(difference.mean()), float(difference.std(ddof=1)) / math.sqrt(len(difference))

    def exceeded(self) -> list[str]:
        limits = {other: limit for (kv, other), limit in LIMITS.items() if kv == self.kv and other in self.others}
        return [
            f"{self.file}, {self.kv} KV: {over:+.2%} over {other}, limit {limit:.1%}"
            for other, limit in limits.items()
            if not (over := self.over(other)[0]) <= limit
        ]

    def as_json(self) -> dict[str, Any]:
        row = {"file": self.file, "kv": self.kv, "tensors": self.tensors, "native_ppl": perplexity(self.native)}
        for other, nll in self.others.items():
            over, error = self.over(other)
            row[other] = {"ppl": perplexity(nll), "native_over": over, "standard_error": error}
        return row


def main() -> None:
    from everwarm import config
    from everwarm.pull import resolve

    parser = argparse.ArgumentParser(description="Perplexity per tensor type beside the reference and llama.cpp.")
    parser.add_argument("--model", default="smollm2", help="name or path of a llama-shaped GGUF; default: %(default)s")
    parser.add_argument("--models-dir", type=Path, default=Path("~/.cache/everwarm/quality").expanduser())
    parser.add_argument("--types", default=",".join(TYPES), help="comma-separated; default: %(default)s")
    parser.add_argument("--tokens", type=int, default=8192, help="to predict; default: %(default)s")
    parser.add_argument("--window", type=int, default=1024, help="tokens predicted in a row; default: %(default)s")
    parser.add_argument("--skip-reference", action="store_true", help="leave out the f32 reference")
    parser.add_argument("--skip-llama", action="store_true", help="leave out llama.cpp (it still makes the files)")
    parser.add_argument("--skip-kv", action="store_true", help="leave out q8 and q4 KV")
    options = parser.parse_args()
    types = options.types.split(",")
    if unknown := [name for name in types if name not in TYPES]:
        parser.error(f"--types: {', '.join(unknown)} unknown; choose from {', '.join(TYPES)}")
    if options.window < 1 or options.tokens < 2:
        parser.error("--window must be at least 1, --tokens at least 2")
    if not PEERS.exists():
        tell("llama.cpp is not here: its column and files not made yet are left out; to have them, run `make peers`")

    model = resolve(options.model, config.home())
    windows = cut(model, options.tokens, options.window)
    rows: list[Row] = []
    for file in [name for type_ in types for name in ([type_, f"padded {type_}"] if type_ in K_QUANTS else [type_])]:
        if path := model if file == "original" else make(file, model, options.models_dir):
            rows += measure(file, path, windows, options)
        else:
            tell(f"{file}: left out, llama.cpp is needed to make it")
    exceeded = [line for row in rows for line in row.exceeded()]
    show(rows)
    print("\n".join(f"LIMIT EXCEEDED: {line}" for line in exceeded) or "all within the limits")
    report = {"benchmark": "quality", "model": model.name, "tokens": options.tokens, "window": options.window}
    print(json.dumps(report | {"rows": [row.as_json() for row in rows], "exceeded": exceeded}))
    sys.exit(bool(exceeded))


def measure(file: str, path: Path, windows: list[list[int]], options: argparse.Namespace) -> list[Row]:
    """A row with f16 KV and, for some files, rows with q8 and q4 KV."""
    rows: list[Row] = []
    for kv in ("f16", "q8", "q4") if file in KV_MEASURED and not options.skip_kv else ("f16",):
        tell(f"{file}, {kv} KV: native")
        native = everwarm_nll(path, windows, backend="native", kv_type=kv)
        others: dict[str, Nll] = {"f16 KV": rows[0].native} if rows else {}
        if not rows and not options.skip_reference:
            tell(f"{file}: reference")
            others["reference"] = everwarm_nll(path, windows, backend="reference")
        if PEERS.exists() and not options.skip_llama:
            tell(f"{file}, {kv} KV: llama.cpp")
            others["llama.cpp"] = np.array(json.loads(in_peers("peer_nll", str(path), kv, given=json.dumps(windows))))
        tensors = ", ".join(f"{name} {count}" for name, count in tensor_types(path).most_common())
        rows.append(Row(file, kv, tensors, native, others))
    return rows


def cut(model: Path, tokens: int, window: int) -> list[list[int]]:
    """Windows of token ids; the first of each is given, the others are predicted."""
    import everwarm

    with everwarm.load(model, backend="reference") as llm:
        ids = llm.tokenize(PROSE.read_text(encoding="utf-8"))
    windows = []
    for low in range(0, tokens, window):
        size = min(window, tokens - low) + 1
        windows.append(ids[:size])
        ids = ids[size:]
        if len(windows[-1]) < size:
            raise SystemExit(f"--tokens {tokens}: {PROSE.name} has too few; give a smaller number")
    return windows


def everwarm_nll(path: Path, windows: Sequence[Sequence[int]], **settings: str) -> Nll:
    import everwarm

    with everwarm.load(path, pack="off", **settings) as llm:  # type: ignore[arg-type]
        return np.concatenate([nll_of(llm.logits(window), window) for window in windows])


def peer_nll(path: str, kv: str) -> None:
    """Runs in the environment of the peers: windows on stdin, what llama.cpp makes of them on stdout."""
    import llama_cpp

    windows = json.load(sys.stdin)
    kind = {"f16": llama_cpp.GGML_TYPE_F16, "q8": llama_cpp.GGML_TYPE_Q8_0, "q4": llama_cpp.GGML_TYPE_Q4_0}[kv]
    kv_options = {"type_k": kind, "type_v": kind, "flash_attn": kv != "f16"}  # quantised values need flash attention
    llm = llama_cpp.Llama(path, n_ctx=max(map(len, windows)), n_batch=512, logits_all=True, verbose=False, **kv_options)
    result: list[float] = []
    for window in windows:
        llm.reset()
        llm.eval(window)
        result += nll_of(llm.scores[: len(window)], window).tolist()
    print(json.dumps(result))


def nll_of(logits: npt.NDArray[np.float32], window: Sequence[int], rows: int = 128) -> Nll:
    """Of every token but the first, in f64; `rows` at a time, because a vocabulary is wide."""
    parts = []
    for low in range(0, len(window) - 1, rows):
        targets = np.asarray(window[low + 1 : low + 1 + rows])
        part = logits[low : low + len(targets)].astype(np.float64)
        part -= part.max(-1, keepdims=True)
        parts.append(np.log(np.exp(part).sum(-1)) - part[np.arange(len(part)), targets])
    return np.concatenate(parts)


def perplexity(nll: Nll) -> float:
    return math.exp(nll.mean())


def make(file: str, model: Path, models_dir: Path) -> Path | None:
    """The path of a file such as `padded Q4_K_M`, made if it is not there. None if that needs a missing llama.cpp."""
    target = models_dir / f"{model.stem}.{file.replace(' ', '.')}.gguf"
    padded, type_ = file.startswith("padded"), file.split()[-1]
    if target.exists():
        return target
    if type_ == "F16":
        tell(f"writing {target}")
        models_dir.mkdir(parents=True, exist_ok=True)
        write_f16(model, target, padded)
        if padded and (plain := make("F16", model, models_dir)):
            check_padding(plain, target)
        return target
    if not PEERS.exists():
        return None
    source = make("padded F16" if padded else "F16", model, models_dir)
    tell(f"writing {target}")
    in_peers("peer_quantise", str(source), str(target), type_)
    if padded and not all(used.endswith("_K") for used in tensor_types(target)):
        raise SystemExit(f"{target}: expected K-quants only, found {tensor_types(target)}")
    return target


def peer_quantise(source: str, target: str, type_: str) -> None:
    """Runs in the environment of the peers: llama.cpp's own quantiser."""
    import make_model

    make_model.quantise(Path(source), Path(target), make_model.TYPES[type_], os.cpu_count() or 1)


def write_f16(model: Path, target: Path, padded: bool) -> None:
    """The model with its matrices in F16. With `padded`, all widths become multiples of 256 and the function stays."""
    from everwarm.weights.dequant.dequant import dequantize
    from everwarm.weights.gguf.file import GGUFFile

    fields = {name: one for name, one in gguf.GGUFReader(model).fields.items() if not name.startswith("GGUF.")}
    values = {name: one.contents() for name, one in fields.items()}
    if values.pop("general.architecture") != "llama":
        raise SystemExit(f"{model}: only the tensors of llama are known here")
    width, feed_forward = values["llama.embedding_length"], values["llama.feed_forward_length"]
    heads, kv_heads = values["llama.attention.head_count"], values["llama.attention.head_count_kv"]
    head_dim, shared = width // heads, heads // kv_heads
    new_width, new_feed_forward = width, feed_forward
    if padded:
        new_width, new_feed_forward = (math.ceil(old / SUPER_BLOCK) * SUPER_BLOCK for old in (width, feed_forward))
        while kv_heads * shared * head_dim % SUPER_BLOCK:
            kv_heads += 1
    values["general.file_type"] = int(gguf.LlamaFileType.MOSTLY_F16)
    values["llama.embedding_length"], values["llama.feed_forward_length"] = new_width, new_feed_forward
    values["llama.attention.head_count"], values["llama.attention.head_count_kv"] = kv_heads * shared, kv_heads
    values["llama.attention.layer_norm_rms_epsilon"] *= width / new_width

    query, key_value = kv_heads * shared * head_dim, kv_heads * head_dim
    rows = {"attn_q": query, "attn_k": key_value, "attn_v": key_value}
    rows |= {"ffn_gate": new_feed_forward, "ffn_up": new_feed_forward, "attn_output": new_width, "ffn_down": new_width}
    columns = {"attn_output": query, "ffn_down": new_feed_forward}

    partial = target.with_name(target.name + ".partial")
    writer = gguf.GGUFWriter(partial, "llama")
    for name, value in values.items():
        kind, *of = fields[name].types  # of an array: also that of its items
        writer.add_key_value(name, value, kind, of[-1] if of else None)
    with GGUFFile(model) as opened:
        for name, info in opened.tensors.items():
            tensor = dequantize(opened.data(name), info.type, info.shape)
            role = name.split(".")[-2]
            shape = [*(rows.get(role, old) for old in tensor.shape[:-1]), columns.get(role, new_width)]
            tensor = np.pad(tensor, [(0, new - old) for new, old in zip(shape, tensor.shape, strict=True)])
            if tensor.ndim == 1:  # of a norm: it divides by the mean over the new width, which is lower
                writer.add_tensor(name, tensor * np.float32(math.sqrt(width / new_width)))
            else:
                writer.add_tensor(name, tensor.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.replace(target)


def check_padding(model: Path, padded: Path) -> None:
    import everwarm

    with everwarm.load(model, backend="reference") as plain, everwarm.load(padded, backend="reference") as wide:
        ids = plain.tokenize(PROSE.read_text(encoding="utf-8"))[:256]
        difference = float(np.abs(plain.logits(ids) - wide.logits(ids)).max())
    tell(f"{padded.name}: its logits differ by at most {difference:.1e} from those of {model.name}")
    if not difference <= MAX_PADDING_DIFFERENCE:
        padded.unlink()
        raise SystemExit(f"{padded}: padding changed what the model computes")


def tensor_types(path: Path) -> Counter[str]:
    """How many matrices have which type."""
    from everwarm.weights.gguf.file import GGUFFile

    with GGUFFile(path) as opened:
        return Counter(info.type.name for info in opened.tensors.values() if len(info.shape) > 1)


def in_peers(function: str, *arguments: str, given: str = "") -> str:
    """Call a function of this file in the environment of the peers, with `given` on stdin; returns what it prints."""
    command = [str(PEERS), "-c", f"import sys, quality; quality.{function}(*sys.argv[1:])", *arguments]
    environment = os.environ | {"PYTHONPATH": str(HERE)}
    result = subprocess.run(command, env=environment, input=given, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(f"{result.stderr}\nllama.cpp failed with exit code {result.returncode}")
    return result.stdout


def show(rows: Sequence[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    others = [name for name in ("reference", "llama.cpp", "f16 KV") if any(name in row.others for row in rows)]
    headers = [cell for other in others for cell in (other, "native over it")]
    table = Table("file", "KV", "tensors", "native", *headers, box=None, header_style="bold")
    for row in rows:
        cells = [row.file, row.kv, row.tensors, f"{perplexity(row.native):.3f}"]
        for other in others:
            if other in row.others:
                over, error = row.over(other)
                cells += [f"{perplexity(row.others[other]):.3f}", f"{over:+.2%} ± {error:.2%}"]
            else:
                cells += ["", ""]
        table.add_row(*cells)
    Console(highlight=False, width=150).print(table)


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
