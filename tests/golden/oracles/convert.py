"""llama.cpp's own converter, from a folder that transformers has saved to a GGUF file.

The converter is in the source of llama.cpp, not in a package: `LLAMA_CPP` says where that is (`make oracles` fetches
the source package of llama-cpp-python, which holds it). It expects a tokenizer; ours is the vocabulary of
`tests/tiny.py`.
"""

import json
import logging
import os
import sys
from pathlib import Path

sys.path.insert(0, os.environ.get("LLAMA_CPP", ".venv-peers/llama.cpp"))
sys.path.insert(0, os.path.join(sys.path[0], "gguf-py"))

import gguf
import torch
from conversion import ModelType, get_model_architecture, get_model_class
from conversion.base import ModelBase

from golden.oracles.case import VOCAB
from tiny import CHATML, Tiny, add_vocabulary

logging.disable(logging.WARNING)


def convert(folder: Path, target: Path, *, mtp: bool) -> None:
    """Matrices stay in f32, unless the folder has them in MXFP4."""
    tokens = Tiny().vocab
    assert len(tokens) == VOCAB
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": tokens}, "added_tokens": []}))
    with torch.inference_mode():
        converter = get_model_class(get_model_architecture(ModelBase.load_hparams(folder, False), ModelType.TEXT))
        converter.no_mtp = not mtp
        model = converter(
            folder, gguf.LlamaFileType.ALL_F32, target, model_name="tiny"
        )  # by a name llama.cpp knows some models
        for part in (model, getattr(model, "impl", None)):  # some are a shell around another
            if part is not None:
                part.set_vocab = lambda part=part: add_vocabulary(part.gguf_writer, tokens, CHATML)
        model.write()
