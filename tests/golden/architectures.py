"""The tiny models whose logits `make_architectures.py` has recorded."""

from pathlib import Path

from tiny import Tiny

GOLDEN = Path(__file__).parent / "architectures.npz"
TOKENS = [72, 101, 108, 108, 111, 32, 119, 111, 114, 108, 100, 258, 0, 255, 257, 72, 72, *range(100, 140)]
TINY = {
    "llama": Tiny(architecture="llama"),
    "qwen2": Tiny(architecture="qwen2", biases=True, tied=False),
    "qwen3": Tiny(architecture="qwen3", qk_norm=True, heads=6, kv_heads=2, head_dim=64),
}
