"""Make the golden cases: a tiny model of each architecture, and what transformers and llama.cpp compute on it.

    make oracles                      all of them
    make oracles CASES='gemma2 phi3'  some

Runs in the environment of `make peers`. For each case it checks that the two programs agree, and that every mistake
that the case names changes the logits; what it has found is in `data/report.json`.
"""

import json
import lzma
import re
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from golden.oracles.case import FOLDER, SHAPE, STEP, TOKENS, Case  # isort: skip
from golden.oracles.cases import CASES  # isort: skip
from golden.oracles.convert import convert  # isort: skip  # puts the right gguf package first
from golden.oracles.levels import fill  # isort: skip
from golden.oracles.rounding import f16_cache, inputs_of_8_bits  # isort: skip

from golden.oracles.mtp import add_mtp  # isort: skip
from golden.oracles.mxfp4 import pack_experts  # isort: skip

import llama_cpp
import numpy as np
import torch
import transformers
from gguf import GGUFReader

REPORT = FOLDER / "data" / "report.json"
LEAST_CHANGE = 0.02
"""What a mistake must change in some logit, relative to their spread."""
MOST_DIFFERENCE = 2e-3
"""Between the two programs, relative to the spread of the logits."""
MOST_WITH_TABLE = 5e-3
"""The same where both look up GELU in f16: a last bit of f32 may decide which entry is taken."""


def main(names: list[str]) -> None:
    unknown = set(names) - {case.name for case in CASES}
    if unknown:
        sys.exit(f"no such case: {', '.join(sorted(unknown))}")
    report = json.loads(REPORT.read_text()) if REPORT.exists() else {}
    failed = []
    for case in CASES:
        if names and case.name not in names:
            continue
        try:
            report[case.name] = make(case)
        except Exception as error:  # the others are made all the same
            failed.append(case.name)
            print(f"{case.name} FAILED: {type(error).__name__}: {error}", flush=True)
            continue
        print(f"{case.name}: {json.dumps(report[case.name])}", flush=True)
        known = {case.name: report[case.name] for case in CASES if case.name in report}
        REPORT.write_text(json.dumps(known, indent=1) + "\n")
    if failed:
        sys.exit(f"{len(failed)} of the cases can't be made: {', '.join(failed)}")


def make(case: Case) -> dict[str, Any]:
    """Write the files of a case; returns what is to be said about it."""
    model = build(case, {})
    tokens = case.tokens()
    logits = run(model, tokens)
    spread = float(logits.std())
    changes = {
        mistake: float(np.abs(run(build(case, change), tokens) - logits).max() / spread)
        for mistake, change in case.mistakes.items()
    }
    without: dict[str, float] = {}
    if case.step == STEP:  # not twice, for the long ones
        without = {f"without {kind}": change / spread for kind, change in left_out(model, tokens, logits).items()}
        least = min(without, key=lambda kind: without[kind])
        changes[least] = without[least]
    hidden = [mistake for mistake, change in (without | changes).items() if not change >= LEAST_CHANGE]
    golden = {
        "tokens": np.asarray(tokens, np.uint16),
        "logits": logits[:: case.step, TOKENS],
        "logsumexp": logsumexp(logits)[:: case.fine_step],
        "std": np.float32(spread),
    }
    if case.experts:
        golden["routes"] = routes(model, tokens)
    with f16_cache(model):
        golden["error_of_f16_cache"] = errors(case, run(model, tokens), logits)
        with inputs_of_8_bits():
            golden["error_of_8_bits"] = errors(case, run(model, tokens), logits)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiny.gguf"
        save(case, model, Path(folder) / "model")
        convert(Path(folder) / "model", path, mtp=case.mtp is not None)
        data = path.read_bytes()
        architecture = GGUFReader(path).fields["general.architecture"].contents()
        peer = None if case.no_llama_cpp else run_llama_cpp(path, tokens)
    difference, with_table = None, None
    if peer is not None:
        difference = float(np.abs(peer - logits).max() / spread)
        if use_gelu_table(model):
            with_table = float(np.abs(peer - run(model, tokens)).max() / spread)
        top = np.partition(peer, -2, axis=-1)[:, -2:]
        golden["llama_cpp_difference"] = np.float32(difference)
        golden["llama_cpp_best"] = peer.argmax(-1)[:: case.fine_step].astype(np.uint16)
        golden["llama_cpp_margin"] = (top[:, 1] - top[:, 0])[:: case.fine_step].astype(np.float16)
    said = {
        "gguf_bytes": len(data),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "std": round(spread, 3),
        "difference": difference,
        **({} if with_table is None else {"difference_with_its_gelu": with_table}),
        "error_of_f16_cache": round(float(np.median(golden["error_of_f16_cache"])), 5),
        "error_of_8_bits": round(float(np.median(golden["error_of_8_bits"])), 4),
        "mistakes": {mistake: round(change, 3) for mistake, change in changes.items()},
    }
    if architecture != case.architecture:
        raise ValueError(f"the converter calls it {architecture}")
    if hidden:
        raise ValueError(f"these would not be seen: {', '.join(hidden)}: {said}")
    apart, limit = (difference, MOST_DIFFERENCE) if with_table is None else (with_table, MOST_WITH_TABLE)
    if apart is not None and not apart <= limit:
        raise ValueError(f"transformers and llama.cpp differ by {apart:.2g}: {said}")
    case.gguf.parent.mkdir(exist_ok=True)
    words = {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 0, "lp": 2, "pb": 2}
    case.gguf.write_bytes(lzma.compress(data, filters=[words]))
    np.savez_compressed(case.golden, **golden)
    return said | {"compressed_bytes": case.gguf.stat().st_size, "golden_bytes": case.golden.stat().st_size}


