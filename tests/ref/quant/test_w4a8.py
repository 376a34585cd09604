"""ref.quant.w4a8: the tiles are exact, so only the activations are rounded."""

import numpy as np
import pytest

from ref.linear import linear
from ref.quant.fp8 import fp8_decode, fp8_dequantize, fp8_quantize
from ref.quant.groups import GroupedInt, grouped_dequantize, grouped_quantize, grouped_steps
from ref.quant.int8 import int8_dequantize, int8_quantize
from ref.quant.w4a8 import w4a8_linear, w4a8_tile


def test_by_hand() -> None:
    """x = 127, 2 (scale 1); groups of one input: (15 − 8) · 0.5 · 127 + (3 − 5) · 2 · 2 = 436.5."""
    q, scales, zeros = np.array([[15, 3]], np.uint8), np.array([[0.5, 2.0]]), np.array([[8, 5]], np.uint8)
    weight = GroupedInt(4, q, scales, zeros, np.arange(2))
    assert w4a8_linear(np.array([[127.0, 2]]), weight).tolist() == [[436.5]]
    assert w4a8_linear(np.array([[448.0, 2]]), weight, np.array([1.0]), kind="fp8").tolist() == [[1561.0]]


def test_every_step_is_exact_in_both_kinds() -> None:
    """All 16 × 16 pairs of a value and a zero."""
    q = np.arange(16, dtype=np.uint8)[:, None]
    for zero in range(16):
        weight = GroupedInt(4, q, np.ones((16, 1)), np.full((16, 1), zero, np.uint8), np.zeros(1, np.int64))
        expected = grouped_steps(weight)
        assert np.array_equal(w4a8_tile(weight, 0, "int8")[1], expected)
        assert np.array_equal(fp8_decode(w4a8_tile(weight, 0, "fp8")[1]), expected)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("group_size", [32, 64, -1])
def test_the_matmul_is_that_of_rounded_activations(kind: str, act_order: bool, group_size: int) -> None:
    rng = np.random.default_rng(group_size + 1)
    x, bias = rng.standard_normal((5, 128)), rng.standard_normal(9)
    weight = grouped_quantize(rng.standard_normal((9, 128)), 4, group_size, symmetric=False)
    if act_order:
        weight = GroupedInt(4, weight.q, weight.scales, weight.zeros, rng.permutation(weight.g_idx))
    rounded = int8_dequantize(*int8_quantize(x)) if kind == "int8" else fp8_dequantize(*fp8_quantize(x))
    expected = linear(rounded, grouped_dequantize(weight), bias)
    np.testing.assert_allclose(w4a8_linear(x, weight, bias, kind=kind), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_broken_tokens_spoil_only_themselves(kind: str) -> None:
    weight = grouped_quantize(np.ones((2, 64)), 4, 32, symmetric=True)
    x = np.ones((4, 64), np.float32)
    x[0], x[1, 3], x[2, 40] = 0, np.inf, np.nan
    y = w4a8_linear(x, weight, kind=kind)
    assert y[0].tolist() == [0, 0]
    assert np.isnan(y[1:3]).all()
    np.testing.assert_array_equal(y[3], w4a8_linear(x[3:], weight, kind=kind)[0])


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="weights have 8 bits; 4 are wanted"):
        w4a8_linear(np.ones((1, 32)), grouped_quantize(np.ones((1, 32)), 8, 32, symmetric=False))
    with pytest.raises(ValueError, match="kind is 'int4'; known are int8, fp8"):
        w4a8_linear(np.ones((1, 32)), grouped_quantize(np.ones((1, 32)), 4, 32, symmetric=True), kind="int4")
