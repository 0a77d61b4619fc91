"""What rounding alone does to a model: transformers computes with the roundings of our native backend.

Random models amplify small errors, each by its own factor. So the bound for the native backend is not one number: it is
what the same model loses in transformers when keys and values are rounded to f16, and when in addition the inputs of
matrices are rounded to 8 bits.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

GROUP = 32
"""Inputs that share a scale."""
ROUTER = 16
"""Outputs of the widest matrix that is a router: what it reads is not rounded."""


@contextmanager
def f16_cache(model: Any) -> Iterator[None]:
    """Keys and values in f16."""
    modules = {sys.modules[type(part).__module__] for part in model.modules()}
    with ExitStack() as stack:
        for module in modules:
            if hasattr(module, "eager_attention_forward"):
                attention = module.eager_attention_forward

                def rounded(
                    part: Any, q: Any, k: Any, v: Any, *more: Any, _exact: Any = attention, **named: Any
                ) -> Any:
                    return _exact(part, q, k.half().float(), v.half().float(), *more, **named)

                stack.enter_context(patch.object(module, "eager_attention_forward", rounded))
        yield


@contextmanager
def inputs_of_8_bits() -> Iterator[None]:
    """Inputs of matrices in groups of 32 codes with a scale."""
    exact = torch.nn.functional.linear

    def rounded(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if weight.shape[0] > ROUTER and x.shape[-1] % GROUP == 0:
            groups = x.unflatten(-1, (-1, GROUP))
            scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
            x = (torch.round(groups / scale) * scale).flatten(-2)
        return exact(x, weight, bias)

    with patch.object(torch.nn.functional, "linear", rounded):
        yield
