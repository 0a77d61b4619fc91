"""What is not kept, counted change by change, is what adding it all up gives."""

from hypothesis import given
from hypothesis import strategies as st

from everwarm.weights.cache.place import experts_by_layer, ring_bytes, stages
from everwarm.weights.cache.streamed import Streamed

NAMES = [
    *("token_embd.weight", "output.weight", "output_norm.weight"),
    *(f"blk.{layer}.{name}.weight" for layer in range(4) for name in ("attn_q", "ffn_norm", "ffn_gate_inp")),
    *(f"blk.{layer}.ffn_up.{expert}.weight" for layer in range(1, 4) for expert in range(3)),
]
SIZES = {name: 10 + number * number for number, name in enumerate(NAMES)}


def added_up(kept: set[str], ahead: int) -> int:
    streamed = [sum(SIZES[name] for name in stage if name not in kept) for stage in stages(SIZES)[0]]
    experts = [sum(SIZES[name] for name in names if name not in kept) for names in experts_by_layer(SIZES).values()]
    return ring_bytes(streamed, ahead) + max(experts)


@given(st.lists(st.sampled_from(NAMES)), st.integers(0, 3))
def test_every_change_is_counted(changed: list[str], ahead: int) -> None:
    streamed, kept = Streamed(SIZES), set[str]()
    assert streamed.ring_bytes(ahead) == added_up(kept, ahead)
    for name in changed:
        (streamed.drop if name in kept else streamed.keep)(name)
        kept ^= {name}
        assert streamed.ring_bytes(ahead) == added_up(kept, ahead)


def test_a_model_without_experts() -> None:
    sizes = {"blk.0.attn_q.weight": 5, "blk.1.attn_q.weight": 7, "output_norm.weight": 1}
    assert Streamed(sizes).ring_bytes(1) == ring_bytes([5, 7, 1], 1)
