"""ref.numerics: rounding by hand and against ml_dtypes, softmax that cannot overflow, error measures."""

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ref.numerics import (
    bf16_bits,
    bf16_to_float32,
    logsumexp,
    max_abs_error,
    relative_error,
    round_to,
    softmax,
)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1.0, 1.0),
        (1 + 2**-8, 1.0),  # half way to 1 + 2^-7, whose last bit is odd: down
        (1 + 3 * 2**-8, 1 + 2**-6),  # half way from an odd one: up
        (1 + 2**-8 + 2**-20, 1 + 2**-7),  # above half way: up
        (-(1 + 2**-8), -1.0),
        (2 - 2**-9, 2.0),  # carries into the exponent
        (3.4e38, math.inf),
        (-math.inf, -math.inf),
        (2.0**-133, 2.0**-133),  # the smallest subnormal
        (0.0, 0.0),
    ],
)
def test_bfloat16_rounds_to_nearest_ties_to_even(value: float, expected: float) -> None:
    assert round_to(np.array([value], np.float32), "bfloat16")[0] == expected


def test_bfloat16_bits_by_hand() -> None:
    assert bf16_bits(np.array([1.0, -2.0, np.nan], np.float32)).tolist() == [0x3F80, 0xC000, 0x7FC0]


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50))
def test_bfloat16_agrees_with_ml_dtypes(words: list[int]) -> None:
    x = np.array(words, np.uint32).view(np.float32)
    x = x[~np.isnan(x)]
    expected = x.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(bf16_bits(x), expected.view(np.uint16))
    np.testing.assert_array_equal(bf16_to_float32(bf16_bits(x)), expected.astype(np.float32))


def test_every_nan_stays_a_nan() -> None:
    low_payload = np.array([0x7F800001, 0xFF800001], np.uint32).view(np.float32)  # upper half alone would be inf
    assert np.isnan(bf16_to_float32(bf16_bits(low_payload))).all()


def test_round_to_keeps_the_dtype() -> None:
    x = np.array([2049.0, 70000.0])
    assert round_to(x, "float16").tolist() == [2048.0, math.inf]
    assert round_to(x, "float16").dtype == np.float64
    assert round_to(x, None) is x
    with pytest.raises(ValueError, match="storage is 'int8'"):
        round_to(x, "int8")


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_softmax_and_logsumexp_by_hand(dtype: type) -> None:
    x = np.log(np.array([[1, 3], [2, 2]], dtype))
    eps = np.finfo(dtype).eps
    np.testing.assert_allclose(softmax(x), [[0.25, 0.75], [0.5, 0.5]], rtol=4 * eps)
    np.testing.assert_allclose(logsumexp(x), np.log([4, 4]), rtol=4 * eps)
    np.testing.assert_allclose(logsumexp(x, axis=0), np.log([3, 5]), rtol=4 * eps)
    assert softmax(x).dtype == dtype
    assert logsumexp(x).dtype == dtype


def test_softmax_of_large_values_does_not_overflow() -> None:
    x = np.array([1e4, 1e4], np.float32)
    assert softmax(x).tolist() == [0.5, 0.5]
    assert logsumexp(x) == pytest.approx(1e4 + math.log(2))


def test_softmax_of_a_fully_masked_row_is_zero() -> None:
    x = np.array([[-np.inf, -np.inf], [0, -np.inf]])
    assert softmax(x).tolist() == [[0, 0], [1, 0]]
    assert logsumexp(x).tolist() == [-math.inf, 0]
    assert softmax(np.empty((2, 0))).shape == (2, 0)
    assert logsumexp(np.empty((2, 0))).tolist() == [-math.inf, -math.inf]


def test_error_measures_by_hand() -> None:
    actual, expected = np.array([3.0, 0.0]), np.array([3.0, 4.0])
    assert relative_error(actual, expected) == 0.8
    assert max_abs_error(actual, expected) == 4.0
    assert relative_error(np.zeros(2), np.zeros(2)) == 0
    assert relative_error(np.ones(2), np.zeros(2)) == math.inf
    assert math.isnan(relative_error(np.array([np.nan, 0]), expected))
    assert max_abs_error(np.empty(0), np.empty(0)) == 0
