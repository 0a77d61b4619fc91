"""The transformer, top to bottom.

In: a flat batch of tokens, spans of one or more sequences. Out: logits of the rows that were asked for; each span's KV
has grown by its rows. What differs between architectures is data in `ModelConfig`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from everwarm.errors import ModelError
from everwarm.kernels.backend import F32, KV, Affine, Array, Backend, KVShape, Span, Step, Weight
from everwarm.model import tensors
from everwarm.model.config import ModelConfig
from everwarm.model.numerics import numerics_id
from everwarm.model.rope import make_rope
from everwarm.weights.cache import WeightCache

__all__ = ["KV", "Span", "Transformer"]


@dataclass(slots=True)
class _Program:
    """The operations of all layers, and the weights that they use."""

    recorded: Step
    x: Array  # the rows that it begins and ends with
    names: list[str] = field(default_factory=list)
    tensors: list[Weight] = field(default_factory=list)


class Transformer:
    """A model that can compute. Holds no weights of its own: each use asks the cache."""

    def __init__(self, config: ModelConfig, weights: WeightCache, backend: Backend) -> None:
        self.config = config
        self.weights = weights
        self.backend = backend
        factors = weights.get(tensors.ROPE_FACTORS) if tensors.ROPE_FACTORS in weights else None
        self._rotary = make_rope(config.rope, factors)
        self.numerics_id = numerics_id(config, self._rotary, backend)
        self._program: _Program | None = None
        self._forgotten = 0  # how often: what is being recorded meanwhile is forgotten, too
        weights.letting_go = self._forget
        self._output = tensors.OUTPUT if tensors.OUTPUT in weights else tensors.EMBEDDING

    @property
    def kv_shape(self) -> KVShape:
        return self.config.kv_shape

    def forward(self, spans: Sequence[Span]) -> F32:
        """Logits (rows asked for, vocab), in the order of the spans."""
        weight = self.weights.get
        self.weights.as_built()
        with self.weights.computing(), self.backend.step(spans, self._rotary) as step:
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
        config = self.config

        def matrix(name: str) -> Affine:
            return weight(name + ".weight"), weight(name + ".bias") if name + ".bias" in self.weights else None

        for layer in range(config.layers):
            self.weights.enter(layer)
            block = f"blk.{layer}."
            h = step.norm(x, weight(block + "attn_norm.weight"), config.norm_epsilon)
            q, k, v = step.linear(h, [matrix(block + name) for name in ("attn_q", "attn_k", "attn_v")])
            q, k = step.rotate(q, config.heads), step.rotate(k, config.kv_heads)
            mixed = step.attention(layer, q, k, v, config.attention_scale, config.window)
            x = step.add_linear(x, mixed, matrix(block + "attn_output"))

            h = step.norm(x, weight(block + "ffn_norm.weight"), config.norm_epsilon)
            h = step.gated(h, matrix(block + "ffn_gate"), matrix(block + "ffn_up"))
            x = step.add_linear(x, h, matrix(block + "ffn_down"))
        return x

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
