"""The transformer, top to bottom.

In: a flat batch of tokens, spans of one or more sequences. Out: logits of the rows that were asked for; each span's KV
has grown by its rows. What differs between architectures is data: a spec per layer.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from everwarm.errors import ModelError
from everwarm.kernels.backend import F32, KV, Affine, Array, Backend, Expert, Router, Span, Step, Weight
from everwarm.model import tensors
from everwarm.model.numerics import numerics_id
from everwarm.model.rope import make_rope
from everwarm.model.spec import (
    AttentionSpec,
    DeltaNetSpec,
    ExpertsSpec,
    FeedForwardSpec,
    LatentSpec,
    LayerSpec,
    MambaSpec,
    ModelConfig,
    RecurrentSpec,
    RopeSpec,
    ShortConvSpec,
    Temperature,
)
from everwarm.weights.cache.cache import WeightCache
from everwarm.weights.cache.place import is_expert

__all__ = ["KV", "Span", "Transformer"]


@dataclass(slots=True)
class _Program:
    """The operations of all layers, and the weights that they use."""

    recorded: Step
    x: Array  # the rows that it begins and ends with
    names: list[str] = field(default_factory=list)
    tensors: list[Weight] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _LayerWeights:
    """The tensors of one layer, by their names in it."""

    prefix: str
    get: Callable[[str], Weight]
    known: WeightCache

    def vector(self, name: str) -> Weight:
        return self.get(f"{self.prefix}{name}.weight")

    def has(self, name: str) -> bool:
        return f"{self.prefix}{name}.weight" in self.known

    def bias(self, name: str) -> Weight | None:
        full = f"{self.prefix}{name}.bias"
        return self.get(full) if full in self.known else None

    def matrix(self, name: str) -> Affine:
        return self.get(f"{self.prefix}{name}.weight"), self.bias(name)

    def expert(self, number: int, gated: bool) -> Expert:
        gate = self.matrix(f"ffn_gate.{number}") if gated else None
        return Expert(gate, self.matrix(f"ffn_up.{number}"), self.matrix(f"ffn_down.{number}"))


class Transformer:
    """A model that can compute. Holds no weights of its own: each use asks the cache."""

    def __init__(
        self, config: ModelConfig, weights: WeightCache, backend: Backend, tensor_types: Collection[str] = ()
    ) -> None:
        """`tensor_types` are those of the model's file, for the numerics id."""
        self.config = config
        self.weights = weights
        self.backend = backend
        rotations = _rotations(config)
        self._rotation = {rotation: number for number, rotation in enumerate(rotations)}
        self._rotaries = [
            make_rope(rope, weights.get(rope.factors) if rope.factors in weights else None, temperature)
            for rope, temperature in rotations
        ]
        self.numerics_id = numerics_id(config, self._rotaries, backend, tensor_types)
        self.kv_shape = config.kv_shape
        self._kv_slots, self._state_slots = config.kv_slots, config.state_slots
        self.state_shape = config.state_shape
        self._program: _Program | None = None
        self._forgotten = 0  # how often: what is being recorded meanwhile is forgotten, too
        weights.before_release(self._forget)
        self._output = tensors.OUTPUT if tensors.OUTPUT in weights else tensors.EMBEDDING

    def forward(self, spans: Sequence[Span]) -> F32:
        """Logits (rows asked for, vocab), in the order of the spans."""
        weight = self.weights.get
        self.weights.as_built()
        for span in spans:
            span.kv.reserve(span.kv.length + len(span.tokens))
        with self.weights.computing(), self.backend.step(spans, self._rotaries) as step:
            table = self.weights.table(tensors.EMBEDDING)
            scale = self.config.embedding_scale
            x = (
                step.embed(table, scale)
                if table is not None
                else step.start(self._rows(tensors.EMBEDDING, spans), scale)
            )
            extra = self._per_layer_inputs(step, spans, x) if self.config.per_layer_width else None
            x = self._layers(step, x, extra)  # (rows, width)
            logits = step.logits(
                x,
                weight(tensors.OUTPUT_NORM),
                self.config.norm_epsilon,
                weight(self._output),
                self.config.logit_scale,
                self.config.logit_softcap,
            )
            if not self.weights.as_built():  # raised inside the step, so that no KV counts that it has computed
                raise ModelError("weights were altered on disk while they were in use; they are built again: try again")
            return logits

    def _layers(self, step: Step, x: Array, extra: Array | None) -> Array:
        """Through all layers. While their weights stay where they are, the operations are recorded once and replayed:
        asking Python for each takes a seventh of the time of a token.
        """
        program, forgotten = self._program, self._forgotten
        if program is not None and program.x is x and self.weights.use_again(program.names, program.tensors):
            step.replay(program.recorded)
            return x
        self._program = None
        recorder = step.recorder() if self.weights.mapped else None
        if recorder is None:
            return self._compute_layers(step, x, extra, self.weights.get)
        program = _Program(recorder, x)
        self._compute_layers(recorder, x, extra, partial(self._get_for, program))
        step.replay(recorder)
        if self._forgotten == forgotten:
            self._program = program
        return x

    def _compute_layers(self, step: Step, x: Array, extra: Array | None, weight: Callable[[str], Weight]) -> Array:
        epsilon = self.config.norm_epsilon
        for number, layer in enumerate(self.config.layers):
            self.weights.enter(number)
            tensors = _LayerWeights(f"blk.{number}.", weight, self.weights)

            if layer.attention is not None or layer.recurrent is not None:
                h = step.norm(x, tensors.vector("attn_norm"), epsilon) if layer.norm_before else x
            if layer.attention is not None:
                mixed = self._attention(step, number, layer.attention, h, tensors)
                x = self._add_product(step, layer, x, mixed, tensors, "attn_output", "post_attention_norm")
            if layer.recurrent is not None:
                mixed = self._recurrent(step, self._state_slots[number], layer.recurrent, h, tensors)
                x = self._add_product(step, layer, x, mixed, tensors, layer.recurrent.output, "post_attention_norm")

            if not self.weights.mapped and number + 1 < len(self.config.layers):
                self._expect_experts(step, number + 1, x, weight)
            ffn = layer.feed_forward
            if ffn is None:
                continue
            h = step.norm(x, tensors.vector(layer.ffn_norm), epsilon) if layer.norm_before else x
            if ffn.experts is None:
                h = self._hidden(step, ffn, h, tensors)
                x = self._add_product(step, layer, x, h, tensors, "ffn_down", "post_ffw_norm")
            else:
                y = self._experts(step, ffn, ffn.experts, x, h, tensors)
                x = self._add(step, layer, x, y, tensors, "post_ffw_norm")
            if extra is not None:
                x = self._add_per_layer_input(step, number, x, extra, tensors)
            if layer.output_scale and tensors.has("layer_output_scale"):
                x = step.scale(x, float(tensors.vector("layer_output_scale")[0]))
        return x

    def _hidden(self, step: Step, ffn: FeedForwardSpec, h: Array, tensors: "_LayerWeights", suffix: str = "") -> Array:
        if ffn.gated:
            gate, up = (tensors.matrix(f"ffn_{part}{suffix}") for part in ("gate", "up"))
            return step.gated(h, gate, up, ffn.activation)
        (up,) = step.linear(h, [tensors.matrix(f"ffn_up{suffix}")])
        return step.gate(up, step.copy(up), "positive")

    def _recurrent(self, step: Step, slot: int, spec: RecurrentSpec, h: Array, tensors: "_LayerWeights") -> Array:
        match spec:
            case ShortConvSpec():
                names = ("shortconv.b", "shortconv.c", "shortconv.x")
                b, c, x = step.linear(h, [tensors.matrix(name) for name in names])
                y = step.short_conv(slot, step.gate(b, x, "product"), tensors.vector("shortconv.conv"), None, False)
                return step.gate(c, y, "product")
            case DeltaNetSpec():
                return self._delta_net(step, slot, spec, h, tensors)
            case MambaSpec():
                return self._mamba(step, slot, spec, h, tensors)

    def _delta_net(self, step: Step, slot: int, spec: DeltaNetSpec, h: Array, tensors: "_LayerWeights") -> Array:
        names = ["attn_qkv", "attn_gate", *(["ssm_ba"] if spec.joint else ["ssm_beta", "ssm_alpha"])]
        qkv, gate, *others = step.linear(h, [tensors.matrix(name) for name in names])
        qkv = step.short_conv(slot, qkv, tensors.vector("ssm_conv1d"), None, True)
        a, bias = tensors.get(f"{tensors.prefix}ssm_a"), tensors.get(f"{tensors.prefix}ssm_dt.bias")
        y = step.delta_net(slot, spec, qkv, others[0], others[-1], a, bias)
        y = step.norm_heads(y, tensors.vector("ssm_norm"), self.config.norm_epsilon, spec.value_heads)
        return step.gate(gate, y, "silu")

    def _mamba(self, step: Step, slot: int, spec: MambaSpec, h: Array, tensors: "_LayerWeights") -> Array:
        gate, xbc, dt = step.linear(h, [tensors.matrix(name) for name in ("ssm_z", "ssm_xbc", "ssm_step")])
        xbc = step.short_conv(slot, xbc, tensors.vector("ssm_conv1d"), tensors.bias("ssm_conv1d"), True)
        a, bias, skip = (tensors.get(f"{tensors.prefix}{name}") for name in ("ssm_a", "ssm_dt.bias", "ssm_d"))
        y = step.gate(gate, step.mamba(slot, spec, xbc, dt, a, bias, skip), "silu")
        if spec.norm or tensors.has("ssm_norm"):
            y = step.norm_heads(y, tensors.vector("ssm_norm"), self.config.norm_epsilon, spec.groups)
        return y

    def _per_layer_inputs(self, step: Step, spans: Sequence[Span], x: Array) -> Array:
        """What each layer gets besides: a token's own embedding for it, and what a product of the row says."""
        width, name, weight = self.config.per_layer_width, tensors.PER_LAYER_EMBEDDING, self.weights.get
        table, scale, role = self.weights.table(name), math.sqrt(width), "per layer"
        own = step.start(self._rows(name, spans), scale, role) if table is None else step.embed(table, scale, role)
        (said,) = step.linear(x, [(weight(tensors.PER_LAYER_PRODUCT), None)])
        said = step.scale(said, 1.0 / math.sqrt(self.config.width))
        said = step.norm_heads(said, weight(tensors.PER_LAYER_NORM), self.config.norm_epsilon, len(self.config.layers))
        return step.scale(step.add(own, said, 1.0), 1.0 / math.sqrt(2.0))

    def _add_per_layer_input(self, step: Step, number: int, x: Array, extra: Array, tensors: "_LayerWeights") -> Array:
        width = self.config.per_layer_width
        (gate,) = step.linear(x, [tensors.matrix("inp_gate")])
        gated = step.gate(gate, step.copy(extra, number * width, width), "gelu")
        (y,) = step.linear(gated, [tensors.matrix("proj")])
        return step.add(x, step.norm_heads(y, tensors.vector("post_norm"), self.config.norm_epsilon, 1), 1.0)

    def _add_product(
        self, step: Step, layer: LayerSpec, x: Array, h: Array, tensors: "_LayerWeights", product: str, norm: str
    ) -> Array:
        if not layer.norm_after and layer.residual_scale == 1.0:
            return step.add_linear(x, h, tensors.matrix(product))
        (y,) = step.linear(h, [tensors.matrix(product)])
        return self._add(step, layer, x, y, tensors, norm)

    def _add(self, step: Step, layer: LayerSpec, x: Array, y: Array, tensors: "_LayerWeights", norm: str) -> Array:
        """What attention or feed-forward gives is added to what came in."""
        if layer.norm_after:
            y = step.norm_heads(y, tensors.vector(norm), self.config.norm_epsilon, 1)
        return step.add(x, y, layer.residual_scale)

    def _attention(self, step: Step, number: int, spec: AttentionSpec, h: Array, tensors: "_LayerWeights") -> Array:
        if spec.latent is not None:
            return self._latent_attention(step, number, spec, spec.latent, h, tensors)
        own, epsilon = spec.kv_of is None, self.config.norm_epsilon
        names = ["attn_q", *(["attn_k"] if own else []), *(["attn_v"] if own and tensors.has("attn_v") else [])]
        q, *kv = step.linear(h, [tensors.matrix(name) for name in names])
        gate = None
        if spec.output_gate:
            gate = step.copy(q, spec.head_dim, spec.head_dim, "gate of heads", spec.heads)
            q = step.copy(q, 0, spec.head_dim, "queries of heads", spec.heads)
        k, v = (kv[0], kv[1] if len(kv) > 1 else step.copy(kv[0])) if own else (None, None)
        if spec.qk_norm != "none" and (spec.qk_norm_required or tensors.has("attn_q_norm")):
            heads, kv_heads = (spec.heads, spec.kv_heads) if spec.qk_norm == "head" else (1, 1)
            q = step.norm_heads(q, tensors.vector("attn_q_norm"), epsilon, heads)
            k = None if k is None else step.norm_heads(k, tensors.vector("attn_k_norm"), epsilon, kv_heads)
        if spec.v_norm and v is not None:
            v = step.norm_heads(v, np.ones(spec.head_dim, np.float32), epsilon, spec.kv_heads)
        if spec.rope is not None:
            q = step.rotate(q, spec.heads, self._rotation[spec.rope, spec.temperature])
            k = None if k is None else step.rotate(k, spec.kv_heads, self._rotation[spec.rope, None])
        sinks = tensors.vector("attn_sinks") if spec.sinks else None
        y = step.attention(self._kv_slots[number], q, k, v, spec.scale, spec.window, spec.softcap, sinks)
        return y if gate is None else step.gate(gate, y, "sigmoid")

    def _latent_attention(
        self, step: Step, number: int, spec: AttentionSpec, latent: LatentSpec, h: Array, tensors: "_LayerWeights"
    ) -> Array:
        epsilon = self.config.norm_epsilon
        names = ("attn_q_a" if latent.query_rank else "attn_q", "attn_kv_a", "attn_k_rope")
        q, c, key = step.linear(h, [tensors.matrix(name) for name in names])
        if latent.query_rank:
            (q,) = step.linear(step.norm(q, tensors.vector("attn_q_a_norm"), epsilon), [tensors.matrix("attn_q_b")])
        c = step.norm_heads(c, tensors.vector("attn_kv_a_norm"), epsilon, 1)
        if spec.rope is not None:
            q = step.rotate(q, spec.heads, self._rotation[spec.rope, spec.temperature], latent.plain)
            key = step.rotate(key, 1, self._rotation[spec.rope, None])
        absorb = [tensors.vector(f"attn_k_b.{head}") for head in range(spec.heads)]
        expand = [tensors.vector(f"attn_v_b.{head}") for head in range(spec.heads)]
        return step.latent_attention(self._kv_slots[number], q, c, key, absorb, expand, spec.scale)

    def _experts(
        self, step: Step, ffn: FeedForwardSpec, spec: ExpertsSpec, x: Array, h: Array, tensors: "_LayerWeights"
    ) -> Array:
        """`x` is what came in, `h` the same normed. A dense feed-forward beside the experts takes h, if there is one;
        then router and experts have norms of their own.
        """
        epsilon = self.config.norm_epsilon
        dense, seen, scales = None, h, None
        if spec.beside:
            hidden = step.gated(h, tensors.matrix("ffn_gate"), tensors.matrix("ffn_up"), ffn.activation)
            (dense,) = step.linear(hidden, [tensors.matrix("ffn_down")])
            dense = step.copy(step.norm_heads(dense, tensors.vector("post_ffw_norm_1"), epsilon, 1), role="dense")
            by = tensors.get(f"{tensors.prefix}ffn_gate_inp.scale") / np.float32(math.sqrt(self.config.width))
            seen = step.norm(x, by, epsilon)
        if spec.expert_scales and f"{tensors.prefix}ffn_down_exps.scale" in tensors.known:
            scales = tensors.get(f"{tensors.prefix}ffn_down_exps.scale")
        routed = self._route(step, spec, seen, tensors, scales)
        if spec.beside:
            h = step.norm(x, tensors.vector("pre_ffw_norm_2"), epsilon)
        chosen = step.chosen(routed)
        wanted = range(spec.count) if chosen is None else frozenset(chosen)
        experts = [tensors.expert(number, ffn.gated) if number in wanted else None for number in range(spec.count)]
        activation = ffn.activation if ffn.gated else "positive"
        if spec.latent_width:
            (latent,) = step.linear(h, [tensors.matrix("ffn_latent_down")])
            y = step.experts(latent, routed, experts, activation)
            (y,) = step.linear(y, [tensors.matrix("ffn_latent_up")])
            y = step.copy(y, role="from latent")  # products of the shared expert would take its rows
        else:
            y = step.experts(h, routed, experts, activation)
        if dense is not None:
            return step.add(step.norm_heads(y, tensors.vector("post_ffw_norm_2"), epsilon, 1), dense, 1.0)
        if not spec.shared_width:
            return y
        hidden = self._hidden(step, ffn, h, tensors, "_shexp")
        if not spec.shared_gate:
            return step.add_linear(y, hidden, tensors.matrix("ffn_down_shexp"))
        (shared,) = step.linear(hidden, [tensors.matrix("ffn_down_shexp")])
        return step.add(y, step.weigh(shared, h, tensors.vector("ffn_gate_inp_shexp")), 1.0)

    def _expect_experts(self, step: Step, number: int, x: Array, weight: Callable[[str], Weight]) -> None:
        """Which experts a layer will take is guessed by its router from what comes into the layer before: rows change
        little from layer to layer. They are read while that one computes.
        """
        layer = self.config.layers[number]
        if layer.feed_forward is None:
            return
        spec, tensors = layer.feed_forward.experts, _LayerWeights(f"blk.{number}.", weight, self.weights)
        if spec is None or spec.beside:
            return
        guess = step.norm(x, tensors.vector(layer.ffn_norm), self.config.norm_epsilon)
        chosen = step.chosen(self._route(step, spec, guess, tensors, None)) or ()
        names = (f"blk.{number}.ffn_{part}.{expert}" for expert in chosen for part in ("gate", "up", "down"))
        possible = (f"{name}.{kind}" for name in names for kind in ("weight", "bias"))
        self.weights.expect(name for name in possible if name in self.weights)

    def _route(self, step: Step, spec: ExpertsSpec, h: Array, tensors: "_LayerWeights", scales: Weight | None) -> Any:
        how = Router(spec.count, spec.used, spec.routing, spec.normalised, spec.scale, spec.groups, spec.groups_used)
        selection_bias = tensors.bias("exp_probs_b") if spec.selection_bias else None
        return step.route(h, tensors.matrix("ffn_gate_inp"), selection_bias, how, scales)

    def _get_for(self, program: "_Program", name: str) -> Weight:
        tensor = self.weights.get(name)
        if not is_expert(name):  # of thousands, a few are used; whoever evicts one has the program forgotten
            program.names.append(name)
            program.tensors.append(tensor)
        return tensor

    def _forget(self) -> None:
        self._forgotten += 1
        self._program = None

    def _rows(self, name: str, spans: Sequence[Span]) -> F32:
        return self.weights.rows(name, [token for span in spans for token in span.tokens])


def _rotations(config: ModelConfig) -> list[tuple[RopeSpec, Temperature | None]]:
    """The ways in which the model rotates: of its keys first, then those in which only queries are sharpened."""
    found: dict[tuple[RopeSpec, Temperature | None], None] = {}
    for temperature in (False, True):
        for attention in (layer.attention for layer in config.layers):
            if attention is not None and attention.rope is not None:
                found[attention.rope, attention.temperature if temperature else None] = None
    return list(found)
