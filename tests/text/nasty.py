"""Strings that tokenizers get wrong: by hand where a reason is known, at random (always the same) where none is.

Out: `nasty_strings()`, almost 4,000 different strings without surrogates, the same in every run and on every version of
Python: golden files refer to them by their place in the list.
"""

import random
from collections.abc import Callable
from functools import cache

SPACES = " \t\n\r\v\f\u0085\u00a0\u1680\u2000\u2003\u2009\u200a\u2028\u2029\u202f\u205f\u3000"
NOT_QUITE_SPACES = "\u200b\u200c\u200d\u2060\ufeff\u180e\x1c\x1d\x1e\x1f\x00\x08\x7f"


def _items(text: str) -> list[str]:
    return text.split(" ")


SPECIAL_LOOK_ALIKES = _items(
    "<|im_start|> <|im_end|> <|endoftext|> <|eot_id|> <|end|> <|begin_of_text|> <s> </s> <unk> <pad> <bos> <eos> "
    "<start_of_turn> <end_of_turn> [INST] [/INST] <mask> <0x0A> <unused7> <fim_prefix> <|fim_prefix|> "
    "<|file_sep|> <|reserved_special_token_3|> <filename> <tool_call> <\uff5cbegin\u2581of\u2581sentence\uff5c> "
    "<\uff5cUser\uff5c> [PAD151700] <|START_OF_TURN_TOKEN|> [e~[ <|user|> <|assistant|> <|system|> <think> "
    "</think> <|extra_0|> >>TITLE<< <h1> </table>"
)
CONTRACTIONS = _items("'s 'S 't 'T 're 'RE 'Re 've 'VE 'm 'M 'll 'LL 'lL 'd 'D")
WORDS = _items(
    "the Hello WORLD camelCase snake_case HTTPServer iPhone o'clock na\u00efve Stra\u00dfe \u0130stanbul "
    "\u01c5ungla e\u0301clair co\u00f6perate \u1e9eEIN \ufb01ne \u017fecret A\u030a "
    "\u041f\u0440\u0438\u0432\u0435\u0442 \u039a\u03b1\u03bb\u03b7\u03bc\u03ad\u03c1\u03b1 \u0561\u0580\u0587 "
    "\u4f60\u597d\u4e16\u754c \u6771\u4eac\u90fd \u3053\u3093\u306b\u3061\u306f \u30ab\u30bf\u30ab\u30ca "
    "\uff76\uff80\uff76\uff85 \uc548\ub155\ud558\uc138\uc694 \u1112\u1161\u11ab \u3105\u3106\u3107 \u2f00 "
    "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 \u0633\u0644\u0627\u0645 \u05e9\u05dc\u05d5\u05dd "
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0995\u09cd\u09b7 \u0ba4\u0bae\u0bbf\u0bb4\u0bcd "
    "\u1780\u17d2\u1798\u17c2\u179a \u1019\u103c\u1014\u103a\u1019\u102c \u10d0\u10d1\u10d2 \u1c90\u1c91 "
    "\u13a0\u13a1 \u12a0\u121b\u122d\u129b \U00010400\U00010428 \U0001e900\U0001e922 "
    "\u0645\u064e\u0631\u0652\u062d\u064e\u0628\u064b\u0627 \u05d1\u05b0\u05bc\u05e8\u05b5 \ufdfa "
    "\uff28\uff45\uff4c\uff4c\uff4f \U00020000\U00020001 \u3400\u4dbf \ufa0e \u9fa6\u9fff \u8c48\uf900 "
    "\u2126\u212a\u1f7d\u03ce"
)
NUMBERS = _items(
    "0 12 123 1234 12345 123456789012345678901234567890 3.14159 1,234,567.89 0x1F600 1e-10 007 1/2 "
    "\u0661\u0662\u0663\u0664 \u0967\u0968\u0969 \uff11\uff12\uff13\uff14 \u2160\u2163\u216b \u2460\u2461 "
    "\u00b2\u00b3\u00b9 \u00bd\u2153 \u3007\u4e00\u4e8c\u4e09 \U0001d7ce\U0001d7cf \u0be7\u0bf0 1\u0662\uff13 "
    "x\u00b2 10\u2076 \u3220\u3280 2024-02-29T23:59:59.999Z 192.168.0.1:8080 v1.2.3-rc.4 $1,000.00 50\u2030"
)
NUMBERS += ["+49 (0)30 1234567"]
SYMBOLS = _items(
    "! !!! ?! ... \u2026 --- \u2014 *** ==> <=> `x` ~~ ^^ || $$ ++ @@ ## \u3002 \uff01\uff1f \u300c\u300d "
    "\u2018\u2019\u201c\u201d \u00ab\u00bb \u00a1\u00bf \u0964 \u061f\u060c \u055c \u20ac\u00a3\u00a5 "
    "\u2211\u222b\u221e \u2190\u2192 \u2500\u2502\u253c \u2588\u2593 \u00a9\u00ae\u2122 \u00b0 \u00a8\u00b4 \\n "
    "\\ / // /* */ {} [] () <> \"\" '' &amp; %20 :// _ __ \u203f \ufe4f"
)
EMOJI = _items(
    "\U0001f600 \U0001f44d\U0001f3fd \U0001f468\u200d\U0001f469\u200d\U0001f467 "
    "\U0001f1e9\U0001f1ea\U0001f1eb\U0001f1f7 \u2764\ufe0f 1\ufe0f\u20e3 "
    "\U0001f3f4\U000e0067\U000e0062\U000e007f \U0001f9d1\U0001f3fb\u200d\U0001f680 \u263a \U0001fae8"
)
ODDITIES = _items(
    "\ue000\uf8ff \U000f0000 \U0010fffd \uffff \ufffe \ufdd0 \u0378 \U000e1000 \U0001f8ff \ufffd\ufffd "
    "\u202e\u202d \u2066x\u2069 \u00ad \u034f \u0300\u0301\u0302 \u20dd \U0001d165 \u0f3f \ufe0f \U000e0100 "
    "\u1ccf0 \U0001ccf0 \u1c89 \ua7da \u2ffc\u31ef \U0002ebf0 \U000323af \U0003134f \u2ebf \ud7ff"
)
CODE = [
    "def f(x, *, y=None):\n    return {k: v for k, v in x.items() if v != y}\n\n\nclass A(B):\n\tpass\n",
    "#include <stdio.h>\r\nint main(void)\r\n{\r\n\treturn 0x7f & ~1; // done\r\n}\r\n",
    "SELECT *\nFROM   \"t\"\nWHERE a<>'b''c' -- it's\n  AND  x>=1.5e3;",
    "<div class='a b'>\n  <p>It&#39;s <b>5</b> &lt; 6</p>\n</div>\n<!-- </div> -->",
    '{"k": [1, 2.5e-3, null, true, "\\u00e9\\n"], "\u00fc": {}}',
    "$ ls -la | grep '^d' && echo \"$HOME\" > /dev/null 2>&1",
    "| a | b |\n|---|:-:|\n| 1 | 2 |\n\n- [x] done\n  * sub\n\n```py\nprint('x')\n```",
    "\\begin{align}\n  x^2 &= \\frac{1}{2}\\\\\n\\end{align}",
    "a\tb\t\tc\n\t\td  \t e \n \t\n",
    "IMGIMGABCDZ IMGIMGAZ <sentinel:12>x<sentinel:>",
]


