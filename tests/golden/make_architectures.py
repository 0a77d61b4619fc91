"""Write the golden logits of tiny random models, one per architecture: what the classes of transformers compute in f32.

    .venv-peers/bin/python tests/golden/make_architectures.py

The weights are those of `tests/tiny.py` (seeded, so that the tests can make them again without torch), put into the
class that transformers has for the architecture. A new architecture is one line in `MODELS` (and, where a converter
turns weights around, a mapping of its own).
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).parent.parent))

from golden.architectures import GOLDEN, TINY, TOKENS
from tiny import Tiny

MODELS = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def original_name(name: str) -> str:
    if name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if name == "output_norm.weight":
        return "model.norm.weight"
    if name == "output.weight":
        return "lm_head.weight"
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{NAMES[part]}.{kind}"


def halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Llama's GGUF files rotate neighbouring rows; transformers rotates the halves of a head."""
    by_pair = weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    return by_pair.swapaxes(1, 2).reshape(weight.shape)


def logits(tiny: Tiny) -> np.ndarray:
    with tempfile.TemporaryDirectory() as directory:
        weights = tiny.write(Path(directory) / "tiny.gguf")
    make_config, make_model = MODELS[tiny.architecture]
    model = make_model(
        make_config(
            vocab_size=len(tiny.vocab), hidden_size=tiny.width, intermediate_size=tiny.ffn, head_dim=tiny.head_dim,
            num_hidden_layers=tiny.layers, num_attention_heads=tiny.heads, num_key_value_heads=tiny.kv_heads,
            max_position_embeddings=tiny.context, rms_norm_eps=1e-5, tie_word_embeddings=tiny.tied,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, attn_implementation="eager",
        )
    )  # fmt: skip
    if tiny.architecture == "llama":
        for name, weight in weights.items():
            if ".attn_q." in name or ".attn_k." in name:
                weights[name] = halves(weight, tiny.heads if "attn_q" in name else tiny.kv_heads)
    state = {original_name(name): torch.from_numpy(weight.copy()) for name, weight in weights.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    assert all(name == "lm_head.weight" for name in missing), missing
    model.tie_weights()
    with torch.no_grad():
        found: np.ndarray = model.float().eval()(torch.tensor([TOKENS])).logits[0].numpy()
    return found


if __name__ == "__main__":
    golden = {name: logits(tiny) for name, tiny in TINY.items()}
    np.savez_compressed(GOLDEN, **golden)
    print(f"{GOLDEN.name}: {', '.join(golden)}, {GOLDEN.stat().st_size:,} bytes")
