"""The texts whose logits are compared with other implementations. Shared by the golden script and the tests."""

from pathlib import Path

PROSE = (Path(__file__).parent.parent / "data" / "prose.txt").read_text(encoding="utf-8")

TEXTS = {
    "chat": (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nWhy is the sky blue, and why is it red in the evening?<|im_end|>\n"
        "<|im_start|>assistant\nSunlight is scattered by the air: short waves more than long ones"
    ),
    "code": (
        "def fibonacci(n: int) -> list[int]:\n"
        '    """The first n Fibonacci numbers."""\n'
        "    numbers = [0, 1]\n"
        "    while len(numbers) < n:\n"
        "        numbers.append(numbers[-1] + numbers[-2])\n"
        "    return numbers[:n]\n\n\n"
        "for (int i = 0; i < 10; ++i) { std::cout << data[i] << '\\n'; }\n"
    ),
    "chinese": "床前明月光,疑是地上霜。举头望明月,低头思故乡。这首诗是李白写的,表达了诗人对家乡的思念之情。",
    "emoji": "Party 🎉🎂 with the family 👨‍👩‍👧‍👦 in 🇫🇷, thumbs up 👍🏽! Ça va? ☀️→🌧️ ½ ≠ ∞ 🏳️‍🌈 done ✅",
    "prose": PROSE,
}

PROSE_TOKENS = 1000  # of the last text
SCORE_WINDOW = 2048  # the perplexity of all of PROSE is taken in windows of this many tokens
TOP = 32
