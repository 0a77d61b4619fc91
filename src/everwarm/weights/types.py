"""The tensor types of GGUF: number, name, and how many elements a block holds in how many bytes.

Numbers and names are ggml's: `TensorType(12)` is what a file means by 12, `TensorType.Q4_K` what people call it. Gaps
in the numbers are types that ggml has removed. A row of a tensor is a whole number of blocks.
"""

from enum import IntEnum


class TensorType(IntEnum):
    """A tensor's encoding. Each line reads: number in the file, elements per block, bytes per block."""

    F32 = 0, 1, 4
    F16 = 1, 1, 2
    Q4_0 = 2, 32, 18
    Q4_1 = 3, 32, 20
    Q5_0 = 6, 32, 22
    Q5_1 = 7, 32, 24
    Q8_0 = 8, 32, 34
    Q8_1 = 9, 32, 40
    Q2_K = 10, 256, 84
    Q3_K = 11, 256, 110
    Q4_K = 12, 256, 144
    Q5_K = 13, 256, 176
    Q6_K = 14, 256, 210
    Q8_K = 15, 256, 292
    IQ2_XXS = 16, 256, 66
    IQ2_XS = 17, 256, 74
    IQ3_XXS = 18, 256, 98
    IQ1_S = 19, 256, 50
    IQ4_NL = 20, 32, 18
    IQ3_S = 21, 256, 110
    IQ2_S = 22, 256, 82
    IQ4_XS = 23, 256, 136
    I8 = 24, 1, 1
    I16 = 25, 1, 2
    I32 = 26, 1, 4
    I64 = 27, 1, 8
    F64 = 28, 1, 8
    IQ1_M = 29, 256, 56
    BF16 = 30, 1, 2
    TQ1_0 = 34, 256, 54
    TQ2_0 = 35, 256, 66
    MXFP4 = 39, 32, 17
    NVFP4 = 40, 64, 36
    Q1_0 = 41, 128, 18

    block_elements: int
    block_bytes: int

    # The defaults are never used: they let a type checker accept the look-up `TensorType(12)`.
    def __new__(cls, number: int, block_elements: int = 0, block_bytes: int = 0) -> "TensorType":
        member = int.__new__(cls, number)
        member._value_ = number
        member.block_elements = block_elements
        member.block_bytes = block_bytes
        return member

    def size_bytes(self, elements: int) -> int:
        """Bytes that so many elements take; they must be whole blocks."""
        blocks, rest = divmod(elements, self.block_elements)
        if rest:
            raise ValueError(
                f"{elements:,} elements are not whole blocks of {self.name} ({self.block_elements} elements)"
            )
        return blocks * self.block_bytes
