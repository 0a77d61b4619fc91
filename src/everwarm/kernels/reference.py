"""The reference backend: every operation of the transformer in NumPy, matrix products and attention through BLAS.

In: f32 arrays, one row per token. Out: new f32 arrays; only the blocks of the KV keep state. It is the portable
fallback and the oracle of native kernels. BLAS may add in another order for another number of rows, so results are
compared with a tolerance (`exact` is False).
"""

import functools
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
from threadpoolctl import ThreadpoolController

from everwarm.kernels.backend import (
    EMPTY_BLOCK,
    F32,
    FULL,
    KV,
    STATE,
    U8,
    U32,
    Affine,
    BlockMemory,
    DeltaNet,
    Expert,
    HostBlocks,
    KVShape,
    Mamba,
    Rotary,
    Router,
    RowOperations,
    Span,
    StateShape,
    by_kind,
    places,
    state_places,
)

Method = TypeVar("Method", bound=Callable[..., Any])

_SCORE_BYTES = 16 << 20  # attention works on as many queries at once as keep its scores within this


class BlasThreads:
    """How many threads BLAS may use. Its threads spin while they wait for each other: one busy neighbour on the machine
    makes two of them six times slower than one. So a step of few rows, which gains little from a second, gets one.
    """

    FEW_ROWS = 64
    _lock = threading.Lock()

    def __init__(self, threads: int | None) -> None:
        """`threads` for every step; None is the library's own choice for many rows and one thread for few."""
        self._threads = threads
        self._controller = ThreadpoolController().select(user_api="blas")
        self._most = max((pool["num_threads"] for pool in self._controller.info()), default=1)

    def limit(self, rows: int) -> AbstractContextManager[object]:
        """While this context is open, products of a step of `rows` rows may be computed."""
        return self._limited(self._threads or (1 if rows < self.FEW_ROWS else self._most))

    @contextmanager
    def _limited(self, threads: int) -> Iterator[None]:
        # The limit is the whole process's: one step at a time, or two of them would restore each other's.
        with self._lock, self._controller.limit(limits=threads):
            yield


