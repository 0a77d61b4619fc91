"""What a model is made of, as data: one spec per layer, and what is around the layers.

An architecture (`model.architectures`) reads these out of a file's metadata; the forward pass, the list of tensors, the
KV layout and the numerics id follow from them. A field that says nothing special has a default, so that a new one
changes nothing for models that do not use it.
"""

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

from everwarm.kernels.backend import KVShape, LayerKV, LayerState, StateShape

Pairing = Literal["adjacent", "halves"]
"""Which elements of a head rotate together: (0,1)(2,3)... as in llama's GGUF files, or (0,d/2)(1,d/2+1)... (NeoX)."""

Scaling = Literal["none", "linear", "yarn", "longrope"]
LONGROPE = ("rope_factors_short.weight", "rope_factors_long.weight")
"""Factors for contexts up to the original one, and for longer ones."""

Activation = Literal["silu", "gelu", "clamped"]
"""clamped is gpt-oss's: min(gate, 7) * sigmoid(1.702 * min(gate, 7)), times 1 + up clamped to -7 .. 7."""

Routing = Literal["softmax", "sigmoid", "softmax of the chosen"]
"""How scores of experts become weights: before the best are chosen, or (the last) after."""

QKNorm = Literal["none", "head", "row"]
"""Whether queries and keys are normed before they are rotated: each head by itself, or the whole row at once."""


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding, before frequency factors (those are a tensor)."""

    pairing: Pairing
    dims: int  # elements of each head that rotate
    base: float
    scaling: Scaling = "none"
    factor: float = 1.0  # how much longer the context is than in training
    original_context: int = 0  # yarn only: the context that the model was trained with at first
    attention_factor: float = 1.0  # what is rotated is also multiplied by it
    fast: float = 32.0  # yarn only: pairs that turn more often than this within the original context stay as they are
    slow: float = 1.0  # yarn only: pairs that turn less often than this are stretched by the whole factor
    whole_pairs: bool = True  # yarn only: the borders between these are rounded to whole pairs
    factors: str = "rope_freqs.weight"  # the tensor that frequencies are divided by, if the file has it


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One attention layer."""

    heads: int
    kv_heads: int
    head_dim: int
    rope: RopeSpec | None  # None: positions are not encoded in this layer
    scale: float  # of the scores
    window: int | None = None  # a token sees at most this many tokens back, itself included
    softcap: float = 0.0  # scores s become softcap * tanh(s / softcap); 0: they stay
    qk_norm: QKNorm = "none"
    qk_norm_required: bool = True  # where False, they are normed if the file has the norms
    sinks: bool = False  # each head has a score that takes a share of the weights and gives nothing
    bias_required: bool = False  # of q, k and v; where False, biases are used if the file has them
    temperature: "Temperature | None" = None
    latent: "LatentSpec | None" = None
    v_norm: bool = False  # each head of values is normed, without weights
    v_required: bool = True  # where False, values are the keys (before norm and rotation) if the file has none
    kv_of: int | None = None  # an earlier layer, whose keys and values are used instead of own ones
    output_gate: bool = False  # each head of queries is followed by a gate for what the head gives

    @property
    def kv(self) -> LayerKV:
        """What is stored of a token."""
        if self.latent is not None:
            rope = 0 if self.rope is None else self.rope.dims
            return LayerKV(1, self.latent.rank + rope, self.latent.rank, latent=True)
        return LayerKV(self.kv_heads, self.head_dim, self.head_dim)

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Keys and values are made of one short vector per token (MLA); a head's elements beyond `plain` are rotated."""

    rank: int  # elements of the latent
    plain: int  # elements of a head of queries and keys that are not rotated
    value_dim: int  # elements of a head of values
    query_rank: int = 0  # elements of what queries are made of; 0: of the row itself


@dataclass(frozen=True, slots=True)
class Temperature:
    """Queries of later positions are sharpened: times 1 + scale * log(1 + floor(position / every))."""

    every: int
    scale: float


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """Many feed-forwards, of which a router chooses a few for each token; their weighted sum is what counts."""

    count: int
    used: int
    routing: Routing = "softmax"
    normalised: bool = True  # the weights of the chosen add up to 1
    scale: float = 1.0  # of the weights
    groups: int = 1  # experts are in groups, and are chosen from the best of these
    groups_used: int = 1
    selection_bias: bool = False  # a bias decides who is chosen, and is no part of the weights
    expert_scales: bool = False  # each expert has a scale of its own
    beside: int = 0  # width of a dense feed-forward beside them; both have norms of their own, the router, too
    shared_width: int = 0  # of a feed-forward that every token takes besides
    shared_gate: bool = False  # what that gives is weighted by the sigmoid of a product
    latent_width: int = 0  # experts take and give so many elements, of which products make a row; 0: the row itself


