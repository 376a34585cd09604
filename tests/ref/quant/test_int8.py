"""ref.quant.int8: integers and scales by hand, and a matmul whose error the rounding bounds."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from ref.linear import linear
from ref.quant.int8 import int8_dequantize, int8_linear, int8_matmul, int8_quantize, int8_quantize_static


def test_a_row_by_hand() -> None:
    """max |x| = 254, so one step is 2: −254 is −127 steps, 3 is 1.5 and goes to the even 2, 5 is 2.5 and goes to 2."""
    q, scale = int8_quantize(np.array([-254.0, 3, 5, 0.9]))
    assert scale == 2
    assert q.tolist() == [-127, 2, 2, 0]
    assert q.dtype == np.int8


def test_a_product_by_hand() -> None:
    """Steps 1 and 2; (127·1 + 2·127) · 1 · 2 = 762, where the exact numbers give 762 as well."""
    wq, w_scale = int8_quantize(np.array([[2.0, 254]]))
    assert (wq.tolist(), w_scale.tolist()) == ([[1, 127]], [2.0])
    assert int8_linear(np.array([[127.0, 2]]), wq, w_scale, np.array([0.5])).tolist() == [[762.5]]


@given(arrays(np.float64, (3, 7), elements=st.floats(-1e6, 1e6, allow_subnormal=False)))
def test_no_value_moves_by_more_than_half_a_step(x: np.ndarray) -> None:
    q, scale = int8_quantize(x)
    limit = np.where(scale == 0, 127 * 2.0**-126, scale * (0.5 + 1e-12))
    assert np.all(np.abs(int8_dequantize(q, scale) - x) <= limit[:, None])
    assert np.array_equal(int8_quantize(-x)[0], -q)


def test_the_matmul_is_that_of_the_rounded_numbers() -> None:
    rng = np.random.default_rng(0)
    x, w, bias = rng.standard_normal((5, 300)), rng.standard_normal((8, 300)), rng.standard_normal(8)
    (xq, xs), (wq, ws) = int8_quantize(x), int8_quantize(w)
    expected = linear(int8_dequantize(xq, xs), int8_dequantize(wq, ws), bias)
    np.testing.assert_allclose(int8_linear(x, wq, ws, bias), expected, rtol=1e-12, atol=1e-12)
    single = int8_linear(x.astype(np.float32), wq, ws.astype(np.float32), bias.astype(np.float32))
    assert single.dtype == np.float32
    np.testing.assert_allclose(single, expected, rtol=1e-5, atol=1e-3)


def test_integer_sums_are_exact_and_overflow_is_said() -> None:
    row = np.full((1, 1000), 127, np.int8)
    assert int8_matmul(row, -row).tolist() == [[-127 * 127 * 1000]]
    with pytest.raises(OverflowError, match="133145 products does not fit int32"):
        int8_matmul(*[np.full((1, 133145), 127, np.int8)] * 2)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_qnt_09_zero_tiny_huge_and_broken_rows(dtype: type) -> None:
    """QNT-09: a row decides only about itself; zero stays zero, nothing becomes NaN but what holds inf or NaN."""
    x = np.ones((6, 4), dtype)
    x[0] = 0
    x[1] = 1e-8
    x[2, 1] = 1e6
    x[3, 1] = np.inf
    x[4, 1] = np.nan
    q, scale = int8_quantize(x)
    assert q[0].tolist() == [0] * 4
    assert q[1].tolist() == [127] * 4
    assert q[2].tolist() == [0, 127, 0, 0]
    wq, ws = int8_quantize(np.ones((2, 4), dtype))
    y = int8_linear(x, wq, ws)
    assert y[0].tolist() == [0, 0]
    np.testing.assert_allclose(y[[1, 2, 5], 0], [4e-8, 1e6, 4], rtol=1e-6)
    assert np.isnan(y[[3, 4]]).all()
    assert np.isnan(scale).tolist() == [False, False, False, True, True, False]


def test_qnt_09_a_row_too_small_for_its_scale_is_zero() -> None:
    q, scale = int8_quantize(np.full((1, 2), 1e-45, np.float32))
    assert (scale[0], q.tolist()) == (0, [[0, 0]])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_qnt_09_a_scale_below_the_smallest_normal_number_is_zero(dtype: type) -> None:
    """QNT-09: 1 / scale would overflow; at 2⁻¹²⁶ it does not."""
    x = np.array([[127, 1], [126.9, 1]], dtype) * dtype(2.0**-126)
    q, scale = int8_quantize(x)
    assert (scale.tolist(), q.tolist()) == ([2.0**-126, 0], [[127, 1], [0, 0]])
    assert int8_quantize_static(x, np.full((2, 1), 2.0**-127, dtype)).tolist() == [[0, 0], [0, 0]]


def test_qnt_09_static_scale_saturates() -> None:
    """QNT-09: ±127.5 steps and beyond become ±127, half steps go to even."""
    x = np.array([127.5, -127.5, 126.5, 125.5, 0.5, 1.5, 1e9, -np.inf, np.nan])
    assert int8_quantize_static(x, np.array(1.0)).tolist() == [127, -127, 126, 126, 0, 2, 127, -127, 0]


def test_no_tokens() -> None:
    assert int8_linear(np.zeros((0, 3)), np.ones((2, 3), np.int8), np.ones(2)).shape == (0, 2)


@given(arrays(np.float64, (3, 7), elements=st.floats(-1e6, 1e6, allow_subnormal=False)))
def test_steps_of_127_and_of_127_and_a_half_differ_by_less_than_a_step(x: np.ndarray) -> None:
    """What ref.quant.coded.quantized_linear says of compressed-tensors, whose codes go from −128 to 127."""
    largest = np.abs(x).max(axis=-1, keepdims=True)
    x = x[largest[:, 0] > 1e-30]
    largest = largest[largest > 1e-30][:, None]
    step = largest / 127.5
    theirs = np.clip(np.rint(x / step), -128, 127) * step
    limit = largest * (1 / 254 + 1 / 255)
    assert (np.abs(int8_dequantize(*int8_quantize(x)) - theirs) <= limit * (1 + 1e-9)).all()
    w = np.array([[1, -2, 3, 0.5, 0, 1, -1]])
    wq, w_scale = int8_quantize(w)
    decoded = int8_dequantize(wq, w_scale)
    difference = np.abs(int8_linear(x, wq, w_scale) - linear(theirs, decoded))
    assert (difference <= limit * np.abs(decoded).sum() * (1 + 1e-9)).all()
