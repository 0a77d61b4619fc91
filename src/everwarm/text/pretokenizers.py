r"""The pre-tokenizers that a GGUF file can name in `tokenizer.ggml.pre`, as data.

In: a name. Out: the patterns that cut text into words (`words` applies them), and the habits that come with the name.

Names, aliases and patterns are llama.cpp's, whose reading of a file is the one that its author has tested; where it
departs from the model's own tokenizer.json, so do we. `\p{L}`, `\p{N}`, `\p{P}`, `\p{M}` and `\p{S}` are Unicode's
categories; `\p{Upper}` and `\p{Lower}` tell letters apart within ASCII only; `\p{NotHan}` is a letter outside
`\p{Han}`.
Characters beyond ASCII are written as `\u....`: an editor that normalises text would change them unseen.
"""

from dataclasses import dataclass

from everwarm.errors import TokenizerError


@dataclass(frozen=True, slots=True)
class Thirds:
    """Cuts runs of digits into threes, counted from the right. A regular expression would take quadratic time."""

    digit: str
    end: bool
    """Cut a run off at its end too, and never at its beginning."""


Pattern = str | Thirds


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """What a name in `tokenizer.ggml.pre` stands for."""

    patterns: tuple[Pattern, ...]
    ignore_merges: bool = False
    """A word that is itself in the vocabulary is one token, whatever the merges would make of it."""
    add_bos: bool = False
    """What holds if the file does not say whether a text begins with BOS."""


def pretokenizer(name: str) -> PreTokenizer:
    """The pre-tokenizer of that name. An unknown one is an error: a wrong one would quietly spoil the answers."""
    try:
        return PRETOKENIZERS[name]
    except KeyError:
        known = ", ".join(sorted(PRETOKENIZERS))
        raise TokenizerError(f"tokenizer.ggml.pre: {name!r} is not supported (known: {known})") from None


_CONTRACTION = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_PREFIX = r"[^\r\n\p{L}\p{N}]?"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SYMBOLS_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_LAST_SPACES = r"\s+(?!\S)|\s+"
_SPACES = rf"\s*[\r\n]+|{_LAST_SPACES}"

_GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_LAST_SPACES}"
_LLAMA3 = rf"{_CONTRACTION}|{_PREFIX}\p{{L}}+|\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACES}"
_QWEN2 = rf"{_CONTRACTION}|{_PREFIX}\p{{L}}+|\p{{N}}|{_SYMBOLS}|{_SPACES}"
_TEKKEN = (
    rf"{_PREFIX}[\p{{Upper}}]*[\p{{Lower}}]+|{_PREFIX}[\p{{Upper}}]+[\p{{Lower}}]*|\p{{N}}|{_SYMBOLS_SLASH}|{_SPACES}"
)
_GPT4O = (
    rf"{_PREFIX}[\p{{Upper}}]*[\p{{Lower}}]+{_CONTRACTION}?|{_PREFIX}[\p{{Upper}}]+[\p{{Lower}}]*{_CONTRACTION}?"
    rf"|\p{{N}}{{1,3}}|{_SYMBOLS_SLASH}|{_SPACES}"
)
_GRANITE_MULTILINGUAL = _GPT4O.replace(r"\p{Upper}", r"\p{Upper}\p{M}").replace(r"\p{Lower}", r"\p{Lower}\p{M}")
_MARKED_WORD = rf"{_PREFIX}[\p{{L}}\p{{M}}]+{_CONTRACTION}?"
_KIMI = rf"[\p{{Han}}]+|{_PREFIX}[\p{{NotHan}}]+{_CONTRACTION}?|\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACES}"
_DOUBLED_SPACES = "".join(rf"|\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4)) + r"|\s{1,2}(?!\S)|\s"

_BLOOM = r" ?[^(\s|.,!?\u2026\u3002\uFF0C\u3001\u0964\u06D4\u060C)]+"
_CJK = r"[\u4E00-\u9FA5\u3040-\u309F\u30A0-\u30FF]+"
_ASIAN = (
    r"[\u4E00-\u9FFF\u3400-\u4DBF\u8C48-\uFAFF\u3040-\u309F\u30A0-\u30FF\uFF65-\uFF9F\u2F00-\u2FDF\u0E40-\u0E7F"
    r"\u0E80-\u0EFF\u1780-\u17FF\u1000-\u109F\uAA60-\uAA7F\uA9E0-\uA9FF\uAC00-\uD7AF\u1100-\u11FF]+"
)
_YOUTU_SCRIPTS = (
    r"[\uAC00-\uD7A3\u3131-\u318E]+|[\uFF01\u2026\u201C\u201D\u2018\u2019\u2014\uFF1A\uFF1B\uFF0C\u3001-\u303F"
    rf"\uFE30-\uFE4F]+|[\u3105-\u312F]+|{_CJK}"
)

_DEEPSEEK_ASIAN = r"[\u4E00-\u9FA5\u0800-\u4E00\uAC00-\uD7FF]+"
_DEEPSEEK_PUNCTUATION = r"\s?[!-/:-~\uFF01-\uFF0F\uFF1A-\uFF5E\u2018-\u201F\u3000-\u3002]+"
_DEEPSEEK_LETTERS = (
    r"\s?[A-Za-z\u00B5\u00C0-\u00D6\u00D8-\u00F6\u00F8-\u01BA\u01BC-\u01BF\u01C4-\u0293\u0295-\u02AF\u0370-\u0373"
    r"\u0376\u0377\u037B-\u037D\u037F\u0386\u0388-\u038A\u038C\u038E-\u03A1\u03A3-\u03F5\u03F7-\u0481\u048A-"
    r"\u052F\u0531-\u0556\u10A0-\u10C5\u13A0-\u13F5\u13F8-\u13FD\u1C90-\u1CBA\u1CBD-\u1CBF\u1D00-\u1D2B\u1D6B-"
    r"\u1D77\u1D79-\u1D9A\u1E00-\u1F15\u1F18-\u1F1D\u1F20-\u1F45\u1F48-\u1F4D\u1F50-\u1F57\u1F59\u1F5B\u1F5D"
    r"\u1F5F-\u1F7D\u1F80-\u1FB4\u1FB6-\u1FBC\u1FBE\u1FC2-\u1FC4\u1FC6-\u1FCC\u1FD0-\u1FD3\u1FD6-\u1FDB\u1FE0-"
    r"\u1FEC\u1FF2-\u1FF4\u1FF6-\u1FFC\u2102\u2107\u210A-\u2113\u2115\u2119-\u211D\u2124\u2126\u2128\u212A-"
    r"\u212D\u212F-\u2134\u2139\u213C-\u213F\u2145-\u2149\u214E\u2183\u2184\u2C00-\u2C7B\u2C7E-\u2CE4\u2CEB-"
    r"\u2CEE\u2CF2\u2CF3\uA640-\uA66D\uA680-\uA69B\uA722-\uA76F\uA771-\uA787\uA78B-\uA78E\uAB70-\uABBF\uFB00-"
    r"\uFB06\uFB13-\uFB17\uFF21-\uFF3A\uFF41-\uFF5A\U00010400-\U0001044F\U000104B0-\U000104D3\U000104D8-"
    r"\U000104FB\U00010C80-\U00010CB2\U00010CC0-\U00010CF2\U000118A0-\U000118DF\U0001E900-\U0001E943]+"
)
# `\s+$`, but tried once per run of spaces and not from each of them.
_TRAILING_SPACES = r"(?<!\s)\s+\Z"

_PUNCTUATED_WORD = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
_DEEPSEEK3 = rf"{_PUNCTUATED_WORD}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"

_FAMILIES: tuple[tuple[str, PreTokenizer], ...] = (
    ("default", PreTokenizer((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))),
    (
        "gpt-2 phi-2 mpt olmo jais trillion granite-docling exaone4 gigachat a.x-4.0 mellum modern-bert jina-es "
        "jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code roberta-bpe",
        PreTokenizer((_GPT2,)),
    ),
    (
        "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2",
        PreTokenizer((r"\p{N}", _GPT2)),
    ),
    ("falcon", PreTokenizer((r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]"))),
    (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True),
    ),
    ("dbrx smaug-bpe chatglm-bpe", PreTokenizer((_LLAMA3,))),
    ("glm4 glm5", PreTokenizer((_LLAMA3,), ignore_merges=True)),
    (
        "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2",
        PreTokenizer((_QWEN2,)),
    ),
    (
        "qwen35",
        PreTokenizer(
            (rf"{_CONTRACTION}|{_PREFIX}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",),
        ),
    ),
    ("laguna", PreTokenizer((r"[^\n]+|\n+", _QWEN2))),
    ("ufakzeka", PreTokenizer((_QWEN2.removeprefix(f"{_CONTRACTION}|"),))),
    (
        "minicpm5",
        PreTokenizer((r"\p{N}{1,3}", _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}+")), ignore_merges=True),
    ),
    (
        "deepseek-llm",
        PreTokenizer(
            ("[\r\n]", _DEEPSEEK_LETTERS, _DEEPSEEK_PUNCTUATION, _TRAILING_SPACES, _DEEPSEEK_ASIAN, r"\p{N}+")
        ),
    ),
    ("deepseek-coder", PreTokenizer(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_ASIAN, r"\p{N}"))),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", PreTokenizer((r"\p{N}{1,3}", _CJK, _DEEPSEEK3))),
    (
        "spark2_5",
        PreTokenizer(
            (
                r"\p{N}{1,3}",
                _CJK,
                rf"{_PUNCTUATED_WORD}| ?[\p{{P}}\p{{S}}]+|[\r\n]|{_LAST_SPACES}",
                r"\p{N}",
            )
        ),
    ),
    ("afmoe", PreTokenizer((Thirds(r"\p{N}", end=True), _ASIAN, _DEEPSEEK3))),
    ("tekken", PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True)),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", PreTokenizer((_GPT4O,))),
    ("granite-embed-multi-97m", PreTokenizer((_GRANITE_MULTILINGUAL,), ignore_merges=True)),
    (
        "tiny_aya cohere2moe",
        PreTokenizer(
            (Thirds(r"\p{N}", end=True), rf"{_MARKED_WORD}|\p{{N}}{{1,3}}|{_SYMBOLS_SLASH}|{_SPACES}"),
        ),
    ),
    (
        "youtu",
        PreTokenizer((_YOUTU_SCRIPTS, rf"{_MARKED_WORD}|\p{{N}}|{_SYMBOLS_SLASH}|{_SPACES}"), ignore_merges=True),
    ),
    ("kimi-k2", PreTokenizer((_KIMI,))),
    ("superbpe", PreTokenizer((r"\p{N}+", Thirds("[0-9]", end=False)))),
    ("poro-chat bloom gpt3-finnish", PreTokenizer((_BLOOM,))),
    ("viking", PreTokenizer((_BLOOM, r"\p{N}"))),
    (
        "bailingmoe bailingmoe2 llada-moe",
        PreTokenizer((_QWEN2.replace(r"\s*[\r\n]+", r"\s*[\r\n]"),)),
    ),
    (
        "seed-coder",
        PreTokenizer((_QWEN2.replace(_SYMBOLS, r" ?[^\s\p{L}\p{N}]+"),)),
    ),
    (
        "exaone-moe",
        PreTokenizer(
            (
                rf"{_CONTRACTION}|{_PREFIX}\p{{L}}(?:\p{{M}}| ?\p{{L}})*|\p{{N}}"
                rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|{_LAST_SPACES}",
            )
        ),
    ),
    (
        "jais-2",
        PreTokenizer((_LLAMA3.removesuffix(f"|{_LAST_SPACES}") + _DOUBLED_SPACES,)),
    ),
    (
        "chameleon",
        PreTokenizer(
            (
                "<sentinel:[0-9]+>",
                "IMGIMG[A-I]{1,4}Z",
                r"[\t\n]|    |  ",
                r"\p{N}",
                r"[\p{P}!-/:-@\[-`{-~]",
                _GPT2,
            ),
            add_bos=True,
        ),
    ),
)

PRETOKENIZERS = {name: pre for names, pre in _FAMILIES for name in names.split()}
"""Every name that we know, aliases included."""