@dataclass(frozen=True, slots=True)
class FeedForwardSpec:
    """A gated feed-forward layer: down(activation(gate x) * up x). With experts, each is of this width."""

    width: int
    activation: Activation = "silu"
    experts: ExpertsSpec | None = None
    gated: bool = True  # where False: down(max(up x, 0) squared)


@dataclass(frozen=True, slots=True)
class ShortConvSpec:
    """LFM 2: what comes in is gated, convolved over time channel by channel, and gated again."""

    taps: int
    channels: int
    output: str = "shortconv.out_proj"  # what the file calls the product behind it

    @property
    def state(self) -> LayerState:
        return LayerState((self.taps - 1) * self.channels, 0)


@dataclass(frozen=True, slots=True)
class DeltaNetSpec:
    """Gated DeltaNet: queries, keys and values are convolved, then each value head corrects a matrix by what it gets
    wrong, and asks it.
    """

    taps: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    interleaved: bool = False  # value head h has key head h % key_heads, else h // (value_heads / key_heads)
    joint: bool = False  # beta and alpha are one matrix, those of each key head together
    output: str = "ssm_out"

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def state(self) -> LayerState:
        states = self.value_heads * self.key_dim * self.value_dim
        return LayerState((self.taps - 1) * self.channels, states)


@dataclass(frozen=True, slots=True)
class MambaSpec:
    """Mamba 2: a matrix for each head, which decays, takes in, and is asked."""

    taps: int
    heads: int
    groups: int  # of heads that share what is taken in and what is asked
    head_dim: int
    state_dim: int
    norm: bool = True  # of what it gives, in groups; where False, it is normed if the file has the norm
    output: str = "ssm_out"

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        return self.inner + 2 * self.groups * self.state_dim

    @property
    def state(self) -> LayerState:
        return LayerState((self.taps - 1) * self.channels, self.heads * self.head_dim * self.state_dim)


RecurrentSpec = ShortConvSpec | DeltaNetSpec | MambaSpec


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Norm and attention or a layer with a state (or both, side by side), then norm and feed-forward, each added to
    what came in.
    """

    attention: AttentionSpec | None
    feed_forward: FeedForwardSpec | None
    norm_before: bool = True  # of attention and of feed-forward
    norm_after: bool = False  # of what either gives, before it is added
    residual_scale: float = 1.0  # of what is added
    output_scale: bool = False  # what the layer gives is scaled, if the file has the scale
    ffn_norm: str = "ffn_norm"  # what the file calls the norm before the feed-forward
    recurrent: RecurrentSpec | None = None


@dataclass(frozen=True, slots=True)
class Body:
    """What an architecture reads out of a file's metadata; each field means what it does in `ModelConfig`."""

    layers: tuple[LayerSpec, ...]
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    per_layer_width: int = 0
    skipped_layers: int = 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer."""

    architecture: str
    name: str
    width: int
    vocab_size: int
    context: int
    norm_epsilon: float
    layers: tuple[LayerSpec, ...]
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0  # logits l become softcap * tanh(l / softcap); 0: they stay
    per_layer_width: int = 0  # of an embedding of each token that each layer has for itself
    skipped_layers: int = 0  # behind the others: they predict further tokens (MTP), and are not computed

    @property
    def kv_shape(self) -> KVShape:
        """What is stored of a token, in the order in which it is: layers that store alike side by side."""
        stored = self._stored
        return tuple(stored[number] for number in self._kv_order)

    @property
    def state_shape(self) -> StateShape:
        """What the layers with a state keep, in their order."""
        return tuple(layer.recurrent.state for layer in self.layers if layer.recurrent is not None)

    @property
    def state_slots(self) -> list[int]:
        """Of each layer: where in `state_shape` its state is; -1 if it has none."""
        counts = accumulate((layer.recurrent is not None for layer in self.layers), initial=0)
        return [count if layer.recurrent is not None else -1 for layer, count in zip(self.layers, counts, strict=False)]

    @property
    def kv_slots(self) -> list[int]:
        """Of each layer: where in `kv_shape` its keys and values are; -1 if it has none."""
        places = {number: slot for slot, number in enumerate(self._kv_order)}
        stored_by = [
            None if layer.attention is None else number if layer.attention.kv_of is None else layer.attention.kv_of
            for number, layer in enumerate(self.layers)
        ]
        return [-1 if number is None else places[number] for number in stored_by]

    @property
    def _kv_order(self) -> list[int]:
        """The layers that store something."""
        stored = self._stored
        return [number for kind in dict.fromkeys(stored.values()) for number, one in stored.items() if one == kind]

    @property
    def _stored(self) -> dict[int, LayerKV]:
        """Where every layer has a window, all tokens are kept: nothing else would tell how far a history is known."""
        attention = {
            number: layer.attention
            for number, layer in enumerate(self.layers)
            if layer.attention is not None and layer.attention.kv_of is None
        }
        apart = any(one.window is None for one in attention.values())
        return {
            number: replace(one.kv, window=one.window or 0) if apart else one.kv for number, one in attention.items()
        }
