"""How many bytes are not kept, by stage of a pass and by layer of experts: what has to come through the ring.

In: names of tensors that are kept, or no longer. Out: the most that can be on its way at once. A change of what is kept
costs the same however many tensors there are: a model with experts has thousands.
"""

from collections.abc import Mapping

from everwarm.weights.cache.place import experts_by_layer, ring_bytes, stages


class Streamed:
    """Bytes of what is not kept. In the beginning nothing is."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._sizes = sizes
        by_stage, _ = stages(sizes)
        experts = experts_by_layer(sizes)
        self._stage_of = {name: at for at, stage in enumerate(by_stage) for name in stage}
        self._layer_of = {name: layer for layer, names in experts.items() for name in names}
        self._stages = [sum(sizes[name] for name in stage) for stage in by_stage]
        self._experts = {layer: sum(sizes[name] for name in names) for layer, names in experts.items()}
        self._outside_experts: int | None = None  # ring bytes for what is no expert; None: a stage has changed

    def keep(self, name: str) -> None:
        """It is kept from now on."""
        self._add(name, -self._sizes[name])

    def drop(self, name: str) -> None:
        """It is not kept any more."""
        self._add(name, self._sizes[name])

    def ring_bytes(self, ahead: int) -> int:
        """What is streamed of the layer in use and of those that are read ahead, and the experts of one layer."""
        if self._outside_experts is None:
            self._outside_experts = ring_bytes(self._stages, ahead)
        return self._outside_experts + max(self._experts.values(), default=0)

    def _add(self, name: str, size: int) -> None:
        if (layer := self._layer_of.get(name)) is not None:
            self._experts[layer] += size
        elif (stage := self._stage_of.get(name)) is not None:
            self._stages[stage] += size
            self._outside_experts = None
