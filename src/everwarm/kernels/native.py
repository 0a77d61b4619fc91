"""The native backend: packed weights, quantised activations, KV in blocks.

Logits depend on the token ids before them and on nothing else: not on the batch, the chunks of prefill, the number of
threads or the instruction set. Buffers are reused from step to step, so one step runs at a time.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from everwarm.errors import ModelError
from everwarm.kernels import _native
from everwarm.kernels.backend import (
    EMPTY_BLOCK,
    F32,
    FULL,
    STATE,
    U8,
    U32,
    WINDOW,
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
    reach,
    state_places,
)

ALIGNMENT = 64
VECTOR = "vector"
GATING = ("softmax", "sigmoid", "softmax of the chosen")
"""By their numbers in the native code."""

# In f32 until 0.2. Other models keep their numerics id, and with it their agents.
_FROM_BITS_SINCE_0_3 = frozenset(
    {
        *("Q2_K", "Q3_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
        *("TQ1_0", "TQ2_0", "MXFP4", "NVFP4"),
    }
)


class NativeBlocks(_native.KVPool, HostBlocks):
    """The native pool, as a `BlockMemory`."""

    block_tokens = _native.BLOCK

    def host_view(self, block: int) -> U8:
        return self.data(block)

    def copy_block(self, source: int, target: int) -> None:
        np.copyto(self.data(target), self.data(source))


supported_isas = _native.supported_isas
detect_cpu = _native.detect_cpu


class NativeRows:
    """Sampling's operations on a row of logits, with the best instruction set there is."""

    def summarize(self, logits: F32, temperature: float) -> tuple[int, float, float]:
        return _native.summarize(logits, temperature)

    def draw(self, logits: F32, temperature: float, fraction: float) -> int:
        return _native.draw(logits, temperature, fraction)

    def greatest_ids(self, values: F32, count: int) -> list[int]:
        return _native.greatest_ids(values, count)

    def forbid(self, logits: F32, allowed: U32) -> int:
        return _native.forbid(logits, allowed)


class NativeBackend:
    """Kernels of one instruction set on some threads."""

    name = "native"
    exact = True
    packs = True
    changed_types = _FROM_BITS_SINCE_0_3
    rows: RowOperations = NativeRows()

    def __init__(self, isa: str, threads: int, kv_type: str) -> None:
        self.engine = _native.Engine(isa, threads)
        self.instructions = isa
        self.kv_type = kv_type
        self.numerics = (
            f"native {_native.NUMERICS_VERSION}, groups of {_native.GROUP}, blocks of {_native.BLOCK}, KV {kv_type}"
        )
        self._blocks: dict[str, NativeBlocks] = {}
        self.places: list[tuple[str, int]] = []
        self.states: StateShape = ()
        self._state_places: list[int] = []
        self.kv_shape: KVShape = ()
        self._buffers: dict[tuple[str, int], _native.Rows] = {}
        self._routings: dict[Router, _native.Routing] = {}
        self._stepping = threading.RLock()

    def spent(self) -> dict[str, float]:
        return self.engine.spent

    def read_bandwidth(self, memory: U8) -> float:
        return self.engine.read_bandwidth(memory)

    def integer_peak(self) -> float:
        return self.engine.integer_peak()

    def plan(self, type_name: str, shape: tuple[int, ...]) -> tuple[str, int]:
        if len(shape) == 1:
            return VECTOR, 4 * shape[0]
        kind = type_name if type_name in _native.TENSOR_TYPES else "F32"
        return kind, _native.Form(kind, *shape).size_bytes

    def pack_into(
        self, type_name: str, shape: tuple[int, ...], blocks: U8, dequantize: Callable[[F32 | None], F32], out: U8
    ) -> None:
        """A type without a form of its own is dequantised: wide, but exact."""
        if len(shape) == 1:
            dequantize(out.view(np.float32))
            return
        if type_name not in _native.TENSOR_TYPES:
            type_name, blocks = "F32", dequantize(None).reshape(-1).view(np.uint8)
        form = _native.Form(type_name, *shape)
        # The threads belong to the step that runs. It may be waiting for what is packed here, so don't wait for it.
        if self._stepping.acquire(blocking=False):
            try:
                self.engine.pack(form, blocks, out)
            finally:
                self._stepping.release()
        else:
            _native.Engine("portable", 1).pack(form, blocks, out)

    def attach(self, kind: str, shape: tuple[int, ...], data: U8) -> _native.Form | F32:
        if kind == VECTOR:
            return data.view(np.float32)
        form = _native.Form(kind, *shape)
        form.attach(data)
        return form

    def block_memory(self, shape: KVShape, states: StateShape = ()) -> dict[str, BlockMemory]:
        multiple = 16 if self.kv_type == "f16" else 32
        for size in sorted({size for layer in shape for size in (layer.key_dim, layer.value_dim)}):
            if size % multiple:
                other = "" if size % 16 else "--kv-type f16 or "
                raise ModelError(
                    f"attention heads of {size:,} elements: the native kernels need a multiple of {multiple} "
                    f"for KV type {self.kv_type}; use {other}--backend reference"
                )
        self.kv_shape, self.places = shape, places(shape)
        self.states, self._state_places = states, state_places(states)
        self._blocks = {
            kind: NativeBlocks(
                [(layer.kv_heads, layer.key_dim, layer.value_dim, layer.latent) for layer in layers], self.kv_type
            )
            if layers
            else NativeBlocks(EMPTY_BLOCK)
            for kind, layers in by_kind(shape).items()
        }
        if states:
            self._blocks[STATE] = NativeBlocks(4 * self._state_places[-1])
        return dict(self._blocks)

    def state_place(self, layer: int) -> tuple[NativeBlocks, int, int]:
        """The memory of states, and where a layer's convolution and its state begin there."""
        begin = self._state_places[layer]
        return self._blocks[STATE], begin, begin + self.states[layer].conv

    @contextmanager
    def step(self, spans: Sequence[Span], rotaries: Sequence[Rotary]) -> Iterator["NativeStep"]:
        assert self._blocks, "block_memory comes before the first step"
        with self._stepping:
            yield NativeStep(self, self._blocks, spans, rotaries)
            for span in spans:
                span.kv.length += len(span.tokens)

    def routing(self, how: Router) -> _native.Routing:
        """Where the choice of experts is kept during a layer. Layers that route alike share it."""
        routing = self._routings.get(how)
        if routing is None:
            routing = self._routings[how] = _native.Routing(
                how.experts, how.used, GATING.index(how.routing), how.normalised, how.scale, how.groups, how.groups_used
            )
        return routing

    def buffer(self, role: str, width: int) -> _native.Rows:
        """The buffer for one role and width. It grows to the largest step and is never given back."""
        buffer = self._buffers.get((role, width))
        if buffer is None:
            buffer = self._buffers[role, width] = _native.Rows(width)
        return buffer


