"""Vocabularies as GGUF metadata: from where models keep them, cut down to what some texts need, written for llama.cpp.

In: GGUF files, Hugging Face's tokenizer.json (or a zip of it), Mistral's tekken.json, tiktoken's ranks, SentencePiece
models. Out: metadata as `Tokenizer.from_metadata` takes them. A reduced vocabulary is a valid one of its
own, with other ids than the full one: llama.cpp is asked for its tokens anew.
"""

import json
import zipfile
from base64 import b64decode
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gguf

from everwarm.text.bpe import BYTE_ALPHABET

PREFIX = "tokenizer.ggml."
ROLES = ("bos", "eos", "unknown", "padding", "eot", "eom")
FLAGS = ("model", "pre", "add_bos_token", "add_eos_token", "add_space_prefix")
SPECIAL = (2, 3, 4)

Fields = dict[str, Any]


SPECIALS: dict[str, dict[int, str]] = {
    "gpt-oss": {
        199_998: "<|startoftext|>", 199_999: "<|endoftext|>", 200_002: "<|return|>", 200_003: "<|constrain|>",
        200_005: "<|channel|>", 200_006: "<|start|>", 200_007: "<|end|>", 200_008: "<|message|>", 200_012: "<|call|>",
        200_018: "<|endofprompt|>",
    },
    "olmo2": {
        100_257: "<|endoftext|>", 100_258: "<|fim_prefix|>", 100_259: "<|fim_middle|>", 100_260: "<|fim_suffix|>",
        100_264: "<|im_start|>", 100_265: "<|im_end|>", 100_276: "<|endofprompt|>", 100_277: "<|pad|>",
    },
    "granite-4": {
        100_257: "<|end_of_text|>", 100_258: "<|fim_prefix|>", 100_259: "<|fim_middle|>", 100_260: "<|fim_suffix|>",
        100_261: "<|fim_pad|>", 100_264: "<|start_of_role|>", 100_265: "<|end_of_role|>", 100_270: "<tool_call>",
        100_271: "</tool_call>",
    },
}  # fmt: skip
"""Control tokens beside tiktoken's ranks, by family. The others that a model has are reserved for later."""

BEGIN_AND_END = {
    "gpt-oss": ("<|startoftext|>", "<|return|>"),
    "olmo2": ("<|endoftext|>", "<|endoftext|>"),
    "granite-4": ("<|end_of_text|>", "<|end_of_text|>"),
}


def load(path: Path, pre: str, family: str) -> Fields:
    """The tokenizer in `path`. `pre` names the pre-tokenizer, where the file does not or another one is meant."""
    if path.suffix == ".gguf":
        return from_gguf(path) | ({PREFIX + "pre": pre} if pre else {})
    if path.suffix == ".tiktoken":
        return from_tiktoken(path, pre, family)
    if "tekken" in path.name:
        return from_tekken(path, pre)
    if path.suffix in (".json", ".zip"):
        return from_hugging_face(path, pre)
    return from_sentencepiece(path)


def from_gguf(path: Path) -> Fields:
    fields = gguf.GGUFReader(path).fields
    keep = {"general.name", *(PREFIX + name for name in (*FLAGS, "tokens", "token_type", "scores", "merges"))}
    keep |= {f"{PREFIX}{role}_token_id" for role in ROLES}
    return {key: field.contents() for key, field in fields.items() if key in keep}


def from_hugging_face(path: Path, pre: str) -> Fields:
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as archive:
            text = archive.read(next(name for name in archive.namelist() if name.endswith("tokenizer.json")))
    else:
        text = path.read_bytes()
    data = json.loads(text)
    texts = {id_: token for token, id_ in data["model"]["vocab"].items()}
    types = dict.fromkeys(texts, 1)
    for token in data["added_tokens"]:
        texts[token["id"]] = token["content"]
        types[token["id"]] = 3 if token["special"] else 4
    size = max(texts) + 1
    roles = _roles(path.parent / "tokenizer_config.json", {text: id_ for id_, text in texts.items()})
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in data["model"]["merges"]]
    return {
        PREFIX + "model": "gpt2",
        PREFIX + "pre": pre,
        PREFIX + "tokens": [texts.get(id_, f"[PAD{id_}]") for id_ in range(size)],
        PREFIX + "token_type": [types.get(id_, 5) for id_ in range(size)],
        PREFIX + "merges": merges,
        **roles,
    }


def from_tekken(path: Path, pre: str) -> Fields:
    data = json.loads(path.read_text(encoding="utf-8"))
    specials = data["config"]["default_num_special_tokens"]
    count = data["config"]["default_vocab_size"] - specials
    ranks = {b64decode(token["token_bytes"]): token["rank"] for token in data["vocab"][:count]}
    names = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    names += [f"<SPECIAL_{id_}>" for id_ in range(len(names), specials)]
    return {
        PREFIX + "model": "gpt2",
        PREFIX + "pre": pre,
        PREFIX + "tokens": names + [_written(token) for token in ranks],
        PREFIX + "token_type": [3] * specials + [1] * len(ranks),
        PREFIX + "merges": _merges(ranks),
        PREFIX + "bos_token_id": 1,
        PREFIX + "eos_token_id": 2,
    }


