"""A transformer written as plainly as can be, in f64, token by token and head by head: the oracle of the real one."""

import math

import numpy as np


def plain_logits(
    weights: dict[str, np.ndarray],
    tokens: list[int],
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    pairing: str = "adjacent",
    base: float = 10000.0,
    epsilon: float = 1e-5,
    scale_positions: float = 1.0,
    window: int | None = None,
) -> np.ndarray:
    """Logits after each token."""
    w = {name: data.astype(np.float64) for name, data in weights.items()}
    factors = w.get("rope_freqs.weight", np.ones(head_dim // 2))
    layers = 1 + max(int(name.split(".")[1]) for name in w if name.startswith("blk."))

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / math.sqrt((x * x).mean() + epsilon) * weight

    def rotated(head: np.ndarray, position: int) -> np.ndarray:
        turned = head.copy()
        for pair in range(head_dim // 2):
            i, j = (2 * pair, 2 * pair + 1) if pairing == "adjacent" else (pair, pair + head_dim // 2)
            angle = position * scale_positions * base ** (-2 * pair / head_dim) / factors[pair]
            turned[i] = head[i] * math.cos(angle) - head[j] * math.sin(angle)
            turned[j] = head[i] * math.sin(angle) + head[j] * math.cos(angle)
        return turned

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return w[name + ".weight"] @ x + w.get(name + ".bias", 0.0)

    keys: list[list[np.ndarray]] = [[] for _ in range(layers)]
    values: list[list[np.ndarray]] = [[] for _ in range(layers)]
    rows = []
    for position, token in enumerate(tokens):
        x = w["token_embd.weight"][token]
        for layer in range(layers):
            b = f"blk.{layer}."
            h = norm(x, w[b + "attn_norm.weight"])
            q = linear(h, b + "attn_q").reshape(heads, head_dim)
            k = linear(h, b + "attn_k").reshape(kv_heads, head_dim)
            if b + "attn_q_norm.weight" in w:
                q = np.stack([norm(head, w[b + "attn_q_norm.weight"]) for head in q])
                k = np.stack([norm(head, w[b + "attn_k_norm.weight"]) for head in k])
            keys[layer].append(np.stack([rotated(head, position) for head in k]))
            values[layer].append(linear(h, b + "attn_v").reshape(kv_heads, head_dim))
            first = 0 if window is None else max(0, position - window + 1)
            mixed = []
            for head in range(heads):
                kv = head // (heads // kv_heads)
                query = rotated(q[head], position)
                scores = np.array([query @ key[kv] / math.sqrt(head_dim) for key in keys[layer][first:]])
                shares = np.exp(scores - scores.max())
                shares /= shares.sum()
                mixed.append(sum(share * value[kv] for share, value in zip(shares, values[layer][first:], strict=True)))
            x = x + linear(np.concatenate(mixed), b + "attn_output")
            h = norm(x, w[b + "ffn_norm.weight"])
            gate = linear(h, b + "ffn_gate")
            x = x + linear(gate / (1 + np.exp(-gate)) * linear(h, b + "ffn_up"), b + "ffn_down")
        out = w.get("output.weight", w["token_embd.weight"])
        rows.append(out @ norm(x, w["output_norm.weight"]))
    return np.stack(rows)
