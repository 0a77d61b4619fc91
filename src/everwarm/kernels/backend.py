"""What a backend offers to the transformer: the operations of one step, in the order in which a layer uses them.

Arrays are opaque here: NumPy arrays in the reference backend, reused native buffers in the native one. A step is a
context in which operations may be called; what they return is valid until the step ends, except logits, which are the
caller's to keep.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
Array = Any
Weight = Any
Affine = tuple[Weight, F32 | None]
"""A matrix (outputs, inputs) and, perhaps, a bias."""


FULL = "full"
WINDOW = "window"
STATE = "state"
"""Kinds of blocks: of layers that see all tokens, of those that see only the last ones, and states after a token."""


@dataclass(frozen=True, slots=True)
class LayerKV:
    """Keys and values of one token in one layer."""

    kv_heads: int
    key_dim: int  # elements of a head
    value_dim: int
    latent: bool = False  # a value is the beginning of its key: both are stored once
    window: int = 0  # so many tokens back can be seen, and only these are kept; 0: all

    @property
    def key_width(self) -> int:
        return self.kv_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Elements that are stored besides those of keys."""
        return 0 if self.latent else self.kv_heads * self.value_dim


KVShape = tuple[LayerKV, ...]
"""What the layers that store something store of one token."""


@dataclass(frozen=True, slots=True)
class LayerState:
    """What a layer with a state keeps of all tokens so far, in numbers of 32 bits."""

    conv: int  # the last rows that went into a convolution
    state: int


StateShape = tuple[LayerState, ...]
"""Of the layers that have a state."""


EMPTY_BLOCK = 64
"""Bytes of a block where no layer keeps keys and values: it only says how far a history is known."""


