"""SmolLM 3: Llama, but in each fourth layer positions are not encoded."""

from dataclasses import replace

from everwarm.model.metadata import Keys, read_attention, read_feed_forward
from everwarm.model.spec import Body, LayerSpec

WITHOUT_ROPE_EVERY = 4
"""No key says so."""


def read(keys: Keys) -> Body:
    attention, feed_forward = read_attention(keys, "adjacent"), read_feed_forward(keys)
    without = replace(attention, rope=None)
    return Body(
        tuple(
            LayerSpec(without if (number + 1) % WITHOUT_ROPE_EVERY == 0 else attention, feed_forward)
            for number in range(keys.positive("block_count"))
        )
    )
