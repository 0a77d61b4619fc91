"""The transformer, top to bottom.

In: a flat batch of tokens, spans of one or more sequences. Out: logits of the rows that were asked for; each span's KV
has grown by its rows. What differs between architectures is data: a spec per layer.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

from everwarm.errors import ModelError
from everwarm.kernels.backend import F32, KV, Affine, Array, Backend, Span, Step, Weight
from everwarm.model import tensors
from everwarm.model.numerics import numerics_id
from everwarm.model.rope import make_rope
from everwarm.model.spec import AttentionSpec, FeedForwardSpec, ModelConfig
from everwarm.weights.cache.cache import WeightCache

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

    def matrix(self, name: str) -> Affine:
        bias = f"{self.prefix}{name}.bias"
        return self.get(f"{self.prefix}{name}.weight"), self.get(bias) if bias in self.known else None


class Transformer:
    """A model that can compute. Holds no weights of its own: each use asks the cache."""

    def __init__(
        self, config: ModelConfig, weights: WeightCache, backend: Backend, tensor_types: Collection[str] = ()
    ) -> None:
        """`tensor_types` are those of the model's file, for the numerics id."""
        self.config = config
        self.weights = weights
        self.backend = backend
        factors = weights.get(tensors.ROPE_FACTORS) if tensors.ROPE_FACTORS in weights else None
        ropes = list(dict.fromkeys(layer.attention.rope for layer in config.layers))
        self._rope_of = [ropes.index(layer.attention.rope) for layer in config.layers]
        self._rotaries = [make_rope(rope, factors) for rope in ropes]
        self.numerics_id = numerics_id(config, self._rotaries, backend, tensor_types)
        self.kv_shape = config.kv_shape
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
            x = step.embed(table) if table is not None else step.start(self._looked_up(spans))  # (rows, width)
            x = self._layers(step, x)
            logits = step.logits(x, weight(tensors.OUTPUT_NORM), self.config.norm_epsilon, weight(self._output))
            if not self.weights.as_built():  # raised inside the step, so that no KV counts that it has computed
                raise ModelError("weights were altered on disk while they were in use; they are built again: try again")
            return logits

    def _layers(self, step: Step, x: Array) -> Array:
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
            return self._compute_layers(step, x, self.weights.get)
        program = _Program(recorder, x)
        self._compute_layers(recorder, x, partial(self._get_for, program))
        step.replay(recorder)
        if self._forgotten == forgotten:
            self._program = program
        return x

    def _compute_layers(self, step: Step, x: Array, weight: Callable[[str], Weight]) -> Array:
        epsilon = self.config.norm_epsilon
        for number, layer in enumerate(self.config.layers):
            self.weights.enter(number)
            tensors = _LayerWeights(f"blk.{number}.", weight, self.weights)

            h = step.norm(x, tensors.vector("attn_norm"), epsilon)
            mixed = self._attention(step, number, layer.attention, h, tensors)
            x = step.add_linear(x, mixed, tensors.matrix("attn_output"))

            h = step.norm(x, tensors.vector("ffn_norm"), epsilon)
            h = self._feed_forward(step, layer.feed_forward, h, tensors)
            x = step.add_linear(x, h, tensors.matrix("ffn_down"))
        return x

    def _attention(self, step: Step, number: int, spec: AttentionSpec, h: Array, tensors: "_LayerWeights") -> Array:
        q, k, v = step.linear(h, [tensors.matrix(name) for name in ("attn_q", "attn_k", "attn_v")])
        if spec.qk_norm:
            q = step.norm_heads(q, tensors.vector("attn_q_norm"), self.config.norm_epsilon, spec.heads)
            k = step.norm_heads(k, tensors.vector("attn_k_norm"), self.config.norm_epsilon, spec.kv_heads)
        rope = self._rope_of[number]
        q, k = step.rotate(q, spec.heads, rope), step.rotate(k, spec.kv_heads, rope)
        return step.attention(number, q, k, v, spec.scale, spec.window, spec.softcap)

    def _feed_forward(self, step: Step, spec: FeedForwardSpec, h: Array, tensors: "_LayerWeights") -> Array:
        return step.gated(h, tensors.matrix("ffn_gate"), tensors.matrix("ffn_up"), spec.activation)

    def _get_for(self, program: "_Program", name: str) -> Weight:
        tensor = self.weights.get(name)
        program.names.append(name)
        program.tensors.append(tensor)
        return tensor

    def _forget(self) -> None:
        self._forgotten += 1
        self._program = None

    def _looked_up(self, spans: Sequence[Span]) -> F32:
        return self.weights.rows(tensors.EMBEDDING, [token for span in spans for token in span.tokens])