def state_places(shape: StateShape) -> list[int]:
    """Where the parts of each layer begin, and the end of all. Each begins at a multiple of 64 bytes."""
    sizes = (-(-(layer.conv + layer.state) // 16) * 16 for layer in shape)
    return [0, *accumulate(sizes)]


def by_kind(shape: KVShape) -> dict[str, KVShape]:
    """The layers of each kind of block, in their order."""
    kinds = {FULL: tuple(layer for layer in shape if not layer.window)}
    windows = tuple(layer for layer in shape if layer.window)
    return kinds | {WINDOW: windows} if windows else kinds


def places(shape: KVShape) -> list[tuple[str, int]]:
    """Of each layer: its kind of block, and which of the layers there it is."""
    counts = {FULL: 0, WINDOW: 0}
    found = []
    for layer in shape:
        kind = WINDOW if layer.window else FULL
        found.append((kind, counts[kind]))
        counts[kind] += 1
    return found


def reach(shape: KVShape) -> int:
    """How many tokens back layers with a window see at most, the own one included; 0 if there are none."""
    return max((layer.window for layer in shape), default=0)


@dataclass(frozen=True, slots=True)
class Rotary:
    """What is needed in order to rotate: see `model.rope`."""

    pairing: str
    frequencies: F32  # (pairs,)
    magnitude: float
    sharpen_every: int = (
        0  # what is rotated at position p is also multiplied by 1 + sharpen * log(1 + floor(p / every))
    )
    sharpen: float = 0.0


@dataclass(frozen=True, slots=True)
class Router:
    """How a router's scores become the experts of a row: see `model.spec.ExpertsSpec`."""

    experts: int
    used: int
    routing: str
    normalised: bool
    scale: float
    groups: int
    groups_used: int


@dataclass(frozen=True, slots=True)
class Expert:
    """The matrices of one expert."""

    gate: Affine | None  # None: what is positive of the product with `up` is squared
    up: Affine
    down: Affine


class DeltaNet(Protocol):
    """See `model.spec.DeltaNetSpec`."""

    @property
    def key_heads(self) -> int: ...
    @property
    def value_heads(self) -> int: ...
    @property
    def key_dim(self) -> int: ...
    @property
    def value_dim(self) -> int: ...
    @property
    def interleaved(self) -> bool: ...
    @property
    def joint(self) -> bool: ...


class Mamba(Protocol):
    """See `model.spec.MambaSpec`."""

    @property
    def heads(self) -> int: ...
    @property
    def groups(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def state_dim(self) -> int: ...


class BlockMemory(Protocol):
    """Memory for blocks of keys and values, each all layers of a kind, `block_tokens` tokens, addressed by handles."""

    @property
    def block_tokens(self) -> int: ...

    @property
    def block_bytes(self) -> int: ...

    @property
    def layer_bytes(self) -> Sequence[int]:
        """What each layer takes of a block."""

    @property
    def in_use(self) -> int:
        """Blocks that are allocated."""

    @property
    def spare(self) -> int:
        """Released blocks that still have their memory."""

    def allocate(self, clear: bool = True) -> int:
        """A block. Without `clear` the caller writes all of it at once."""

    def release(self, block: int) -> None: ...

    def trim(self, keep: int) -> None:
        """Give back the memory of all but `keep` released blocks."""

    def host_view(self, block: int) -> U8 | None:
        """Its bytes in place, valid until it is released; None if they are not in the memory of the host."""

    def read_block(self, block: int, out: U8) -> None:
        """Copy its bytes into a buffer of the host."""

    def write_block(self, block: int, data: U8) -> None:
        """Fill it from a buffer of the host."""

    def copy_block(self, source: int, target: int) -> None: ...


class HostBlocks:
    """What a `BlockMemory` in the memory of the host has besides `host_view`."""

    def host_view(self, block: int) -> U8:
        raise AssertionError("each memory has its own")

    def read_block(self, block: int, out: U8) -> None:
        np.copyto(out, self.host_view(block))

    def write_block(self, block: int, data: U8) -> None:
        np.copyto(self.host_view(block), data)

    def copy_block(self, source: int, target: int) -> None:
        np.copyto(self.host_view(target), self.host_view(source))


class KV(Protocol):
    """Keys and values of one sequence: handles of blocks, the last of them perhaps not full."""

    length: int
    blocks: list[int]
    windows: list[int]  # of layers with a window; -1: long out of sight, and gone. Empty if there are no such layers
    state: int  # of layers with a state, after `length` tokens; -1 if there are none

    def reserve(self, tokens: int) -> None:
        """Have blocks for this many tokens in all, which may be written from `length` on."""

    def truncate(self, length: int) -> None:
        """Forget the tokens from `length` on."""

    def close(self) -> None:
        """Give the memory back."""


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive new tokens of one sequence, to be computed behind what its KV already holds."""

    tokens: Sequence[int]
    kv: KV
    logits_from: int  # rows of this span from here on want logits; len(tokens) for none


class Step(Protocol):
    """The operations of one step over a flat batch of spans."""

    def recorder(self) -> "Step | None":
        """A step that remembers operations on rows, from `norm` to `gated`, instead of computing; None: it can't."""

    def replay(self, recorded: Any) -> None:
        """Do what a recorder of an earlier step has remembered, with the rows of this one."""

    def embed(self, table: Weight, scale: float = 1.0, role: str = "x") -> Array:
        """The rows of a table that the tokens name, times a scale."""

    def start(self, rows: F32, scale: float = 1.0, role: str = "x") -> Array:
        """Rows that were looked up elsewhere, instead of `embed`."""

    def norm(self, x: Array, weight: F32, epsilon: float) -> Array: ...

    def linear(self, x: Array, matrices: Sequence[Affine]) -> Sequence[Array]:
        """Several products of the same rows."""

    def norm_heads(self, x: Array, weight: F32, epsilon: float, heads: int) -> Array:
        """Norm each head of each row by itself, in place; one head is the whole row."""

    def rotate(self, x: Array, heads: int, rope: int, offset: int = 0) -> Array:
        """Rotate each head, from an element of it on, by the `rope`-th of the rotaries that the step was begun with."""

    def attention(
        self,
        layer: int,
        q: Array,
        k: Array | None,
        v: Array | None,
        scale: float,
        window: int | None,
        softcap: float = 0.0,
        sinks: F32 | None = None,
    ) -> Array:
        """Append keys and values to the KV of each span, unless another layer has done so, then attend, each row to
        what came before it. `layer` counts those that store something. Scores s become softcap * tanh(s / softcap), if
        that is not 0. A sink is a score of each head that takes its share of the
        weights and gives nothing.
        """

    def latent_attention(
        self,
        layer: int,
        q: Array,
        latent: Array,
        key: Array,
        absorb: Sequence[Weight],
        expand: Sequence[Weight],
        scale: float,
    ) -> Array:
        """Attention whose keys and values are made of one latent per token (MLA), in the absorbed form: each head of q
        is what its matrix of `absorb` takes to the latent's space, then what is compared with the rotated `key` that
        all heads share. What is attended to is a latent, of which the matrices of `expand` make the values of heads.
        """

    def short_conv(self, layer: int, x: Array, weight: F32, bias: F32 | None, silu: bool) -> Array:
        """Each channel convolved over time, `weight` (channels, taps); `layer` counts those that have a state."""

    def delta_net(self, layer: int, spec: DeltaNet, qkv: Array, beta: Array, alpha: Array, a: F32, bias: F32) -> Array:
        """Gated DeltaNet. Queries and keys get the length 1, then S *= exp(a * softplus(alpha + bias)), S += k (v - S^T
        k) sigmoid(beta), and S^T q / sqrt(elements of a key) is what each head gives.
        """

    def mamba(self, layer: int, spec: Mamba, xbc: Array, dt: Array, a: F32, bias: F32, skip: F32) -> Array:
        """Mamba 2. With t = softplus(dt + bias): S = exp(a t) S + B t x, and S^T C + skip x is what each head gives."""

    def add_linear(self, x: Array, h: Array, matrix: Affine) -> Array:
        """x plus the product."""

    def add(self, x: Array, h: Array, scale: float) -> Array:
        """x plus h times the scale."""

    def gated(self, x: Array, gate: Affine, up: Affine, activation: str = "silu") -> Array:
        """`silu` or `gelu` (by tanh) of the one product times the other; or `clamped`: see `model.spec`."""

    def gate(self, x: Array, up: Array, activation: str) -> Array:
        """The activation of the one times the other."""

    def copy(self, x: Array, first: int = 0, width: int | None = None, role: str = "copy", heads: int = 1) -> Array:
        """Some elements of each row, or of each head of it, in rows of their own, which the next copy of the same role
        takes.
        """

    def scale(self, x: Array, factor: float) -> Array:
        """Every element times a factor."""

    def route(
        self, x: Array, router: Affine, selection_bias: F32 | None, how: Router, expert_scales: F32 | None = None
    ) -> Any:
        """Which experts each row takes; `expert_scales` are further factors on their weights."""

    def chosen(self, routed: Any) -> Sequence[int] | None:
        """The experts that some row takes; None if that is not known yet, because the step is being recorded."""

    def experts(self, x: Array, routed: Any, experts: Sequence[Expert | None], activation: str) -> Array:
        """What the experts of each row give, weighted. Those that nobody has chosen may be None. Experts without gates
        have the activation `positive`.
        """

    def weigh(self, x: Array, h: Array, by: F32) -> Array:
        """Each row of x times the sigmoid of that row of h times a vector."""

    def logits(
        self, x: Array, norm: F32, epsilon: float, output: Weight, scale: float = 1.0, softcap: float = 0.0
    ) -> F32:
        """Of the rows that want them, times the scale; l becomes softcap * tanh(l / softcap), if that is not 0."""


class RowOperations(Protocol):
    """What sampling asks of one row of logits in host memory."""

    def summarize(self, logits: F32, temperature: float) -> tuple[int, float, float]:
        """(first index of the maximum, the maximum, sum of e^((x - maximum) / temperature)); the sum is NaN if anything
        is NaN or +inf.
        """

    def draw(self, logits: F32, temperature: float, fraction: float) -> int:
        """The id at this fraction, in [0, 1), of the softmax's cumulative sum."""

    def greatest_ids(self, values: F32, count: int) -> list[int]:
        """Ids of the greatest values, greatest first, the smaller id first among equals; no NaN."""

    def forbid(self, logits: F32, allowed: U32) -> int:
        """Set a logit to -inf, in place, unless its bit is set: bit i % 32 of word i // 32. How many are allowed."""


class Backend(Protocol):
    """Who computes."""

    name: str
    numerics: str
    """All that this backend adds to the numerics id: two backends that say the same compute the same bits."""

    changed_types: frozenset[str]
    """Tensor types whose products have changed while `numerics` stayed: a model that has any gets another id."""

    exact: bool
    """Whether logits depend on the token ids alone, to the last bit, and not on the batch they were computed in."""

    kv_type: str
    """In which type it keeps keys and values."""

    instructions: str
    """What it computes with, for people: an instruction set, `blas`."""

    packs: bool
    """Whether its forms differ from plain floats, so that it is worth keeping them in a pack."""

    rows: RowOperations

    def plan(self, type_name: str, shape: tuple[int, ...]) -> tuple[str, int]:
        """The form that a tensor of a GGUF type gets: its kind, and its bytes. `vector` is plain f32."""

    def pack_into(
        self, type_name: str, shape: tuple[int, ...], blocks: U8, dequantize: Callable[[F32 | None], F32], out: U8
    ) -> None:
        """Blocks of the file into a form's memory. `dequantize` makes floats of them, into an array if one is given."""

    def attach(self, kind: str, shape: tuple[int, ...], data: U8) -> Weight:
        """A tensor to compute with, over memory that holds its form."""

    def read_bandwidth(self, memory: U8) -> float | None:
        """Bytes per second that its threads read from this memory; None if it can't tell."""

    def integer_peak(self) -> float | None:
        """Integer operations per second that it could do at most; None if it can't tell."""

    def spent(self) -> Mapping[str, float]:
        """Seconds that operations took since the backend was made: `products`, `attention`, `other`."""

    def block_memory(self, shape: KVShape, states: StateShape = ()) -> dict[str, BlockMemory]:
        """Where the KV of this backend's sequences lies, by kind of block. Steps use the memory that was made last."""

    def step(self, spans: Sequence[Span], rotaries: Sequence[Rotary]) -> AbstractContextManager[Step]:
        """Compute these spans; their KV has reserved the blocks for them."""
