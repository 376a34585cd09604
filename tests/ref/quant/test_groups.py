"""ref.quant.groups: rounding in groups and packing into words, by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ref.numerics import relative_error
from ref.quant.groups import (
    group_index,
    grouped_dequantize,
    grouped_linear,
    grouped_quantize,
    pack_words,
    unpack_words,
)


def test_a_word_by_hand() -> None:
    """Values 1 to 8, the first in the lowest nibble: 0x87654321, which is negative as int32."""
    words = pack_words(np.arange(1, 9), 4, axis=0)
    assert words.tolist() == [0x87654321 - 2**32]
    assert unpack_words(words, 4, axis=0).tolist() == list(range(1, 9))
    assert pack_words(np.array([1, 2, 3, 255]), 8, axis=0).tolist() == [0xFF030201 - 2**32]


@given(st.sampled_from([4, 8]), st.sampled_from([0, 1]), st.integers(0, 9), st.permutations(range(8)))
def test_packing_comes_back(bits: int, axis: int, seed: int, permuted: list[int]) -> None:
    values = np.random.default_rng(seed).integers(0, 2**bits, (16, 24), np.uint8)
    order = permuted if bits == 4 else None
    assert np.array_equal(unpack_words(pack_words(values, bits, axis, order), bits, axis, order), values)


def test_words_must_be_full() -> None:
    with pytest.raises(ValueError, match="12 values of 4 bits fill no whole int32; give a multiple of 8"):
        pack_words(np.zeros((2, 12)), 4, axis=1)


def test_symmetric_by_hand() -> None:
    """max |w| = 7.5: scale 1, zero 8; 7.5 is half way from 15 to the 16 that is not there, −7.5 goes to the even 0."""
    weight = grouped_quantize(np.array([[7.5, -7.5, 2.4, -1.0]]), 4, -1, symmetric=True)
    assert (weight.scales.tolist(), weight.zeros.tolist()) == ([[1.0]], [[8]])
    assert weight.q.tolist() == [[15, 0, 10, 7]]
    assert grouped_dequantize(weight).tolist() == [[7, -8, 2, -1]]


def test_asymmetric_by_hand() -> None:
    """From −5 to 10 in 15 steps of 1, zero 5; the second group is all positive and stretched to 0."""
    weight = grouped_quantize(np.array([[-5.0, 10, 30, 15]]), 4, 2, symmetric=False)
    assert (weight.scales.tolist(), weight.zeros.tolist()) == ([[1.0, 2.0]], [[5, 0]])
    assert grouped_dequantize(weight).tolist() == [[-5, 10, 30, 16]]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [32, 64, -1])
def test_no_weight_moves_by_more_than_its_step(bits: int, symmetric: bool, group_size: int) -> None:
    """By half a step as a rule; by one at the ends: a symmetric range lacks one, an asymmetric zero is rounded."""
    weight = np.random.default_rng(bits).standard_normal((5, 128))
    packed = grouped_quantize(weight, bits, group_size, symmetric=symmetric)
    step = packed.scales[:, packed.g_idx]
    error = np.abs(grouped_dequantize(packed) - weight)
    assert np.all(error <= step * (1 + 1e-9))
    assert np.mean(error <= step * (0.5 + 1e-9)) > 0.98


def test_zero_groups_stay_zero() -> None:
    for symmetric in (True, False):
        weight = grouped_quantize(np.zeros((2, 64)), 4, 32, symmetric=symmetric)
        assert not grouped_dequantize(weight).any()


def test_what_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match=r"group_size 128 does not divide 192 inputs; possible are .* 32, 64"):
        group_index(192, 128)
    with pytest.raises(ValueError, match="group_size 0 does not divide"):
        group_index(192, 0)
    with pytest.raises(ValueError, match="bits is 3; integer weights of 4 or 8 bits"):
        grouped_quantize(np.zeros((1, 32)), 3, 32, symmetric=True)


def test_the_matmul_rounds_weights_to_the_storage_type() -> None:
    rng = np.random.default_rng(0)
    x, bias = rng.standard_normal((3, 64)), rng.standard_normal(8)
    weight = grouped_quantize(rng.standard_normal((8, 64)), 4, 32, symmetric=False)
    exact = x @ grouped_dequantize(weight).T + bias
    np.testing.assert_array_equal(grouped_linear(x, weight, bias), exact)
    half = relative_error(grouped_linear(x, weight, bias, storage="bfloat16"), exact)
    assert 1e-5 < half < 2**-8


def test_the_best_share_of_the_scale_by_hand() -> None:
    """7 and 1 are whole steps of 15/14. One 7.5 and 63 of 0.45: in steps of 1 the latter are all 0, and 63 · 0.45² +
    0.25 is lost; in steps of 0.8 they are one step too large, and 63 · 0.35² + 1.9² is less."""
    weight = np.zeros((2, 64))
    weight[0, :2] = 7, 1
    weight[1] = [7.5, *[0.45] * 63]
    found = grouped_quantize(weight, 4, -1, symmetric=True, shares=(1.0, 15 / 14, 0.8))
    np.testing.assert_allclose(found.scales, [[1], [0.8]])
    errors = np.square(grouped_dequantize(found) - weight).sum(axis=1)
    np.testing.assert_allclose(errors, [0, 63 * 0.35**2 + 1.9**2], atol=1e-12)
