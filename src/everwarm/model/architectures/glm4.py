"""GLM 4: half of each head rotates, norms stand on both sides, gate and up are one tensor."""

from everwarm.model.metadata import Keys, read_attention, read_feed_forward, read_skipped, refuse_sections
from everwarm.model.spec import Body, LayerSpec


def read(keys: Keys) -> Body:
    refuse_sections(keys)
    layer = LayerSpec(read_attention(keys, "adjacent"), read_feed_forward(keys), norm_after=True)
    skipped = read_skipped(keys)
    return Body((layer,) * (keys.positive("block_count") - skipped), skipped_layers=skipped)
