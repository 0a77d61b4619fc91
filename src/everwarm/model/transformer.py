"""The transformer, top to bottom.

In: a flat batch of tokens, spans of one or more sequences. Out: logits of the rows that were asked for; each span's KV
has grown by its rows. What differs between architectures is data in `ModelConfig`.
"""

from collections.abc import Sequence

from everwarm.kernels.backend import F32, KV, Affine, Backend, KVShape, Span
from everwarm.model import tensors
from everwarm.model.config import ModelConfig
from everwarm.model.numerics import numerics_id
from everwarm.model.rope import make_rope
from everwarm.weights.cache import WeightCache

__all__ = ["KV", "Span", "Transformer"]


class Transformer:
    """A model that can compute. Holds no weights of its own: each use asks the cache."""

    def __init__(self, config: ModelConfig, weights: WeightCache, backend: Backend) -> None:
        self.config = config
        self.weights = weights
        self.backend = backend
        factors = weights.get(tensors.ROPE_FACTORS) if tensors.ROPE_FACTORS in weights else None
        self._rotary = make_rope(config.rope, factors)
        self.numerics_id = numerics_id(config, self._rotary, backend)
        self._output = tensors.OUTPUT if tensors.OUTPUT in weights else tensors.EMBEDDING

    @property
    def kv_shape(self) -> KVShape:
        return KVShape(self.config.layers, self.config.kv_heads, self.config.head_dim)

    def forward(self, spans: Sequence[Span]) -> F32:
        """Logits (rows asked for, vocab), in the order of the spans."""
        config, weight, matrix = self.config, self.weights.get, self._matrix
        with self.weights.computing(), self.backend.step(spans, self._rotary) as step:
            table = self.weights.table(tensors.EMBEDDING)
            x = step.embed(table) if table is not None else step.start(self._looked_up(spans))  # (rows, width)
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
            return step.logits(x, weight(tensors.OUTPUT_NORM), config.norm_epsilon, weight(self._output))

    def _looked_up(self, spans: Sequence[Span]) -> F32:
        return self.weights.rows(tensors.EMBEDDING, [token for span in spans for token in span.tokens])

    def _matrix(self, name: str) -> Affine:
        bias = self.weights.get(name + ".bias") if name + ".bias" in self.weights else None
        return self.weights.get(name + ".weight"), bias
