"""A block that predicts a second token, put beside the layers of a saved model, as published files have it.

transformers leaves it out and llama.cpp uses it only for drafts, so the logits are those without it.
"""

import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from golden.oracles.case import Case
from golden.oracles.levels import fill


def add_mtp(case: Case, folder: Path) -> None:
    """Rewrite what transformers has saved. The layer is a copy of the last one."""
    assert case.mtp is not None
    layer, around, (projection, *norms) = case.mtp
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    last = max(int(found[1]) for name in tensors if (found := re.match(r"model\.layers\.(\d+)\.", name)))
    copied = f"model.layers.{last}."
    added = {layer + name.removeprefix(copied): value.clone() for name, value in tensors.items() if copied in name}
    width = tensors["model.norm.weight"].shape[0]
    shapes = {f"{around}{projection}.weight": (width, 2 * width)} | {
        f"{around}{norm}.weight": (width,) for norm in norms
    }
    for name, shape in shapes.items():
        added[name] = torch.from_numpy(fill(name, shape, {}, add_one=case.norms_add_one, seed=case.seed))
    save_file(tensors | added, path, metadata={"format": "pt"})
