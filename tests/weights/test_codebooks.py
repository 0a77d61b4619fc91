"""The grids, unpacked from their bitmaps, against those of the gguf package."""

import gguf
import numpy as np
import pytest

from everwarm.weights.dequant import codebooks


@pytest.mark.parametrize("name", ["IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"])
def test_grids_have_the_rows_of_gguf_in_order(name: str) -> None:
    quant = getattr(gguf.quants, name)
    quant.init_grid()
    rows = getattr(codebooks, f"{name}_GRID").view(np.int8).reshape(quant.grid_shape)
    np.testing.assert_array_equal(rows, quant.grid[0, 0])


def test_iq1_rows_are_the_grid_of_gguf_shifted_up_then_down() -> None:
    gguf.quants.IQ1_S.init_grid()
    grid = gguf.quants.IQ1_S.grid[0, 0]
    np.testing.assert_array_equal(codebooks.IQ1_ROWS, np.concatenate([grid + 0.125, grid - 0.125]))


def test_seven_signs_imply_the_eighth_as_in_gguf() -> None:
    signs = np.frombuffer(gguf.quants.IQ2_XXS.ksigns, np.uint8)
    np.testing.assert_array_equal(codebooks.EVEN_SIGN_MASKS, codebooks.SIGN_MASKS[signs])


def test_sign_masks_follow_the_bits() -> None:
    expected = [[0xFF if byte >> bit & 1 else 0 for bit in range(8)] for byte in range(256)]
    np.testing.assert_array_equal(codebooks.SIGN_MASKS.view(np.uint8).reshape(256, 8), expected)
