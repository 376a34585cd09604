"""ref.quant.fp8: every code, every edge, and the matmul."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ref.linear import linear
from ref.quant.fp8 import (
    FP8_TABLE,
    check_scale,
    fp8_decode,
    fp8_dequantize,
    fp8_encode,
    fp8_linear,
    fp8_quantize,
    fp8_quantize_static,
)

ALL_CODES = np.arange(256, dtype=np.uint8)


def test_codes_by_hand() -> None:
    """0x38 = 0 0111 000 is 2⁰; 0x7E = 0 1111 110 is 2⁸ · 1.75; 0x01 is 2⁻⁶ / 8."""
    codes = np.array([0x00, 0x80, 0x38, 0xB9, 0x7E, 0xFE, 0x01, 0x07, 0x08], np.uint8)
    expected = [0.0, -0.0, 1.0, -1.125, 448.0, -448.0, 2**-9, 7 * 2**-9, 2**-6]
    assert fp8_decode(codes).tolist() == expected
    assert np.signbit(fp8_decode(codes)[:2]).tolist() == [False, True]


def test_ml_dtypes_agrees_on_every_code() -> None:
    expected = ALL_CODES.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(FP8_TABLE, expected)
    assert np.isnan(FP8_TABLE[[0x7F, 0xFF]]).all()


def test_every_code_comes_back() -> None:
    numbers = np.delete(ALL_CODES, [0x7F, 0xFF])
    assert np.array_equal(fp8_encode(fp8_decode(numbers)), numbers)


@given(st.floats(-448, 448, width=32))
def test_ml_dtypes_agrees_on_rounding(x: float) -> None:
    expected = np.float32(x).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert fp8_encode(np.array([x]))[0] == expected


def test_ties_go_to_the_even_code() -> None:
    middle = (FP8_TABLE[:126].astype(np.float64) + FP8_TABLE[1:127]) / 2
    even = np.arange(126) + np.arange(126) % 2
    assert np.array_equal(fp8_encode(middle), even)
    assert np.array_equal(fp8_encode(np.nextafter(middle, 0)), np.arange(126))
    assert np.array_equal(fp8_encode(np.nextafter(middle, 999)), np.arange(1, 127))


def test_qnt_09_edges_saturate() -> None:
    """QNT-09: ±448 and 448.1, infinities, NaN, subnormals, both zeros."""
    x = np.array([448, 448.1, -448.1, 1e6, np.inf, -np.inf, np.nan, 0.0, -0.0, 2**-9, 2**-10, 2**-10 * 1.01, -(2**-11)])
    expected = [0x7E, 0x7E, 0xFE, 0x7E, 0x7E, 0xFE, 0x7F, 0x00, 0x80, 0x01, 0x00, 0x01, 0x80]
    assert fp8_encode(x).tolist() == expected


def test_qnt_09_rows_decide_about_themselves() -> None:
    """QNT-09: zero rows give zero; inf and NaN stay in their row."""
    x = np.ones((6, 4), np.float32)
    x[0] = 0
    x[1] = 1e-8
    x[2, 1] = 1e6
    x[3, 1] = np.inf
    x[4, 1] = np.nan
    w, w_scale = fp8_quantize(np.ones((2, 4), np.float32))
    y = fp8_linear(x, w, w_scale)
    assert y[0].tolist() == [0, 0]
    np.testing.assert_allclose(y[[1, 2, 5], 0], [4e-8, 1e6, 4], rtol=1e-5)
    assert np.isnan(y[[3, 4]]).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_qnt_09_a_scale_below_the_smallest_normal_number_is_zero(dtype: type) -> None:
    """QNT-09: 1 / scale would overflow; at 2⁻¹²⁶ it does not."""
    x = np.array([[448, 1], [447.9, 1]], dtype) * dtype(2.0**-126)
    codes, scale = fp8_quantize(x)
    assert scale.tolist() == [2.0**-126, 0]
    assert fp8_decode(codes).tolist() == [[448, 1], [0, 0]]
    assert fp8_quantize_static(x, np.full((2, 1), 2.0**-127, dtype)).tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize("scale", [0.0, -1.0, np.nan, np.inf])
def test_qnt_09_a_bad_static_scale_is_refused(scale: float) -> None:
    """QNT-09: a static scale that cannot be is an error, not a guess."""
    with pytest.raises(ValueError, match="input_scale must be finite and positive"):
        fp8_linear(np.ones((1, 2)), np.ones((1, 2), np.uint8), np.array(1.0), input_scale=np.array(scale))
    assert check_scale("k_scale", np.array(0.5)) == 0.5


@pytest.mark.parametrize("axis", [-1, None])
def test_relative_error_is_at_most_a_sixteenth(axis: int | None) -> None:
    """Of what is no subnormal after scaling: 2⁻⁶ / 448 of the largest."""
    x = np.random.default_rng(0).standard_normal((6, 200))
    codes, scale = fp8_quantize(x, axis)
    assert scale.shape == (() if axis is None else (6,))
    large = np.abs(x) > (scale if axis is None else scale[:, None]) * 2**-6
    error = np.abs(fp8_dequantize(codes, scale) - x)
    assert large.mean() > 0.99
    assert np.all(error[large] <= np.abs(x)[large] / 16 * (1 + 1e-12))
    np.testing.assert_allclose(np.abs(fp8_dequantize(codes, scale)).max(), np.abs(x).max(), rtol=1e-12)


@pytest.mark.parametrize("axis", [-1, None])
def test_the_matmul_is_that_of_the_rounded_numbers(axis: int | None) -> None:
    rng = np.random.default_rng(1)
    x, weight, bias = rng.standard_normal((5, 96)), rng.standard_normal((7, 96)), rng.standard_normal(7)
    w, w_scale = fp8_quantize(weight, axis)
    expected = linear(fp8_dequantize(*fp8_quantize(x)), fp8_dequantize(w, w_scale), bias)
    np.testing.assert_allclose(fp8_linear(x, w, w_scale, bias), expected, rtol=1e-12, atol=1e-12)
    fixed = np.array(0.01)
    expected = linear(fp8_decode(fp8_quantize_static(x, fixed), np.float64) * fixed, fp8_dequantize(w, w_scale))
    np.testing.assert_allclose(fp8_linear(x, w, w_scale, input_scale=fixed), expected, rtol=1e-12, atol=1e-12)
