"""Write the golden logits of a model: what transformers (f32) and llama.cpp make of the same GGUF file.

    .venv-peers/bin/python tests/golden/make_logits.py MODEL.gguf tests/golden/logits-NAME.npz

Needs the environment that `make peers` builds. Token ids are llama.cpp's. Kept per position of each text: the top 32
logits and the log-sum-exp of transformers, and one full last row; of llama.cpp, over the whole of the prose: its most
likely token at each position and the negative log-likelihood of the next.
"""

import sys
from pathlib import Path

import llama_cpp
import numpy as np
import torch
from texts import PROSE, PROSE_TOKENS, SCORE_WINDOW, TEXTS, TOP
from transformers import AutoModelForCausalLM


def main(model: Path, target: Path) -> None:
    golden: dict[str, np.ndarray] = {}
    peer = llama_cpp.Llama(str(model), n_ctx=SCORE_WINDOW, n_batch=512, logits_all=True, verbose=False)
    ids = {
        name: peer.tokenize(text.encode(), add_bos=False, special=name == "chat")[
            : PROSE_TOKENS if name == "prose" else None
        ]
        for name, text in TEXTS.items()
    }

    best, nll = [], []
    prose = peer.tokenize(PROSE.encode(), add_bos=False, special=False)
    for low in range(0, len(prose), SCORE_WINDOW):
        window = prose[low : low + SCORE_WINDOW]
        peer.reset()
        peer.eval(window)
        logits = torch.from_numpy(np.array(peer.scores[: len(window)]))
        best.append(logits.argmax(-1).numpy())
        logprobs = torch.log_softmax(logits[:-1].double(), -1)
        nll.append(-logprobs[torch.arange(len(window) - 1), torch.tensor(window[1:])].numpy())
        print(f"llama.cpp: {low + len(window)} of {len(prose)} tokens, nll {np.concatenate(nll).mean():.5f}")
    golden["llama_best"] = np.concatenate(best).astype(np.int32)
    golden["llama_nll"] = np.concatenate(nll).astype(np.float32)
    peer.close()

    network = AutoModelForCausalLM.from_pretrained(model.parent, gguf_file=model.name, dtype=torch.float32)
    for name, tokens in ids.items():
        with torch.no_grad():
            logits = network(torch.tensor([tokens])).logits[0]
        top = logits.topk(TOP, dim=-1)
        golden[f"{name}_ids"] = np.asarray(tokens, np.int32)
        golden[f"{name}_top_ids"] = top.indices.numpy().astype(np.int32)
        golden[f"{name}_top_logits"] = top.values.numpy()
        golden[f"{name}_logsumexp"] = logits.double().logsumexp(-1).numpy().astype(np.float32)
        if name == "chat":
            golden["chat_last_row"] = logits[-1].numpy()
        print(f"transformers: {name}, {len(tokens)} tokens")
    np.savez_compressed(target, **golden)
    print(f"{target}: {target.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]))
