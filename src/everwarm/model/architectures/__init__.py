"""One small file per architecture: it reads in a file's metadata what each layer is. Add a file, and a line here."""

from collections.abc import Callable

from everwarm.model.architectures import (
    deepseek2,
    gemma2,
    gemma3,
    gemma4,
    glm4,
    glm4moe,
    gpt_oss,
    granite,
    llama,
    mistral3,
    olmo2,
    phi3,
    qwen2,
    qwen2moe,
    qwen3,
    qwen3moe,
    smollm3,
)
from everwarm.model.metadata import Keys
from everwarm.model.spec import Body

ARCHITECTURES: dict[str, Callable[[Keys], Body]] = {
    "llama": llama.read,
    "qwen2": qwen2.read,
    "qwen2moe": qwen2moe.read,
    "qwen3": qwen3.read,
    "qwen3moe": qwen3moe.read,
    "gemma2": gemma2.read,
    "gemma3": gemma3.read,
    "gemma4": gemma4.read,
    "granite": granite.read,
    "phi3": phi3.read,
    "smollm3": smollm3.read,
    "mistral3": mistral3.read,
    "glm4": glm4.read,
    "glm4moe": glm4moe.read,
    "olmo2": olmo2.read,
    "gpt-oss": gpt_oss.read,
    "deepseek2": deepseek2.read,
    "granitemoe": granite.read,
}