def build(case: Case, change: Mapping[str, Any]) -> Any:
    """The model in transformers, with our weights."""
    kind = getattr(transformers, case.model)
    fields = SHAPE | dict(case.config) | dict(change)
    config = kind.config_class(**{name: value for name, value in fields.items() if value is not ...})
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    model = kind(config).float().eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *learned_buffers(model)]:
            values = fill(name, tuple(tensor.shape), case.weights, add_one=case.norms_add_one, seed=case.seed)
            tensor.copy_(torch.from_numpy(values))
    if case.norm_groups > 1:
        norm_groups(model, case.norm_groups)
    return model


def norm_groups(model: Any, groups: int) -> None:
    """Let the gated norm of Mamba 2 norm each group by itself."""

    def forward(norm: Any, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        parts = (x * torch.nn.functional.silu(gate)).unflatten(-1, (groups, -1))
        parts = parts * torch.rsqrt(parts.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
        return parts.flatten(-2) * norm.weight

    for part in model.modules():
        if type(part).__name__ == "MambaRMSNormGated":
            part.forward = partial(forward, part)


def left_out(model: Any, tokens: list[int], logits: np.ndarray) -> dict[str, float]:
    """What changes where all tensors of one kind are left out: zero, or level if they are the weights of a norm."""
    kinds: dict[str, list[torch.Tensor]] = {}
    for name, tensor in [*model.named_parameters(), *learned_buffers(model)]:
        kinds.setdefault(re.sub(r"\.\d+\.", ".*.", name), []).append(tensor)
    changes = {}
    for kind, tensors in kinds.items():
        kept = [tensor.detach().clone() for tensor in tensors]
        for tensor in tensors:
            tensor.data.fill_(float(tensor.data.mean()) if "norm" in kind and tensor.dim() == 1 else 0.0)
        changes[kind] = float(np.abs(run(model, tokens) - logits).max())
        for tensor, values in zip(tensors, kept, strict=True):
            tensor.data.copy_(values)
    return changes


def save(case: Case, model: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    config = folder / "config.json"
    fields = json.loads(config.read_text()) | dict(case.saved)
    config.write_text(json.dumps({name: value for name, value in fields.items() if value is not ...}))
    if case.mxfp4:
        pack_experts(folder)
    if case.mtp:
        add_mtp(case, folder)


def learned_buffers(model: Any) -> list[tuple[str, Any]]:
    """Buffers that are saved with the model."""
    saved = model.state_dict().keys()
    return [(name, buffer) for name, buffer in model.named_buffers() if name in saved]


def run(model: Any, tokens: list[int]) -> np.ndarray:
    with torch.no_grad():
        logits: np.ndarray = model(torch.tensor([tokens]), use_cache=False).logits[0].float().numpy()
    return logits


def routes(model: Any, tokens: list[int]) -> np.ndarray:
    """The experts that each token is sent to, in ascending order: (layers with experts, tokens, experts of a token)."""
    found: list[np.ndarray] = []

    def note(part: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        (chosen,) = [
            value
            for value in (*given, *named.values())
            if isinstance(value, torch.Tensor) and value.dtype == torch.long and value.dim() == 2
        ]
        found.append(np.sort(chosen.numpy(), axis=-1).astype(np.uint8))

    hooks = [
        part.register_forward_pre_hook(note, with_kwargs=True)
        for name, part in model.named_modules()
        if name.endswith(".experts")
    ]
    run(model, tokens)
    for hook in hooks:
        hook.remove()
    return np.array(found)


def use_gelu_table(model: Any) -> bool:
    """Let a model compute GELU as llama.cpp does: it looks it up in a table of f16. False if the model has none."""
    found = [part for part in model.modules() if type(part).__name__ == "GELUTanh"]
    for part in found:
        exact = part.forward
        part.forward = lambda x, exact=exact: torch.where(
            x.abs() < 10, exact(x.half().float()).half().float(), exact(x)
        )
    return bool(found)


def run_llama_cpp(path: Path, tokens: list[int]) -> np.ndarray:
    """Every step in f32, keys and values included."""
    whole = -(-len(tokens) // 256) * 256
    peer = llama_cpp.Llama(
        str(path), n_ctx=whole, n_batch=whole, n_ubatch=512, logits_all=True, flash_attn=False, swa_full=True,
        type_k=llama_cpp.GGML_TYPE_F32, type_v=llama_cpp.GGML_TYPE_F32, n_threads=1, verbose=False,
    )  # fmt: skip
    peer.eval(tokens)
    scores = np.array(peer.scores[: len(tokens)])
    peer.close()
    return scores


def errors(case: Case, found: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """At each position that is recorded, the greatest difference, relative to the spread."""
    apart = np.abs(found - logits)[:: case.step, TOKENS].max(-1)
    return np.asarray(apart / logits.std(), np.float32)


def logsumexp(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    top = wide.max(-1)
    return (top + np.log(np.exp(wide - top[:, None]).sum(-1))).astype(np.float32)


if __name__ == "__main__":
    main(sys.argv[1:])