@cache
def nasty_strings() -> list[str]:
    """Every string, without repetitions."""
    strings = dict.fromkeys(["", *_by_hand()])
    draw = _Draw(20_240_229)
    for maker, count in ((_sentence, 500), (_mixture, 500), (_characters, 450), (_around_special, 250), (_spaced, 250)):
        strings.update(dict.fromkeys(maker(draw) for _ in range(count)))
    return list(strings)


class _Draw:
    """Random choices built on `random()` alone, the one method whose sequence Python promises to keep."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random

    def below(self, limit: int) -> int:
        return int(self._random() * limit)

    def one(self, items: list[str] | str) -> str:
        return items[self.below(len(items))]

    def some(self, items: list[str] | str, most: int) -> list[str]:
        return [self.one(items) for _ in range(1 + self.below(most))]


def _by_hand() -> list[str]:
    pieces = [
        *SPECIAL_LOOK_ALIKES,
        *CONTRACTIONS,
        *WORDS,
        *NUMBERS,
        *SYMBOLS,
        *EMOJI,
        *ODDITIES,
        *SPACES,
        *NOT_QUITE_SPACES,
    ]
    out = [*pieces, *CODE]
    out += [f"a{space * count}b" for space in SPACES for count in (1, 2, 3)]
    out += [f"x{space * count}" for space in SPACES for count in (1, 2)]
    out += [f"{space * count}x" for space in SPACES for count in (1, 2)]
    out += [" " * count for count in (1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 32, 33, 64, 100, 600)]
    out += ["\n" * count for count in (1, 2, 3, 8, 31, 32, 40)] + ["\t" * count for count in (1, 2, 5, 31, 33)]
    out += ["\r\n" * count for count in (1, 2, 3)] + [
        " \n" * 3,
        "\n " * 3,
        "\n\r" * 2,
        " \r",
        "\r ",
        "\t\n\t",
        "\n  x",
        "  \n  ",
    ]
    out += [
        "\u3000\u3000\u6bb5\u843d",
        "x\u3000\uff01",
        "\u3000.\u3000,",
        "a\u00a0b",
        " \u00a0 ",
        "x \u2028 y",
        "\u0085\n\u0085",
    ]
    out += [form.format("'s") for form in ("I{}", "X{}Y", " {}", "{0}{0}")]
    out += [f"we{c} go" for c in CONTRACTIONS] + [f"WE{c}" for c in CONTRACTIONS] + [f"{c}x" for c in CONTRACTIONS]
    out += [
        "it'\u017f",
        "it\u2019s",
        "'\u017f",
        "''s",
        "'''s",
        "' s",
        "'sad",
        "'llama",
        "'\u0131",
        "don't've",
        "\u00e9's",
        "\u4f60's",
        "5's",
    ]
    out += [f"{word}{suffix}" for word in WORDS for suffix in (" ", "'s", "1", "!", "\n", "\u0301")]
    out += [f"{prefix}{word}" for word in WORDS for prefix in (" ", "  ", "_", "/", "1", "\u3000", "\u0301")]
    out += [f"{number}{other}" for number in NUMBERS for other in ("a", " ", "\u4e2d", ".")]
    out += (
        [f" {number}" for number in NUMBERS] + ["1" * count for count in range(1, 12)] + ["9" * 100, "1 2 3", "1a2b3c"]
    )
    out += [f"{symbol}{other}" for symbol in SYMBOLS for other in ("\n", "\r\n\n", " x", "x", "1", "\u4e2d")]
    out += [f" {symbol}" for symbol in SYMBOLS] + [f"x{symbol}y" for symbol in SYMBOLS]
    out += [f"x{odd}1" for odd in [*EMOJI, *ODDITIES, *NOT_QUITE_SPACES]] + [f" {odd} " for odd in [*EMOJI, *ODDITIES]]
    out += [f"{a}{b}" for a in ("<|im_", "<|", "<", "|>", "</", "[") for b in ("end|>", "s>", "start|>", "INST]")]
    out += [
        "<<|im_end|>>",
        "<|im_end|><|im_end|>",
        "<|im_end|>  \n x",
        "  </s>  ",
        "<s>x</s>",
        "</s> </s>",
        "<s> <unk>\n<s>",
    ]
    out += [
        "a" * 1000,
        "ab" * 500,
        "\u4e2d" * 500,
        "\U0001f600" * 100,
        "=" * 200,
        "\u0301" * 50,
        "aA" * 100,
        "lorem" * 200,
    ]
    out += ["".join(chr(code) for code in range(128)), "".join(chr(code) for code in range(128, 0x250))]
    out += [
        b"caf\xe9 \xff\xfe \xf0\x9f\x98".decode("utf-8", "replace"),
        "\u2581",
        "\u2581\u2581x",
        "x\u2581y",
        "\u0120x",
        "\u010a",
        "\u00c0\u00f5",
    ]
    return out


def _sentence(draw: _Draw) -> str:
    glue = [" ", " ", " ", " ", "  ", "\n", ", ", ". ", "; ", "-", "", "\t"]
    return "".join(
        draw.one(WORDS) + draw.one([*CONTRACTIONS, *[""] * 48]) + draw.one(glue) for _ in range(2 + draw.below(8))
    )


def _mixture(draw: _Draw) -> str:
    sources = [
        WORDS,
        NUMBERS,
        SYMBOLS,
        EMOJI,
        ODDITIES,
        CONTRACTIONS,
        CODE,
        list(SPACES),
        [" "],
        ["\n"],
        list(NOT_QUITE_SPACES),
    ]
    return "".join(draw.one(sources[draw.below(len(sources))])[:24] for _ in range(2 + draw.below(10)))


def _characters(draw: _Draw) -> str:
    """Neighbouring code points of a few random places: scripts that nobody here has thought of."""
    out = []
    for _ in range(1 + draw.below(4)):
        base = (
            draw.below(0x300) if draw.below(3) == 0 else draw.below(0x10000) if draw.below(4) else draw.below(0x110000)
        )
        codes = [min(base + draw.below(48), 0x10FFFF) for _ in range(1 + draw.below(8))]
        out += [chr(code) for code in codes if not 0xD800 <= code <= 0xDFFF] + draw.some(
            ["", " ", "\n", "a", "1", "'"], 2
        )
    return "".join(out)


def _around_special(draw: _Draw) -> str:
    pieces: list[Callable[[], str]] = [
        lambda: draw.one(SPECIAL_LOOK_ALIKES),
        lambda: draw.one(SPACES),
        lambda: draw.one(WORDS),
    ]
    return "".join(pieces[draw.below(3)]() for _ in range(2 + draw.below(6)))


def _spaced(draw: _Draw) -> str:
    parts = [draw.one([*WORDS, *NUMBERS, *SYMBOLS]) + "".join(draw.some(SPACES, 4)) for _ in range(1 + draw.below(5))]
    return "".join(draw.some(SPACES, 3)) * draw.below(2) + "".join(parts)
