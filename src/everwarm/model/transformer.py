"""The transformer, top to bottom.

In: a flat batch of tokens, spans of one or more sequences. Out: logits of the rows that were asked for; each span's
KV has grown by its rows. What differs between architectures is data in `ModelConfig`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from everwarm.kernels import reference as ops
from everwarm.model import tensors
from everwarm.model.config import ModelConfig
from everwarm.model.rope import make_rope
from everwarm.weights.cache import WeightCache

F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive new tokens of one sequence, to be computed behind what its KV already holds."""

    tokens: Sequence[int]
    kv: ops.KV
    logits_from: int  # rows of this span from here on want logits; len(tokens) for none


class Transformer:
    """A model that can compute. Holds no weights of its own: each use asks the cache."""

    def __init__(self, config: ModelConfig, weights: WeightCache, threads: int | None = None) -> None:
        self.config = config
        self.weights = weights
        self._blas = ops.BlasThreads(threads)
        factors = weights.get(tensors.ROPE_FACTORS) if tensors.ROPE_FACTORS in weights else None
        self._rope = make_rope(config.rope, factors)
        self._output = tensors.OUTPUT if tensors.OUTPUT in weights else tensors.EMBEDDING

    def new_kv(self) -> ops.KV:
        return ops.KV(self.config.layers, self.config.kv_heads, self.config.head_dim, self.config.context)

    def forward(self, spans: Sequence[Span]) -> F32:
        """Logits (rows asked for, vocab), in the order of the spans."""
        with self._blas.limit(sum(len(span.tokens) for span in spans)):
            return self._forward(spans)

    def _forward(self, spans: Sequence[Span]) -> F32:
        config, weights = self.config, self.weights
        starts = [span.kv.length for span in spans]
        rows = _row_ranges(spans)
        tokens = np.concatenate([np.asarray(span.tokens, np.int32) for span in spans])
        positions = np.concatenate(
            [
                np.arange(start, start + len(span.tokens), dtype=np.int32)
                for start, span in zip(starts, spans, strict=True)
            ]
        )
        turns = ops.rotary_table(self._rope.frequencies, self._rope.magnitude, positions)

        x = ops.embed(weights.get(tensors.EMBEDDING), tokens)  # (rows, width)
        for layer in range(config.layers):
            block = f"blk.{layer}."
            h = ops.rms_norm(x, weights.get(block + "attn_norm.weight"), config.norm_epsilon)
            q = self._linear(h, block + "attn_q").reshape(-1, config.heads, config.head_dim)
            k = self._linear(h, block + "attn_k").reshape(-1, config.kv_heads, config.head_dim)
            v = self._linear(h, block + "attn_v").reshape(-1, config.kv_heads, config.head_dim)
            q, k = ops.rotate(q, turns, self._rope.pairing), ops.rotate(k, turns, self._rope.pairing)
            mixed = np.empty((len(tokens), config.heads * config.head_dim), np.float32)
            for span, start, at in zip(spans, starts, rows, strict=True):
                keys, values = span.kv.append(layer, k[at], v[at])
                mixed[at] = ops.attention(q[at], keys, values, start, config.attention_scale, config.window)
            x = x + self._linear(mixed, block + "attn_output")

            h = ops.rms_norm(x, weights.get(block + "ffn_norm.weight"), config.norm_epsilon)
            h = ops.silu_gate(self._linear(h, block + "ffn_gate"), self._linear(h, block + "ffn_up"))
            x = x + self._linear(h, block + "ffn_down")

        for span in spans:
            span.kv.advance(len(span.tokens))
        wanted = np.concatenate(
            [np.arange(at.start + span.logits_from, at.stop) for span, at in zip(spans, rows, strict=True)]
        )
        h = ops.rms_norm(x[wanted], weights.get(tensors.OUTPUT_NORM), config.norm_epsilon)
        return ops.linear(h, weights.get(self._output))

    def _linear(self, x: F32, name: str) -> F32:
        bias = self.weights.get(name + ".bias") if name + ".bias" in self.weights else None
        return ops.linear(x, self.weights.get(name + ".weight"), bias)


def _row_ranges(spans: Sequence[Span]) -> list[slice]:
    ends = np.cumsum([len(span.tokens) for span in spans])
    return [slice(int(end) - len(span.tokens), int(end)) for span, end in zip(spans, ends, strict=True)]
