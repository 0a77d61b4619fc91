"""Writes src/everwarm/text/unicode_classes.txt from the table that llama.cpp's pre-tokenizers use.

    python tests/golden/make_unicode_classes.py llama.cpp/src/unicode-data.cpp src/everwarm/text/unicode_classes.txt

The table is a fact about Unicode 15.1: general categories and White_Space. It is stored, not asked of `unicodedata`,
because that follows the version of Python, and a token must not.
"""

import re
import sys
from itertools import pairwise
from pathlib import Path

LETTERS = {0x02: "N", 0x04: "L", 0x10: "M", 0x20: "P", 0x40: "S"}


def main(source: Path, target: Path) -> None:
    text = source.read_text(encoding="utf-8")
    flags = text[text.index("unicode_ranges_flags") :].split("};")[0]
    spaces = text[text.index("unicode_set_whitespace") :].split("};")[0]
    whitespace = {int(code, 16) for code in re.findall(r"^0x([0-9A-F]+),", spaces, re.MULTILINE)}
    starts = [(int(a, 16), int(b, 16)) for a, b in re.findall(r"\{0x([0-9A-F]+), 0x([0-9A-F]+)\}", flags)]

    runs: list[str] = []
    previous = ""
    for (start, flag), (end, _) in pairwise(starts):
        for code in range(max(start, 0x80), end):
            letter = "W" if code in whitespace else LETTERS.get(flag, "-")
            if letter != previous:
                runs.append(f"{code:X}{letter}")
                previous = letter

    lines, line = [], ""
    for run in runs:
        if len(line) + 1 + len(run) > 120:
            lines.append(line)
            line = ""
        line = f"{line} {run}".strip()
    target.write_text("\n".join([*lines, line]) + "\n", encoding="ascii")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
