"""ref.quant.fp8_block: tiles with ragged edges."""

import numpy as np
import pytest

from ref.linear import linear
from ref.numerics import relative_error
from ref.quant.fp8_block import (
    expand_block_scale,
    fp8_block_dequantize,
    fp8_block_linear,
    fp8_block_quantize,
    fp8_quantize_token_groups,
)


def test_scales_of_ragged_tiles_by_hand() -> None:
    scale = np.array([[1.0, 2], [3, 4]])
    expected = [[1, 1, 2], [1, 1, 2], [3, 3, 4]]
    assert expand_block_scale(scale, (3, 3), (2, 2)).tolist() == expected
    with pytest.raises(ValueError, match=r"shape \[2, 2\]; a weight \[5, 3\] in tiles of 2 × 2 needs \[3, 2\]"):
        expand_block_scale(scale, (5, 3), (2, 2))


def test_a_tile_by_hand() -> None:
    """One tile of 448 and −224 has scale 1, its neighbour of 1 has scale 1/448."""
    codes, scale = fp8_block_quantize(np.array([[448.0, -224, 1]]), (1, 2))
    assert scale.tolist() == [[1, 1 / 448]]
    assert codes.tolist() == [[0x7E, 0xF6, 0x7E]]
    np.testing.assert_allclose(fp8_block_dequantize(codes, scale, (1, 2)), [[448, -224, 1]], rtol=1e-15)


@pytest.mark.parametrize("num_tokens", [1, 7, 128, 129])
@pytest.mark.parametrize("n", [192, 256])
def test_qnt_05_576_rows(num_tokens: int, n: int) -> None:
    """QNT-05: the last half tile of 576 rows has a scale of its own, 100 times larger; inputs may end in a tile."""
    rng = np.random.default_rng(num_tokens)
    weight = rng.standard_normal((576, n)).astype(np.float32)
    weight[512:] *= 100
    codes, scale = fp8_block_quantize(weight)
    assert scale.shape == (5, 2)
    assert scale[4].min() > 50 * scale[:4].max()
    x = rng.standard_normal((num_tokens, n)).astype(np.float32)
    xq, x_scale = fp8_quantize_token_groups(x)
    assert x_scale.shape == (num_tokens, 2)
    rounded = fp8_block_dequantize(xq, x_scale, (1, 128))
    y = fp8_block_linear(x, codes, scale)
    exact = linear(rounded.astype(np.float64), fp8_block_dequantize(codes, scale.astype(np.float64)))
    for rows in (slice(0, 512), slice(512, 576)):  # 1e-6: float32 sums of at most 256 products
        assert relative_error(y[:, rows], exact[:, rows]) < 1e-6
    # rounding to four bits moves a number by 2.6 % rms or less, and the product by about as much
    assert relative_error(y[:, 512:], linear(x, fp8_block_dequantize(codes, scale))[:, 512:]) < 0.04


def test_bias_and_broken_tokens() -> None:
    rng = np.random.default_rng(2)
    codes, scale = fp8_block_quantize(rng.standard_normal((3, 130)))
    x = rng.standard_normal((4, 130))
    x[0], x[1, 129], x[2, 5] = 0, np.inf, np.nan
    y = fp8_block_linear(x, codes, scale, np.array([1.0, 2, 3]))
    assert y[0].tolist() == [1, 2, 3]
    assert np.isnan(y[1:3]).all()
    np.testing.assert_array_equal(y[3], fp8_block_linear(x[3:], codes, scale, np.array([1.0, 2, 3]))[0])
