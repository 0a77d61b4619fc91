"""What a GGUF file says about its vocabulary: the text and kind of each token, and the tokens that mean something.

In: the file's metadata. Out: a `Vocabulary`, checked: texts are unique, arrays are of one length, ids are in range.

Kinds are the file's, except that tokens known by name to steer generation (`<|im_end|>`, `<fim_prefix>` ...) are
control tokens whatever the file says, as in llama.cpp: some converters forget to mark them. We don't follow it where it
does the opposite: it takes gpt-oss's `<|start|>` and the like for text, so that a message could pretend to be another.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from everwarm.errors import TokenizerError
from everwarm.text.prefixes import MOST_LENGTH
from everwarm.types import Metadata


class Kind(IntEnum):
    """A token's kind, numbered as in `tokenizer.ggml.token_type`."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a model. `kinds[i]` is the `Kind` of token `i`, and `ids[texts[i]] == i`."""

    texts: Sequence[str]
    kinds: bytes
    ids: Mapping[str, int]
    bos_id: int | None
    eos_id: int | None
    unknown_id: int | None
    eog_ids: frozenset[int]
    strip_after: frozenset[int]
    """Special tokens that swallow the white space behind them."""

    def of_kind(self, *kinds: Kind) -> dict[str, int]:
        """Text and id of every token of these kinds."""
        return {self.texts[i]: i for i in _of_kind(self.kinds, kinds)}


def read_vocabulary(metadata: Metadata, *, default_ids: Mapping[str, int]) -> Vocabulary:
    """The vocabulary in `metadata`. A default id counts only if that token is a special one."""
    texts = strings(metadata, "tokenizer.ggml.tokens")
    ids = dict(zip(texts, range(len(texts)), strict=True))
    if len(ids) != len(texts) or "" in ids:
        ids = _with_names_for_empty(texts)
    kinds = _kinds(metadata, len(texts))

    named = {role: _find(metadata, ids, kinds, role) for role in _NAMES}
    ends = [name for name in _EOG_NAMES if name in ids]
    for name in ends:
        kinds[ids[name]] = Kind.CONTROL
    if _GEMMA4_END in ends and _TAG_IN_GEMMA4 in ends:
        ends.remove(_TAG_IN_GEMMA4)
        kinds[ids[_TAG_IN_GEMMA4]] = Kind.NORMAL

    _check_special(texts, kinds)
    special = (Kind.CONTROL, Kind.UNKNOWN)

    def given(role: str) -> int | None:
        id_ = token_id(metadata, role, len(texts))
        default = default_ids.get(role)
        if id_ is None and default is not None and default < len(texts) and kinds[default] in special:
            return default
        return id_

    eos_id = given("eos")
    eog_ids = {ids[name] for name in ends}
    eog_ids.update(id_ for role in _EOG_ROLES if (id_ := named[role]) is not None)
    if eos_id is not None:
        eog_ids.add(eos_id)
    if any(names <= ids.keys() for names in _END_IS_NOT_THE_END):
        eog_ids.discard(ids["<|end|>"])

    return Vocabulary(
        texts=texts,
        kinds=bytes(kinds),
        ids=ids,
        bos_id=given("bos"),
        eos_id=eos_id,
        unknown_id=given("unknown"),
        eog_ids=frozenset(eog_ids),
        strip_after=_strip_after(metadata, texts, kinds),
    )


def strings(metadata: Metadata, key: str) -> list[str]:
    """The array of strings under `key`, which must be there."""
    values = _array(metadata, key)
    if values is None:
        raise TokenizerError(f"{key} is missing: the file holds no complete tokenizer (was it made for another tool?)")
    if not set(map(type, values)) <= {str}:
        raise TokenizerError(f"{key}: an array of strings expected")
    return values  # type: ignore[return-value]


def numbers(metadata: Metadata, key: str, count: int) -> list[float] | None:
    """The array of numbers under `key`, one per token, if there is one."""
    values = _array(metadata, key)
    if values is None:
        return None
    if len(values) != count:
        raise TokenizerError(f"{key}: {len(values):,} entries for {count:,} tokens")
    if not set(map(type, values)) <= {int, float}:
        raise TokenizerError(f"{key}: an array of numbers expected")
    return values  # type: ignore[return-value]


def flag(metadata: Metadata, key: str, default: bool) -> bool:
    """The boolean under `key`, or the default."""
    value = metadata.get(key, default)
    if not isinstance(value, bool):
        raise TokenizerError(f"{key}: true or false expected, found {value!r}")
    return value


def token_id(metadata: Metadata, role: str, count: int) -> int | None:
    """The id under `tokenizer.ggml.{role}_token_id`, if there is one."""
    key = f"tokenizer.ggml.{role}_token_id"
    value = metadata.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < count:
        raise TokenizerError(f"{key}: {value!r} is no id of this vocabulary (0 to {count - 1:,})")
    return value


