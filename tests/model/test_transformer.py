"""The transformer on tiny random models, against a plain f64 one and against itself in other batches."""

from pathlib import Path

import gguf
import numpy as np
import pytest

from everwarm.kernels.backend import Backend, reach
from everwarm.kernels.reference import ReferenceBackend
from everwarm.kv.index.index import Index
from everwarm.kv.index.pool import SequenceKV
from everwarm.model import tensors
from everwarm.model.config import read_config
from everwarm.model.transformer import Span, Transformer
from everwarm.weights.cache.cache import WeightCache
from everwarm.weights.dequant.dequant import SUPPORTED
from everwarm.weights.gguf.file import GGUFFile
from everwarm.weights.pack.source import FileSource
from plain import plain_logits
from tiny import Tiny

TOKENS = [72, 101, 108, 108, 111, 32, 119, 111, 114, 108, 100, 258, 0, 255, 257, 72, 72]
TOLERANCE = 1e-4


def opened(path: Path, backend: Backend | None = None, context: int | None = None) -> Transformer:
    file = GGUFFile(path)
    config = read_config(file.metadata, file.tensors["token_embd.weight"].shape[0], context=context)
    file.cut(tensors.cut(config, file.tensors))
    tensors.check_tensors(config, file.tensors)
    backend = backend or ReferenceBackend(threads=None)
    return Transformer(config, WeightCache(FileSource(file, backend)), backend)


def new_kv(model: Transformer) -> SequenceKV:
    """An empty cache in the model's own pool, which is made at the first call."""
    if not hasattr(model, "test_index"):
        model.test_index = Index(
            model.backend.block_memory(model.kv_shape, model.state_shape), reach=reach(model.kv_shape)
        )
    return model.test_index.sequence(model.config.context)


def logits(model: Transformer, tokens: list[int]) -> np.ndarray:
    return model.forward([Span(tokens, new_kv(model), 0)])


def expected(tiny: Tiny, weights: dict[str, np.ndarray], **changes: object) -> np.ndarray:
    shape = {"heads": tiny.heads, "kv_heads": tiny.kv_heads, "head_dim": tiny.head_dim}
    return plain_logits(weights, TOKENS, **(shape | changes))


@pytest.mark.parametrize(
    ("tiny", "changes"),
    [
        (Tiny(), {}),
        (Tiny(tied=False), {}),
        (Tiny(heads=4, kv_heads=4), {}),
        (Tiny(heads=6, kv_heads=1, head_dim=32), {}),
        (Tiny(layers=1, heads=3, kv_heads=3, head_dim=20, width=96, ffn=40), {}),
        (Tiny(biases=True), {}),
        (Tiny(rope_factors=True), {}),
        (Tiny(metadata={"rope.freq_base": 500000.0}), {"base": 500000.0}),
        (Tiny(metadata={"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}), {"scale_positions": 0.25}),
        (Tiny(metadata={"attention.sliding_window": 5}), {"window": 5}),
        (Tiny(architecture="qwen2", biases=True), {"pairing": "halves"}),
        (Tiny(architecture="qwen3", qk_norm=True), {"pairing": "halves"}),
        (Tiny(architecture="qwen3", qk_norm=True, heads=6, kv_heads=2, head_dim=48), {"pairing": "halves"}),
    ],
    ids=lambda value: repr(value)[:60] if isinstance(value, dict) else "",
)
def test_agrees_with_the_plain_transformer(tmp_path: Path, tiny: Tiny, changes: dict[str, object]) -> None:
    weights = tiny.write(tmp_path / "tiny.gguf")
    np.testing.assert_allclose(
        logits(opened(tmp_path / "tiny.gguf"), TOKENS), expected(tiny, weights, **changes), atol=TOLERANCE
    )


@pytest.mark.parametrize("kind", sorted(kind.name for kind in SUPPORTED))
def test_every_tensor_type_computes_what_its_dequantised_weights_do(tmp_path: Path, kind: str) -> None:
    if kind not in gguf.GGMLQuantizationType.__members__:
        pytest.skip(f"the installed gguf package does not know {kind}")
    tiny = Tiny(type=kind, layers=1)
    weights = tiny.write(tmp_path / "tiny.gguf")
    np.testing.assert_allclose(logits(opened(tmp_path / "tiny.gguf"), TOKENS), expected(tiny, weights), atol=TOLERANCE)


@pytest.mark.parametrize("chunk", [1, 2, 5, 16])
def test_chunks_of_a_prompt_add_up(tmp_path: Path, chunk: int) -> None:
    Tiny().write(tmp_path / "tiny.gguf")
    model = opened(tmp_path / "tiny.gguf")
    kv = new_kv(model)
    parts = [model.forward([Span(TOKENS[low : low + chunk], kv, 0)]) for low in range(0, len(TOKENS), chunk)]
    np.testing.assert_allclose(np.concatenate(parts), logits(model, TOKENS), atol=TOLERANCE)
    assert kv.length == len(TOKENS)


def test_sequences_of_one_batch_do_not_see_each_other(tmp_path: Path) -> None:
    Tiny().write(tmp_path / "tiny.gguf")
    model = opened(tmp_path / "tiny.gguf")
    kvs = [new_kv(model) for _ in range(3)]
    model.forward([Span(TOKENS[:4], kvs[1], 4)])
    both = model.forward([Span(TOKENS, kvs[0], len(TOKENS) - 1), Span(TOKENS[4:], kvs[1], 0), Span([1], kvs[2], 1)])
    alone = logits(model, TOKENS)
    np.testing.assert_allclose(both, np.concatenate([alone[-1:], alone[4:]]), atol=TOLERANCE)


def test_only_the_rows_asked_for_get_logits(tmp_path: Path) -> None:
    Tiny().write(tmp_path / "tiny.gguf")
    model = opened(tmp_path / "tiny.gguf")
    assert model.forward([Span(TOKENS, new_kv(model), len(TOKENS))]).shape == (0, 260)
    assert model.forward([Span(TOKENS, new_kv(model), len(TOKENS) - 2)]).shape == (2, 260)


def test_truncated_tokens_are_forgotten(tmp_path: Path) -> None:
    Tiny().write(tmp_path / "tiny.gguf")
    model = opened(tmp_path / "tiny.gguf")
    kv = new_kv(model)
    model.forward([Span([*TOKENS[:6], 9, 9, 9], kv, 9)])
    kv.truncate(6)
    after = model.forward([Span(TOKENS[6:], kv, 0)])
    np.testing.assert_allclose(after, logits(model, TOKENS)[6:], atol=TOLERANCE)