class ReferenceBlocks(HostBlocks):
    """Keys and values in f32, as a `BlockMemory`: in each block, one layer behind the other, keys (kv_heads, tokens,
    key_dim), then values, unless they are the beginnings of keys.
    """

    block_tokens = 64

    def __init__(self, shape: KVShape, kind: str = FULL) -> None:
        self.shape = shape
        self._kind = kind
        self._blocks: dict[int, F32] = {}
        self._next = 0
        self.layer_bytes = [4 * self.block_tokens * (layer.key_width + layer.value_width) for layer in shape]
        self._starts = [0, *accumulate(size // 4 for size in self.layer_bytes)]

    @property
    def block_bytes(self) -> int:
        return max(4 * self._starts[-1], EMPTY_BLOCK)

    @property
    def in_use(self) -> int:
        return len(self._blocks)

    @property
    def spare(self) -> int:
        return 0

    def allocate(self, clear: bool = True) -> int:
        self._next += 1
        size = self.block_bytes // 4
        self._blocks[self._next] = np.zeros(size, np.float32) if clear else np.empty(size, np.float32)
        return self._next

    def release(self, block: int) -> None:
        del self._blocks[block]

    def trim(self, keep: int) -> None:
        """Memory goes back when a block is released."""

    def host_view(self, block: int) -> U8:
        return self._blocks[block].view(np.uint8)

    def append(self, kv: KV, layer: int, keys: F32, values: F32 | None) -> None:
        """Write (rows, kv_heads, elements) behind a sequence."""
        row = 0
        while row < len(keys):
            at = (kv.length + row) % self.block_tokens
            count = min(self.block_tokens - at, len(keys) - row)
            stored = self._views(self._of(kv)[(kv.length + row) // self.block_tokens], layer)
            for new, old in zip((keys, values), stored, strict=True):
                if new is not None:
                    old[:, at : at + count] = new[row : row + count].transpose(1, 0, 2)
            row += count

    def read(self, kv: KV, layer: int, end: int) -> tuple[F32, F32]:
        """Keys and values of a sequence up to a token, each (kv_heads, tokens, elements); zeros for what is gone."""
        used = [self._views(block, layer) for block in self._of(kv)[: -(-end // self.block_tokens)]]
        keys, values = (np.concatenate([views[kind] for views in used], axis=1)[:, :end] for kind in range(2))
        return keys, values

    def _of(self, kv: KV) -> list[int]:
        return kv.blocks if self._kind == FULL else kv.windows

    def _views(self, block: int, layer: int) -> tuple[F32, F32]:
        all_layers = self._blocks[block] if block >= 0 else np.zeros(self._starts[-1], np.float32)
        shape, flat = self.shape[layer], all_layers[self._starts[layer] : self._starts[layer + 1]]
        keys = flat[: self.block_tokens * shape.key_width].reshape(shape.kv_heads, self.block_tokens, shape.key_dim)
        if shape.latent:
            return keys, keys[:, :, : shape.value_dim]
        rest = flat[self.block_tokens * shape.key_width :]
        return keys, rest.reshape(shape.kv_heads, self.block_tokens, shape.value_dim)


class ReferenceStates(ReferenceBlocks):
    """States, as a `BlockMemory`."""

    def __init__(self, shape: StateShape) -> None:
        super().__init__(())
        self._shape, self._starts = shape, state_places(shape)
        self.layer_bytes = [4 * (end - begin) for begin, end in pairwise(self._starts)]

    def of(self, kv: KV, layer: int) -> tuple[F32, F32]:
        """A layer's convolution and its state, flat, in place."""
        begin, shape = self._starts[layer], self._shape[layer]
        flat = self._blocks[kv.state][begin : begin + shape.conv + shape.state]
        return flat[: shape.conv], flat[shape.conv :]


class ReferenceRows:
    """Sampling's operations on a row of logits, in f64."""

    def summarize(self, logits: F32, temperature: float) -> tuple[int, float, float]:
        best = int(np.argmax(logits))
        greatest = float(logits[best])
        if not np.isfinite(greatest):  # NaN counts as the maximum
            return best, greatest, math.nan
        return best, greatest, float(self._weights(logits, temperature).sum())

    def draw(self, logits: F32, temperature: float, fraction: float) -> int:
        cumulative = np.cumsum(self._weights(logits, temperature))
        at = int(np.searchsorted(cumulative, fraction * cumulative[-1], side="right"))
        return min(at, len(logits) - 1)

    def greatest_ids(self, values: F32, count: int) -> list[int]:
        ids: list[int] = np.argsort(-values, kind="stable")[:count].tolist()
        return ids

    def forbid(self, logits: F32, allowed: U32) -> int:
        bits = np.unpackbits(allowed.view(np.uint8), count=len(logits), bitorder="little").astype(np.bool_)
        logits[~bits] = -np.inf
        return int(bits.sum())

    def _weights(self, logits: F32, temperature: float) -> npt.NDArray[np.float64]:
        shifted = logits.astype(np.float64) - np.float64(logits.max())
        return np.asarray(np.exp(shifted / temperature), np.float64)


class ReferenceBackend:
    """f32 weights, NumPy arrays."""

    name = "reference"
    numerics = "reference"
    changed_types: frozenset[str] = frozenset()
    exact = False
    packs = False
    kv_type = "f32"
    instructions = "blas"
    rows: RowOperations = ReferenceRows()

    def __init__(self, threads: int | None) -> None:
        self._blas = BlasThreads(threads)
        self._blocks: list[tuple[ReferenceBlocks, int]]  # of each layer; set by block_memory, before the first step
        self._states: ReferenceStates
        self._spent = {"products": 0.0, "attention": 0.0, "other": 0.0}

    def spent(self) -> dict[str, float]:
        return dict(self._spent)

    def plan(self, type_name: str, shape: tuple[int, ...]) -> tuple[str, int]:
        return "vector", 4 * math.prod(shape)

    def pack_into(
        self, type_name: str, shape: tuple[int, ...], blocks: U8, dequantize: Callable[[F32 | None], F32], out: U8
    ) -> None:
        dequantize(out.view(np.float32))

    def attach(self, kind: str, shape: tuple[int, ...], data: U8) -> F32:
        return data.view(np.float32).reshape(shape)

    def read_bandwidth(self, memory: U8) -> None:
        return None

    def integer_peak(self) -> None:
        return None

    def block_memory(self, shape: KVShape, states: StateShape = ()) -> dict[str, BlockMemory]:
        memories = {kind: ReferenceBlocks(layers, kind) for kind, layers in by_kind(shape).items()}
        self._blocks = [(memories[kind], number) for kind, number in places(shape)]
        self._states = ReferenceStates(states)
        return {**memories, STATE: self._states} if states else {**memories}

    @contextmanager
    def step(self, spans: Sequence[Span], rotaries: Sequence[Rotary]) -> Iterator["ReferenceStep"]:
        with self._blas.limit(sum(len(span.tokens) for span in spans)):
            yield ReferenceStep(self._blocks, self._states, spans, rotaries, self._spent)
        for span in spans:
            span.kv.length += len(span.tokens)


def _timed(kind: str) -> Callable[[Method], Method]:
    """Adds the time that a method of a step takes to `_spent[kind]`."""

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def timed(self: "ReferenceStep", *arguments: Any) -> Any:
            started = time.perf_counter()
            try:
                return method(self, *arguments)
            finally:
                self._spent[kind] += time.perf_counter() - started

        return cast(Method, timed)

    return decorate


@dataclass(frozen=True, slots=True)
class Routed:
    """The experts of each row, best first, and how much each counts: both (rows, used)."""

    experts: npt.NDArray[np.int64]
    weights: F32


class ReferenceStep:
    """One step over a flat batch."""

    def __init__(
        self,
        blocks: list[tuple[ReferenceBlocks, int]],
        states: "ReferenceStates",
        spans: Sequence[Span],
        rotaries: Sequence[Rotary],
        spent: dict[str, float],
    ) -> None:
        self._spent = spent
        self._blocks = blocks
        self._states = states
        self._spans = spans
        self._starts = [span.kv.length for span in spans]
        ends = np.cumsum([len(span.tokens) for span in spans])
        self._rows = [slice(int(end) - len(span.tokens), int(end)) for span, end in zip(spans, ends, strict=True)]
        positions = [
            np.arange(start, start + len(span.tokens), dtype=np.int32)
            for start, span in zip(self._starts, spans, strict=True)
        ]
        self._turns = [(rotary_table(rotary, np.concatenate(positions)), rotary.pairing) for rotary in rotaries]

    def recorder(self) -> None:
        """Python is what computes: there is nothing to be saved."""

    def replay(self, recorded: object) -> None:
        raise AssertionError("nothing was recorded")

    @_timed("other")
    def embed(self, table: F32, scale: float = 1.0, role: str = "x") -> F32:
        tokens = np.concatenate([np.asarray(span.tokens, np.int32) for span in self._spans])
        return self.start(embed(table, tokens), scale)

    def start(self, rows: F32, scale: float = 1.0, role: str = "x") -> F32:
        return rows if scale == 1.0 else rows * np.float32(scale)

    @_timed("other")
    def norm(self, x: F32, weight: F32, epsilon: float) -> F32:
        return rms_norm(x, weight, epsilon)

    @_timed("products")
    def linear(self, x: F32, matrices: Sequence[Affine]) -> list[F32]:
        return [linear(x, weight, bias) for weight, bias in matrices]

    @_timed("other")
    def norm_heads(self, x: F32, weight: F32, epsilon: float, heads: int) -> F32:
        own = weight.reshape(heads, -1) if weight.size == x.shape[1] else weight  # of each head, or of all
        return rms_norm(x.reshape(len(x), heads, -1), own, epsilon).reshape(x.shape)

    @_timed("other")
    def rotate(self, x: F32, heads: int, rope: int, offset: int = 0) -> F32:
        rotate(x.reshape(len(x), heads, -1)[:, :, offset:], *self._turns[rope])
        return x

    @_timed("attention")
    def attention(
        self,
        layer: int,
        q: F32,
        k: F32 | None,
        v: F32 | None,
        scale: float,
        window: int | None,
        softcap: float = 0.0,
        sinks: F32 | None = None,
    ) -> F32:
        blocks, number = self._blocks[layer]
        shape = blocks.shape[number]
        heads = q.shape[1] // shape.key_dim
        out = np.empty((len(q), heads * shape.value_dim), np.float32)
        for span, start, at in zip(self._spans, self._starts, self._rows, strict=True):
            rows = at.stop - at.start
            if k is not None:
                keys = k[at].reshape(rows, -1, shape.key_dim)
                values = None if v is None else v[at].reshape(rows, -1, shape.value_dim)
                blocks.append(span.kv, number, keys, values)
            seen = blocks.read(span.kv, number, start + rows)
            out[at] = attention(q[at].reshape(rows, heads, -1), *seen, start, scale, window, softcap, sinks)
        return out

    def latent_attention(
        self, layer: int, q: F32, latent: F32, key: F32, absorb: Sequence[F32], expand: Sequence[F32], scale: float
    ) -> F32:
        by_head = q.reshape(len(q), len(absorb), -1)
        plain = absorb[0].shape[1]
        queries = np.stack(
            [
                np.concatenate([linear(by_head[:, head, :plain], matrix), by_head[:, head, plain:]], axis=1)
                for head, matrix in enumerate(absorb)
            ],
            axis=1,
        )
        keys = np.concatenate([latent, key], axis=1)
        mixed = self.attention(layer, queries.reshape(len(q), -1), keys, None, scale, None)
        each = mixed.reshape(len(q), len(expand), -1)
        return np.concatenate([linear(each[:, head], matrix) for head, matrix in enumerate(expand)], axis=1)

    def short_conv(self, layer: int, x: F32, weight: F32, bias: F32 | None, silu: bool) -> F32:
        out = np.empty_like(x)
        weight = weight.reshape(x.shape[1], -1)
        for span, at in zip(self._spans, self._rows, strict=True):
            kept = self._states.of(span.kv, layer)[0].reshape(-1, x.shape[1])
            seen = np.concatenate([kept, x[at]])
            rows = at.stop - at.start
            out[at] = sum(seen[tap : tap + rows] * weight[:, tap] for tap in range(weight.shape[1]))
            kept[:] = seen[len(seen) - len(kept) :]
        if bias is not None:
            out += bias
        return out * sigmoid(out) if silu else out

    def delta_net(self, layer: int, spec: DeltaNet, qkv: F32, beta: F32, alpha: F32, a: F32, bias: F32) -> F32:
        rows, keys, heads = len(qkv), spec.key_heads * spec.key_dim, spec.value_heads
        shared = heads // spec.key_heads
        if spec.joint:
            both = beta.reshape(rows, spec.key_heads, 2, shared)
            beta, alpha = both[:, :, 0].reshape(rows, heads), both[:, :, 1].reshape(rows, heads)
        key_of = np.arange(heads) % spec.key_heads if spec.interleaved else np.arange(heads) // shared
        q, k = (
            _of_length_1(part.reshape(rows, spec.key_heads, spec.key_dim))[:, key_of]
            for part in (qkv[:, :keys], qkv[:, keys : 2 * keys])
        )
        q = q / np.float32(math.sqrt(spec.key_dim))
        v = qkv[:, 2 * keys :].reshape(rows, heads, spec.value_dim)
        decay, correct = np.exp(a * softplus(alpha + bias)), sigmoid(beta)
        out = np.empty((rows, heads, spec.value_dim), np.float32)
        for span, at in zip(self._spans, self._rows, strict=True):
            state = self._states.of(span.kv, layer)[1].reshape(heads, spec.key_dim, spec.value_dim)
            for row in range(at.start, at.stop):
                state *= decay[row][:, None, None]
                wrong = (v[row] - np.einsum("hkv,hk->hv", state, k[row])) * correct[row][:, None]
                state += k[row][:, :, None] * wrong[:, None, :]
                out[row] = np.einsum("hkv,hk->hv", state, q[row])
        return out.reshape(rows, -1)

    def mamba(self, layer: int, spec: Mamba, xbc: F32, dt: F32, a: F32, bias: F32, skip: F32) -> F32:
        rows, inner, taken = len(xbc), spec.heads * spec.head_dim, spec.groups * spec.state_dim
        group_of = np.arange(spec.heads) // (spec.heads // spec.groups)
        x = xbc[:, :inner].reshape(rows, spec.heads, spec.head_dim)
        b, c = (
            part.reshape(rows, spec.groups, spec.state_dim)[:, group_of]
            for part in (xbc[:, inner : inner + taken], xbc[:, inner + taken :])
        )
        step = softplus(dt + bias)
        decay = np.exp(step * a)
        out = np.empty_like(x)
        for span, at in zip(self._spans, self._rows, strict=True):
            state = self._states.of(span.kv, layer)[1].reshape(spec.heads, spec.state_dim, spec.head_dim)
            for row in range(at.start, at.stop):
                state *= decay[row][:, None, None]
                state += b[row][:, :, None] * (step[row][:, None] * x[row])[:, None, :]
                out[row] = np.einsum("hnd,hn->hd", state, c[row])
        return (out + skip[:, None] * x).reshape(rows, -1)

    @_timed("products")
    def add_linear(self, x: F32, h: F32, matrix: Affine) -> F32:
        return x + linear(h, *matrix)

    @_timed("other")
    def add(self, x: F32, h: F32, scale: float) -> F32:
        return x + h * np.float32(scale)

    @_timed("products")
    def gated(self, x: F32, gate: Affine, up: Affine, activation: str = "silu") -> F32:
        return activated_gate(linear(x, *gate), linear(x, *up), activation)

    @_timed("other")
    def gate(self, x: F32, up: F32, activation: str) -> F32:
        return activated_gate(x, up, activation)

    def copy(self, x: F32, first: int = 0, width: int | None = None, role: str = "copy", heads: int = 1) -> F32:
        each = x.reshape(len(x), heads, -1)
        return each[:, :, first : first + (each.shape[2] if width is None else width)].reshape(len(x), -1).copy()

    def scale(self, x: F32, factor: float) -> F32:
        return x * np.float32(factor)

    @_timed("other")
    def route(
        self, x: F32, router: Affine, selection_bias: F32 | None, how: Router, expert_scales: F32 | None = None
    ) -> Routed:
        routed = route(linear(x, *router), selection_bias, how)
        return (
            routed if expert_scales is None else replace(routed, weights=routed.weights * expert_scales[routed.experts])
        )

    def chosen(self, routed: Routed) -> list[int]:
        ids: list[int] = np.unique(routed.experts).tolist()
        return ids

    @_timed("products")
    def experts(self, x: F32, routed: Routed, experts: Sequence[Expert | None], activation: str) -> F32:
        each = np.empty((*routed.experts.shape, x.shape[1]), np.float32)  # (rows, used, width)
        for number in self.chosen(routed):
            expert = experts[number]
            assert expert is not None
            rows, ranks = np.nonzero(routed.experts == number)
            some = x[rows]
            up = linear(some, *expert.up)
            hidden = activated_gate(up if expert.gate is None else linear(some, *expert.gate), up, activation)
            each[rows, ranks] = linear(hidden, *expert.down)
        return np.asarray((each * routed.weights[:, :, None]).sum(axis=1), np.float32)

    @_timed("other")
    def weigh(self, x: F32, h: F32, by: F32) -> F32:
        return np.asarray(x * sigmoid(h @ by.reshape(-1))[:, None], np.float32)

    @_timed("products")
    def logits(self, x: F32, norm: F32, epsilon: float, output: F32, scale: float = 1.0, softcap: float = 0.0) -> F32:
        wanted = [
            np.arange(at.start + span.logits_from, at.stop) for span, at in zip(self._spans, self._rows, strict=True)
        ]
        found = linear(rms_norm(x[np.concatenate(wanted)], norm, epsilon), output)
        if scale != 1.0:
            found *= np.float32(scale)
        return soft_cap(found, softcap) if softcap else found


def embed(table: F32, tokens: npt.NDArray[np.int32]) -> F32:
    return table[tokens]


def linear(x: F32, weight: F32, bias: F32 | None = None) -> F32:
    """(rows, inputs) x (outputs, inputs) -> (rows, outputs)."""
    y: F32 = x @ weight.T
    if bias is not None:
        y += bias
    return y


def rms_norm(x: F32, weight: F32, epsilon: float) -> F32:
    mean_square = np.mean(np.square(x), axis=-1, keepdims=True, dtype=np.float32)
    root = np.sqrt(mean_square + np.float32(epsilon), dtype=np.float32)
    return np.asarray(x / root * weight, np.float32)


def rotary_table(rotary: Rotary, positions: npt.NDArray[np.int32]) -> tuple[F32, F32]:
    """Cosine and sine per row and pair. The angle is rounded to f32 first, as in the code that trains models."""
    angles = (positions.astype(np.float32)[:, None] * rotary.frequencies[None, :]).astype(np.float64)
    scale = np.full((len(positions), 1), rotary.magnitude)
    if rotary.sharpen_every:
        scale *= 1.0 + rotary.sharpen * np.log1p(positions // rotary.sharpen_every)[:, None]
    return (np.cos(angles) * scale).astype(np.float32), (np.sin(angles) * scale).astype(np.float32)


def rotate(x: F32, table: tuple[F32, F32], pairing: str) -> F32:
    """Rotate the first `2 * pairs` elements of each head in place. x: (rows, heads, head_dim)."""
    cosine, sine = (part[:, None, :] for part in table)  # (rows, 1, pairs)
    dims = 2 * cosine.shape[-1]
    if pairing == "adjacent":
        first, second = x[..., 0:dims:2], x[..., 1:dims:2]
    else:
        first, second = x[..., : dims // 2], x[..., dims // 2 : dims]
    turned = first * cosine - second * sine
    second[...] = first * sine + second * cosine
    first[...] = turned
    return x


def attention(
    q: F32,
    keys: F32,
    values: F32,
    start: int,
    scale: float,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: F32 | None = None,
) -> F32:
    """Causal grouped-query attention of the rows at positions start, start + 1, ...

    q: (rows, heads, elements); keys, values: (kv_heads, start + rows, elements); returns (rows, heads * elements).
    """
    rows, heads, head_dim = q.shape
    kv_heads, value_dim = keys.shape[0], values.shape[-1]
    shared = heads // kv_heads
    out = np.empty((rows, heads, value_dim), np.float32)
    step = max(1, _SCORE_BYTES // (4 * heads * keys.shape[1]))
    for low in range(0, rows, step):
        high = min(low + step, rows)
        seen = start + high  # keys that the last of these rows may look at
        first = 0 if window is None else max(0, start + low - window + 1)
        per_kv_head = q[low:high].reshape(high - low, kv_heads, shared, head_dim).transpose(1, 2, 0, 3)
        grouped = (per_kv_head * np.float32(scale)).reshape(kv_heads, shared * (high - low), head_dim)
        products = grouped @ keys[:, first:seen].transpose(0, 2, 1)
        scores = np.asarray(products.reshape(kv_heads, shared, high - low, seen - first), np.float32)
        if softcap:
            scores = soft_cap(scores, softcap)
        if high - low > 1 or window is not None:
            scores += _mask(np.arange(start + low, start + high), np.arange(first, seen), window)
        greatest, rest = scores.max(axis=-1, keepdims=True), np.float32(0)
        if sinks is not None:
            sink = sinks.reshape(kv_heads, shared, 1, 1)
            greatest = np.maximum(greatest, sink)
            rest = np.exp(sink - greatest)
        scores -= greatest
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True) + rest
        mixed = scores.reshape(kv_heads, -1, seen - first) @ values[:, first:seen]
        mixed = mixed.reshape(kv_heads, shared, high - low, value_dim).transpose(2, 0, 1, 3)
        out[low:high] = mixed.reshape(high - low, heads, value_dim)
    return out.reshape(rows, heads * value_dim)


def soft_cap(x: F32, softcap: float) -> F32:
    return np.asarray(np.tanh(x / np.float32(softcap)) * np.float32(softcap), np.float32)


def _mask(queries: npt.NDArray[np.int64], keys: npt.NDArray[np.int64], window: int | None) -> F32:
    distance = queries[:, None] - keys[None, :]
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    return np.where(hidden, np.float32(-np.inf), np.float32(0))


def route(scores: F32, selection_bias: F32 | None, how: Router) -> Routed:
    """Among equal scores the lower expert comes first."""
    if how.routing == "softmax":
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
    elif how.routing == "sigmoid":
        weights = sigmoid(scores)
    else:
        weights = scores
    by = weights if selection_bias is None else weights + selection_bias
    if how.groups > 1:
        groups = by.reshape(len(by), how.groups, -1)
        best = -np.sort(-groups, axis=-1)
        worth = best[:, :, :2].sum(axis=-1) if how.routing == "sigmoid" else best[:, :, 0]
        kept = np.argsort(-worth, axis=-1, kind="stable")[:, : how.groups_used]
        hidden = np.ones(worth.shape, np.bool_)
        np.put_along_axis(hidden, kept, False, axis=-1)
        by = np.where(hidden[:, :, None], -np.inf, groups).reshape(by.shape)
    chosen = np.argsort(-by, axis=-1, kind="stable")[:, : how.used]
    found = np.take_along_axis(weights, chosen, axis=-1)
    if how.routing == "softmax of the chosen":
        found = np.exp(found - found.max(axis=-1, keepdims=True))
        found /= found.sum(axis=-1, keepdims=True)
    elif how.normalised:
        found = found / (found.sum(axis=-1, keepdims=True) + np.float32(1e-20))
    return Routed(chosen, np.asarray(found * np.float32(how.scale), np.float32))


def sigmoid(x: F32) -> F32:
    with np.errstate(over="ignore"):
        return np.asarray(1 / (1 + np.exp(-x)), np.float32)


def softplus(x: F32) -> F32:
    return np.asarray(np.logaddexp(np.float32(0), x), np.float32)


def _of_length_1(x: F32) -> F32:
    return np.asarray(x / np.sqrt((x * x).sum(axis=-1, keepdims=True) + np.float32(1e-6)), np.float32)


def activated_gate(gate: F32, up: F32, activation: str = "silu") -> F32:
    """silu(gate) * up, or gelu(gate) * up, which is x * sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3))."""
    if activation == "product":
        return gate * up
    if activation == "sigmoid":
        return sigmoid(gate) * up
    if activation == "positive":
        return np.maximum(gate, np.float32(0)) * np.maximum(up, np.float32(0))
    if activation == "clamped":
        gate, up = np.minimum(gate, np.float32(7)), np.clip(up, np.float32(-7), np.float32(7))
        return np.asarray((up + 1) * gate * sigmoid(np.float32(1.702) * gate), np.float32)
    turned = gate
    if activation == "gelu":
        turned = np.float32(2 * math.sqrt(2 / math.pi)) * (gate + np.float32(0.044715) * gate * gate * gate)
    with np.errstate(over="ignore"):  # exp overflows to inf for very negative gates, and x / inf is the right answer
        decay = np.exp(-turned, dtype=np.float32)
    decay += 1
    return np.asarray(gate / decay * up, np.float32)
