"""One small file per architecture: it reads in a file's metadata what each layer is. Add a file, and a line here."""

from collections.abc import Callable

from everwarm.model.architectures import llama, qwen2, qwen3
from everwarm.model.metadata import Keys
from everwarm.model.spec import LayerSpec

ARCHITECTURES: dict[str, Callable[[Keys], tuple[LayerSpec, ...]]] = {
    "llama": llama.layers,
    "qwen2": qwen2.layers,
    "qwen3": qwen3.layers,
}
