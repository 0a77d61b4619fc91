"""GGUF metadata -> what a transformer needs to know about itself."""

from dataclasses import fields

from everwarm.errors import ModelError
from everwarm.model.architectures import ARCHITECTURES
from everwarm.model.metadata import Keys, refuse_variants
from everwarm.model.spec import LayerSpec, ModelConfig
from everwarm.types import Metadata

MOST_PIECES = 1 << 17
"""Experts and heads of MLA, in all layers. The models with most have about 50,000."""


def read_config(
    metadata: Metadata, vocab_size: int, tensors: int | None = None, context: int | None = None
) -> ModelConfig:
    """The config that the file describes. `vocab_size` is the number of rows of the embedding table, `tensors` the
    number of tensors in the file: a layer has more than one. `context` is how many tokens will be used at most, if
    that is less than the model's own limit.
    """
    keys = Keys(metadata, vocab_size, context)
    architecture = ARCHITECTURES.get(keys.architecture)
    if architecture is None:
        known = ", ".join(ARCHITECTURES)
        raise ModelError(f"architecture {keys.architecture!r} is not supported; supported are {known}")
    refuse_variants(keys)
    count = keys.positive("block_count")
    if tensors is not None and count > tensors:  # before a list is made that is as long as the metadata say
        raise ModelError(f"block_count is {count:,}, but the file has only {tensors:,} tensors")
    body = architecture(keys)
    pieces = sum(_pieces(layer) for layer in body.layers)
    if pieces > MOST_PIECES:  # before they are listed
        raise ModelError(
            f"{pieces:,} experts and heads of MLA in {count:,} layers, at most {MOST_PIECES:,} are supported; the file "
            "is damaged, or hostile"
        )
    return ModelConfig(
        architecture=keys.architecture,
        name=str(metadata.get("general.name", "unnamed")),
        width=keys.positive("embedding_length"),
        vocab_size=vocab_size,
        context=keys.positive("context_length"),
        norm_epsilon=_epsilon(keys),
        **{field.name: getattr(body, field.name) for field in fields(body)},
    )


def _epsilon(keys: Keys) -> float:
    other = keys.get("attention.layer_norm_epsilon", -1.0)  # so Nemotron's files call it
    return other if other >= 0.0 else keys.require("attention.layer_norm_rms_epsilon", 0.0)


def _pieces(layer: LayerSpec) -> int:
    """How many experts and heads have matrices of their own, which are cut out of tensors."""
    experts = None if layer.feed_forward is None else layer.feed_forward.experts
    latent = layer.attention is not None and layer.attention.latent is not None
    return (experts.count if experts else 0) + (layer.attention.heads if latent and layer.attention else 0)