def from_tiktoken(path: Path, pre: str, family: str) -> Fields:
    ranks = {b64decode(token): int(rank) for token, rank in map(str.split, path.read_text("ascii").splitlines())}
    texts = {rank: _written(token) for token, rank in ranks.items()} | SPECIALS[family]
    ids = {text: id_ for id_, text in texts.items()}
    begin, end = BEGIN_AND_END[family]
    size = max(texts) + 1
    return {
        PREFIX + "model": "gpt2",
        PREFIX + "pre": pre,
        PREFIX + "tokens": [texts.get(id_, f"<|reserved_{id_}|>") for id_ in range(size)],
        PREFIX + "token_type": [1 if id_ < len(ranks) else 3 for id_ in range(size)],
        PREFIX + "merges": _merges(ranks),
        PREFIX + "bos_token_id": ids[begin],
        PREFIX + "eos_token_id": ids[end],
    }


def _merges(ranks: dict[bytes, int]) -> list[str]:
    """These formats have ranks and no merges; a token is made of any two that it can be cut into."""
    merges = []
    for token in ranks:
        cuts = [(token[:at], token[at:]) for at in range(1, len(token))]
        pairs = [(left, right) for left, right in cuts if left in ranks and right in ranks]
        merges += sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return [f"{_written(left)} {_written(right)}" for left, right in merges]


def from_sentencepiece(path: Path) -> Fields:
    from sentencepiece import SentencePieceProcessor  # only where llama.cpp is asked, too

    pieces = SentencePieceProcessor(model_file=str(path))
    kinds = ((pieces.is_unknown, 2), (pieces.is_control, 3), (pieces.is_byte, 6), (pieces.is_unused, 5))
    ids = range(pieces.vocab_size())
    return {
        PREFIX + "model": "llama",
        PREFIX + "tokens": [pieces.id_to_piece(id_) for id_ in ids],
        PREFIX + "token_type": [next((kind for test, kind in kinds if test(id_)), 1) for id_ in ids],
        PREFIX + "scores": [pieces.get_score(id_) for id_ in ids],
        PREFIX + "bos_token_id": pieces.bos_id(),
        PREFIX + "eos_token_id": pieces.eos_id(),
        PREFIX + "unknown_token_id": pieces.unk_id(),
    }


def reduce(fields: Fields, used: Iterable[int]) -> Fields:
    """The same vocabulary with no more than the tokens `used`, what they are made of, and what every one must have."""
    texts, types = fields[PREFIX + "tokens"], fields[PREFIX + "token_type"]
    specials = [id_ for id_, kind in enumerate(types) if kind in SPECIAL]
    roles = {role: id_ for role in ROLES if (id_ := fields.get(f"{PREFIX}{role}_token_id")) is not None}
    kept = {texts[id_] for id_ in (*used, *specials[:40], *roles.values())}
    kept |= {text for text, kind in zip(texts, types, strict=True) if kind == 6 or (text in BYTE_ALPHABET and text)}

    merges: list[str] = fields.get(PREFIX + "merges", [])
    if merges:
        parts = defaultdict(set)
        for merge in merges:
            left, right = merge.split(" ")
            parts[left + right] |= {left, right}
        queue = list(kept)
        while queue:
            new = parts[queue.pop()] - kept
            kept |= new
            queue += new
    else:
        known = set(texts)
        kept |= {t[i:j] for t in list(kept) for i in range(len(t)) for j in range(i + 1, len(t) + 1)} & known

    ids = [id_ for id_, text in enumerate(texts) if text in kept]
    place = {id_: index for index, id_ in enumerate(ids)}
    out = {key: fields[key] for key in ("general.name", *(PREFIX + name for name in FLAGS)) if key in fields}
    out |= {f"{PREFIX}{role}_token_id": place[id_] for role, id_ in roles.items()}
    out |= {PREFIX + "tokens": [texts[id_] for id_ in ids], PREFIX + "token_type": [types[id_] for id_ in ids]}
    if merges:
        out[PREFIX + "merges"] = [m for m in merges if m.replace(" ", "") in kept and kept.issuperset(m.split(" "))]
    if PREFIX + "scores" in fields:
        out[PREFIX + "scores"] = [fields[PREFIX + "scores"][id_] for id_ in ids]
    return out


def write_gguf(fields: Fields, path: Path) -> None:
    """A file with this tokenizer and no tensors, as llama.cpp loads it with `vocab_only`."""
    writer = gguf.GGUFWriter(path, "llama")
    add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string, list: writer.add_array}
    for key, value in fields.items():
        add[type(value)](key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def _roles(config: Path, ids: dict[str, int]) -> Fields:
    """BOS and EOS as the converters of llama.cpp find them: a model without BOS gets its end of text for one."""
    data = json.loads(config.read_text(encoding="utf-8"))
    named = {role: data.get(f"{role}_token") for role in ("bos", "eos")}
    texts = {role: token["content"] if isinstance(token, dict) else token for role, token in named.items()}
    texts["bos"] = texts["bos"] or "<|endoftext|>"
    return {f"{PREFIX}{role}_token_id": ids[text] for role, text in texts.items() if text in ids}


def _written(token: bytes) -> str:
    return token.decode("latin-1").translate(BYTE_ALPHABET)