class NativeStep:
    """One step over a flat batch."""

    def __init__(
        self, backend: NativeBackend, blocks: dict[str, NativeBlocks], spans: Sequence[Span], rotaries: Sequence[Rotary]
    ) -> None:
        self._backend = backend
        self._engine: _native.Engine | _native.Tape = backend.engine
        self._blocks = blocks
        self._spans = spans
        self.tape: _native.Tape | None = None
        self._rotaries = rotaries
        self._batch = _native.Batch()
        for span in spans:
            kv = span.kv
            self._batch.add(kv.length, len(span.tokens), kv.blocks, kv.windows, kv.state)
        self._batch.place(blocks[FULL])
        if STATE in blocks:
            self._batch.place_states(blocks[STATE])
        if WINDOW in blocks:
            self._batch.place_windows(blocks[WINDOW], reach(backend.kv_shape))
        for rotary in rotaries:
            self._batch.add_rotary(
                rotary.frequencies, rotary.magnitude, rotary.pairing == "adjacent", rotary.sharpen_every, rotary.sharpen
            )

    def recorder(self) -> "NativeStep":
        """A step like this one that computes nothing: it remembers what it is asked to do."""
        recorder = NativeStep(self._backend, self._blocks, (), self._rotaries)
        recorder._engine = recorder.tape = _native.Tape()
        return recorder

    def replay(self, recorded: "NativeStep") -> None:
        """Do what another step has remembered, over this one's batch. Python has no say meanwhile."""
        assert recorded.tape is not None
        self._backend.engine.run(recorded.tape, self._batch)

    def embed(self, table: _native.Form, scale: float = 1.0, role: str = "x") -> _native.Rows:
        tokens = np.concatenate([np.asarray(span.tokens, np.int32) for span in self._spans])
        x = self._backend.buffer(role, table.inputs)
        self._backend.engine.embed(table, tokens, x)
        return self._scaled(x, scale, 0.0)

    def start(self, rows: F32, scale: float = 1.0, role: str = "x") -> _native.Rows:
        x = self._backend.buffer(role, rows.shape[1])
        x.set(rows)
        return self._scaled(x, scale, 0.0)

    def _scaled(self, x: _native.Rows, scale: float, softcap: float) -> _native.Rows:
        if scale != 1.0 or softcap:
            self._engine.scale(x, scale, softcap)
        return x

    def norm(self, x: _native.Rows, weight: F32, epsilon: float) -> _native.Rows:
        h = self._backend.buffer("h", x.width)
        self._engine.norm(x, weight, epsilon, h, True)
        return h

    def linear(self, x: _native.Rows, matrices: Sequence[Affine]) -> list[_native.Rows]:
        outs = [self._backend.buffer(f"out{i}", form.outputs) for i, (form, _) in enumerate(matrices)]
        self._engine.linear(x, [form for form, _ in matrices], [bias for _, bias in matrices], outs, False)
        return outs

    def norm_heads(self, x: _native.Rows, weight: F32, epsilon: float, heads: int) -> _native.Rows:
        self._engine.norm_heads(x, weight, epsilon, heads)
        return x

    def rotate(self, x: _native.Rows, heads: int, rope: int, offset: int = 0) -> _native.Rows:
        self._engine.rotate(x, heads, self._batch, rope, offset)
        return x

    def attention(
        self,
        layer: int,
        q: _native.Rows,
        k: _native.Rows | None,
        v: _native.Rows | None,
        scale: float,
        window: int | None,
        softcap: float = 0.0,
        sinks: F32 | None = None,
    ) -> _native.Rows:
        kind, number = self._backend.places[layer]
        blocks = self._blocks[kind]
        if k is not None:
            self._engine.store_kv(blocks, number, k, v, self._batch)
        kv = self._backend.kv_shape[layer]
        out = self._backend.buffer("mixed", q.width // kv.key_dim * kv.value_dim)
        self._engine.attention(blocks, number, q, self._batch, scale, window or 0, softcap, out, sinks)
        return out

    def latent_attention(
        self,
        layer: int,
        q: _native.Rows,
        latent: _native.Rows,
        key: _native.Rows,
        absorb: Sequence[_native.Form],
        expand: Sequence[_native.Form],
        scale: float,
    ) -> _native.Rows:
        heads, width = len(absorb), latent.width + key.width
        keys = self._backend.buffer("keys", width)
        self._engine.copy_heads(latent, 1, 0, latent.width, keys, 0)
        self._engine.copy_heads(key, 1, 0, key.width, keys, latent.width)
        queries = self._backend.buffer("queries", heads * width)
        plain = absorb[0].inputs  # elements of each head of q that the latent's space is for
        self._engine.by_head(q, 0, absorb, self._backend.buffer("absorb", plain), queries, 0)
        self._engine.copy_heads(q, heads, plain, key.width, queries, latent.width)
        mixed = self.attention(layer, queries, keys, None, scale, None)
        out = self._backend.buffer("expanded", heads * expand[0].outputs)
        self._engine.by_head(mixed, 0, expand, self._backend.buffer("expand", expand[0].inputs), out, 0)
        return out

    def add_linear(self, x: _native.Rows, h: _native.Rows, matrix: Affine) -> _native.Rows:
        form, bias = matrix
        self._engine.linear(h, [form], [bias], [x], True)
        return x

    def add(self, x: _native.Rows, h: _native.Rows, scale: float) -> _native.Rows:
        self._engine.add(x, h, scale)
        return x

    def gated(self, x: _native.Rows, gate: Affine, up: Affine, activation: str = "silu") -> _native.Rows:
        width = gate[0].outputs
        out = self._backend.buffer("gated", width)
        self._engine.gated(x, [gate[0], up[0]], [gate[1], up[1]], out, self._backend.buffer("up", width), activation)
        return out

    def gate(self, x: _native.Rows, up: _native.Rows, activation: str) -> _native.Rows:
        self._engine.gate(x, up, activation)
        return x

    def copy(
        self, x: _native.Rows, first: int = 0, width: int | None = None, role: str = "copy", heads: int = 1
    ) -> _native.Rows:
        each = x.width // heads if width is None else width
        out = self._backend.buffer(role, heads * each)
        self._engine.copy_heads(x, heads, first, each, out, 0)
        return out

    def short_conv(self, layer: int, x: _native.Rows, weight: F32, bias: F32 | None, silu: bool) -> _native.Rows:
        states, begin, _ = self._backend.state_place(layer)
        out = self._backend.buffer("convolved", x.width)
        self._engine.short_conv(states, begin, x, weight, bias, silu, self._batch, out)
        return out

    def delta_net(
        self,
        layer: int,
        spec: DeltaNet,
        qkv: _native.Rows,
        beta: _native.Rows,
        alpha: _native.Rows,
        a: F32,
        bias: F32,
    ) -> _native.Rows:
        states, _, begin = self._backend.state_place(layer)
        out = self._backend.buffer("mixed", spec.value_heads * spec.value_dim)
        scratch = self._backend.buffer("decays", 2 * spec.value_heads)
        shape = [spec.key_heads, spec.value_heads, spec.key_dim, spec.value_dim]
        self._engine.delta_net(
            states, begin, shape, spec.interleaved, spec.joint, qkv, beta, alpha, a, bias, self._batch, scratch, out
        )
        return out

    def mamba(
        self, layer: int, spec: Mamba, xbc: _native.Rows, dt: _native.Rows, a: F32, bias: F32, skip: F32
    ) -> _native.Rows:
        states, _, begin = self._backend.state_place(layer)
        out = self._backend.buffer("mixed", spec.heads * spec.head_dim)
        scratch = self._backend.buffer("decays", 2 * spec.heads)
        shape = [spec.heads, spec.groups, spec.head_dim, spec.state_dim]
        self._engine.mamba(states, begin, shape, xbc, dt, a, bias, skip, self._batch, scratch, out)
        return out

    def scale(self, x: _native.Rows, factor: float) -> _native.Rows:
        self._engine.scale(x, factor, 0.0)
        return x

    def route(
        self,
        x: _native.Rows,
        router: Affine,
        selection_bias: F32 | None,
        how: Router,
        expert_scales: F32 | None = None,
    ) -> _native.Routing:
        routed = self._backend.routing(how)
        scores = self._backend.buffer("scores", how.experts)
        self._engine.route(x, router[0], router[1], selection_bias, expert_scales, scores, routed)
        return routed

    def chosen(self, routed: _native.Routing) -> list[int] | None:
        return None if self.tape is not None else sorted(set(routed.chosen))

    def experts(
        self, x: _native.Rows, routed: _native.Routing, experts: Sequence[Expert | None], activation: str
    ) -> _native.Rows:
        some = next(expert for expert in experts if expert is not None)
        hidden, width = some.up[0].outputs, some.down[0].outputs
        work = [
            self._backend.buffer("expert", x.width),
            self._backend.buffer("expert hidden", hidden),
            self._backend.buffer("expert up", hidden),
            self._backend.buffer("expert out", width),
            self._backend.buffer("experts out", width),
        ]
        out = self._backend.buffer("experts", width)
        none: tuple[None, None] = (None, None)
        gates = [none if expert is None or expert.gate is None else expert.gate for expert in experts]
        ups = [none if expert is None else expert.up for expert in experts]
        downs = [none if expert is None else expert.down for expert in experts]
        forms = [[form for form, _ in matrices] for matrices in (gates, ups, downs)]
        biases = [[bias for _, bias in matrices] for matrices in (gates, ups, downs)]
        self._engine.experts(
            x, routed, forms[0], forms[1], forms[2], biases[0], biases[1], biases[2], activation, work, out
        )
        return out

    def weigh(self, x: _native.Rows, h: _native.Rows, by: F32) -> _native.Rows:
        self._engine.weigh(x, h, by)
        return x

    def logits(
        self,
        x: _native.Rows,
        norm: F32,
        epsilon: float,
        output: _native.Form,
        scale: float = 1.0,
        softcap: float = 0.0,
    ) -> F32:
        wanted: list[int] = []
        first = 0
        for span in self._spans:
            wanted.extend(range(first + span.logits_from, first + len(span.tokens)))
            first += len(span.tokens)
        if not wanted:
            return np.empty((0, output.outputs), np.float32)
        some = self._backend.buffer("last", x.width)
        some.take(x, np.asarray(wanted, np.int32))
        h = self.norm(some, norm, epsilon)
        out = self._backend.buffer("logits", output.outputs)
        self._engine.linear(h, [output], [None], [out], False)
        return self._scaled(out, scale, softcap).numpy().copy()


def aligned_bytes(size: int) -> npt.NDArray[np.uint8]:
    """Uninitialised memory on a cache line."""
    memory = np.empty(size + ALIGNMENT, np.uint8)
    skip = -memory.ctypes.data % ALIGNMENT
    return memory[skip : skip + size]