def _array(metadata: Metadata, key: str) -> list[object] | None:
    values = metadata.get(key)
    if values is None:
        return None
    if isinstance(values, str | int | float):
        raise TokenizerError(f"{key}: an array expected, found {values!r}")
    return list(values)


def _kinds(metadata: Metadata, count: int) -> bytearray:
    types = numbers(metadata, "tokenizer.ggml.token_type", count)
    if types is None:
        return bytearray([Kind.NORMAL]) * count
    try:
        kinds = bytearray(types)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise TokenizerError("tokenizer.ggml.token_type: small integers expected") from None
    return kinds.translate(bytes(kind if kind <= max(Kind) else Kind.UNDEFINED for kind in range(256)))


def _with_names_for_empty(texts: list[str]) -> dict[str, int]:
    """Ids by text, once tokens without a text have got one. Any other repetition is an error."""
    ids: dict[str, int] = {}
    for id_, text in enumerate(texts):
        if not text:
            texts[id_] = text = f"[EMPTY_{id_}]"
        if ids.setdefault(text, id_) != id_:
            raise TokenizerError(f"tokenizer.ggml.tokens: tokens {ids[text]:,} and {id_:,} have the same text {text!r}")
    return ids


def _check_special(texts: Sequence[str], kinds: bytearray) -> None:
    """Every place of every prompt is compared with the special tokens: a bound on their length bounds that work."""
    for id_ in _of_kind(kinds, (Kind.CONTROL, Kind.UNKNOWN, Kind.USER_DEFINED)):
        if len(texts[id_]) > MOST_LENGTH:
            raise TokenizerError(
                f"tokenizer.ggml.tokens: special token {id_:,} has {len(texts[id_]):,} characters, at most "
                f"{MOST_LENGTH} are supported; use another file of this model"
            )


def _find(metadata: Metadata, ids: Mapping[str, int], kinds: bytearray, role: str) -> int | None:
    """The token of that role: the file's, else the first known name, which then is a control token."""
    id_ = token_id(metadata, role, len(kinds))
    if id_ is None:
        id_ = next((ids[name] for name in _NAMES[role] if name in ids), None)
        if id_ is not None:
            kinds[id_] = Kind.CONTROL
    return id_


def _strip_after(metadata: Metadata, texts: Sequence[str], kinds: bytearray) -> frozenset[int]:
    """GGUF has no place for this attribute of a token; llama.cpp knows that Phi-3 has it by the name of the model."""
    name = str(metadata.get("general.name", "")).lower()
    if "phi-3" not in name and "phi3" not in name:
        return frozenset()
    keep = {"<unk>", "<s>", "<|endoftext|>"}
    special = _of_kind(kinds, (Kind.CONTROL, Kind.USER_DEFINED, Kind.UNKNOWN))
    return frozenset(i for i in special if texts[i] not in keep)


def _of_kind(kinds: bytes | bytearray, wanted: Sequence[Kind]) -> list[int]:
    found: list[int] = np.flatnonzero(np.isin(np.frombuffer(kinds, np.uint8), wanted)).tolist()
    return found


_NAMES = {
    "eot": (
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>"),
        *("_<EOT>", "[EOT]", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<end_of_utterance>"),
    ),
    "eom": ("<|eom_id|>",),
    "fim_pre": (
        *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<\uff5cfim\u2581begin\uff5c>", "<PRE>", "\u2581<PRE>"),
        *("<|code_prefix|>", "<|prefix|>"),
    ),
    "fim_suf": (
        *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<\uff5cfim\u2581hole\uff5c>", "<SUF>", "\u2581<SUF>"),
        *("<|code_suffix|>", "<|suffix|>"),
    ),
    "fim_mid": (
        *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<\uff5cfim\u2581end\uff5c>", "<MID>", "\u2581<MID>"),
        *("<|code_middle|>", "<|middle|>"),
    ),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
"""Tokens that have a role by their name if the file gives it to none."""

_EOG_ROLES = ("eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_EOG_NAMES = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
    *(
        "<|endoftext|>",
        "</s>",
        "<|eom_id|>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<|end_of_text|>",
        "<eos>",
        "<turn|>",
    ),
    *("<end_of_utterance>", "<|tool_response>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~["),
)
"""Tokens that end a generation by their name, besides the ones that the file says."""

_GEMMA4_END, _TAG_IN_GEMMA4 = "<|tool_response>", "</s>"
"""In vocabularies that have the first, the second is a tag of HTML."""

_END_IS_NOT_THE_END = (
    {"<|end|>", "<|return|>", "<|call|>"},
    {"<|end|>", "<|return|>", "<|calls|>"},
    {"<|end|>", "<|flush|>", "<|call|>"},
    {"<|end|>", "<|flush|>", "<|calls|>"},
)
"""Vocabularies in which `<|end|>` closes a message and not the turn (gpt-oss, Solar Open)."""
