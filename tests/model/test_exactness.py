"""The contract of the native backend: logits depend on the token ids before them, and on nothing else. With ==."""

from pathlib import Path

import numpy as np
import pytest

from everwarm.kernels import _native
from everwarm.kernels.native import NativeBackend
from everwarm.kernels.reference import ReferenceBackend
from everwarm.model.transformer import Span, Transformer
from model.test_transformer import new_kv, opened
from short_and_long import short_and_long
from tiny import Tiny

ISA = _native.supported_isas()[0]
CHUNKS = [1, 17, 64]
"""Compared with chunks of 512."""

TINY = [
    Tiny(context=2048),
    Tiny(context=2048, type="Q4_K", architecture="qwen2", biases=True),
    Tiny(context=2048, type="Q6_K", tied=False, metadata={"attention.sliding_window": 100}),
    Tiny(context=2048, type="Q4_0", architecture="qwen3", qk_norm=True),
    Tiny(context=2048, type="Q2_K", architecture="qwen2", biases=True),
    Tiny(context=2048, type="IQ3_S", tied=False),
    Tiny(context=2048, type="MXFP4"),
    Tiny(context=2048, type="Q8_0", heads=6, kv_heads=1, head_dim=32, rope_factors=True),
]


def native(
    path: Path, isa: str = ISA, threads: int = 2, kv_type: str = "f16", context: int | None = None
) -> Transformer:
    return opened(path, NativeBackend(isa, threads, kv_type), context)


def logits(model: Transformer, tokens: list[int], chunk: int = 512) -> np.ndarray:
    kv = new_kv(model)
    parts = [model.forward([Span(tokens[low : low + chunk], kv, 0)]) for low in range(0, len(tokens), chunk)]
    kv.close()
    return np.concatenate(parts).view(np.uint32)


def random_prompts(count: int, vocab: int, longest: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, vocab, rng.integers(1, longest)).tolist() for _ in range(count)]


@pytest.fixture(params=TINY, ids=lambda tiny: f"{tiny.architecture}-{tiny.type}", scope="module")
def tiny_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exactness") / "tiny.gguf"
    request.param.write(path)
    return path


@pytest.mark.parametrize("kv_type", ["f16", "q8", "q4"])
def test_chunks_threads_and_instruction_sets_change_no_bit(tiny_path: Path, kv_type: str) -> None:
    model = native(tiny_path, kv_type=kv_type)
    for prompt in random_prompts(5, 260, 200):
        expected = logits(model, prompt)
        for chunk in CHUNKS:
            assert (logits(model, prompt, chunk) == expected).all()
    for threads in (1, 3):
        assert (logits(native(tiny_path, threads=threads, kv_type=kv_type), prompt, 17) == expected).all()
    for isa in _native.supported_isas():
        assert (logits(native(tiny_path, isa=isa, kv_type=kv_type), prompt, 50) == expected).all()


def together(model: Transformer, prompts: list[list[int]], chunk: int) -> list[np.ndarray]:
    """All prompts at once, in steps of up to `chunk` tokens each, so that they end at different steps."""
    kvs = [new_kv(model) for _ in prompts]
    found: list[list[np.ndarray]] = [[] for _ in prompts]
    for low in range(0, max(map(len, prompts)), chunk):
        running = [i for i, prompt in enumerate(prompts) if low < len(prompt)]
        spans = [Span(prompts[i][low : low + chunk], kvs[i], 0) for i in running]
        rows = np.split(model.forward(spans).view(np.uint32), np.cumsum([len(span.tokens) for span in spans])[:-1])
        for i, part in zip(running, rows, strict=True):
            found[i].append(part)
    for kv in kvs:
        kv.close()
    return [np.concatenate(parts) for parts in found]


@pytest.mark.parametrize("kv_type", ["f16", "q8", "q4"])
def test_seven_others_in_the_batch_change_no_bit(tiny_path: Path, kv_type: str) -> None:
    model = native(tiny_path, kv_type=kv_type)
    prompts = random_prompts(8, 260, 300)
    alone = [logits(model, prompt) for prompt in prompts]
    for chunk in (1, 19, 512):
        assert all((a == b).all() for a, b in zip(together(model, prompts, chunk), alone, strict=True))


@pytest.mark.model
@pytest.mark.slow
@short_and_long("count", 8, 50)
def test_prompts_of_the_real_model(smollm2_path: Path, count: int) -> None:
    model, one, three = (native(smollm2_path, threads=threads) for threads in (2, 1, 3))
    prompts = random_prompts(count, 49152, 90)
    alone = [logits(model, prompt) for prompt in prompts]
    for first in range(0, count - 7, 8):
        batch = together(model, prompts[first : first + 8], 32)
        assert all((a == b).all() for a, b in zip(batch, alone[first : first + 8], strict=True))
    for i, (prompt, expected) in enumerate(zip(prompts, alone, strict=True)):
        assert (logits(model, prompt, CHUNKS[i % 3]) == expected).all()
        assert (logits(one if i % 2 else three, prompt, 17) == expected).all()


def test_native_is_near_the_reference(tiny_path: Path) -> None:
    tokens = random_prompts(1, 260, 300)[0]
    exact = opened(tiny_path, ReferenceBackend(None))
    near = logits(native(tiny_path), tokens).view(np.float32)
    far = exact.forward([Span(tokens, new_kv(exact), 0)])
    error = np.linalg.norm(near - far, axis=-1) / np.linalg.norm(far, axis=-1)
    assert np.median(error) < 0.03  # activations in 8 bits; random weights amplify that more than trained ones


def test_closed_sequences_give_their_blocks_back(tiny_path: Path) -> None:
    model = native(tiny_path)
    kv = new_kv(model)
    model.forward([Span(list(range(150)), kv, 150)])
    pool = kv.pool  # type: ignore[attr-defined]
    assert pool.in_use == 3
    kv.truncate(64)
    assert (pool.in_use, kv.length) == (1, 64)
    kv.close()
    assert pool.in_use == 0
