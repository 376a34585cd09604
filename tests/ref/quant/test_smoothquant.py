"""ref.quant.smoothquant: exact before quantizing, better after it."""

import numpy as np
import pytest

from ref.linear import linear
from ref.numerics import relative_error
from ref.quant.int8 import int8_linear, int8_quantize
from ref.quant.smoothquant import calibrate, smooth_norm, smooth_weight, smoothing_factors
from ref.rmsnorm import rmsnorm


def test_factors_by_hand() -> None:
    """Activations 16 and 1, weights 4 and 1: √16 / √4 = 2 and 1. With alpha 1 the activations themselves."""
    weights = [np.array([[4.0, -1]]), np.array([[-3.0, 0.5]])]
    absmax = calibrate([np.array([[-16.0, 0]]), np.array([[2.0, 1]]), np.zeros((0, 2))])
    assert absmax.tolist() == [16, 1]
    assert smoothing_factors(absmax, weights).tolist() == [2, 1]
    assert smoothing_factors(absmax, weights, 1.0).tolist() == [16, 1]
    assert smoothing_factors(absmax, weights, 0.0).tolist() == [0.25, 1]


def test_channels_of_zeros_keep_finite_factors() -> None:
    zeros = smoothing_factors(np.array([0.0, 1e30, 0]), [np.array([[0.0, 0, 1e20]])])
    assert np.all((zeros >= 1e-5) & (zeros <= 1e5))


def model(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, a norm's factor with one channel a hundred times larger, and a weight that reads it."""
    rng = np.random.default_rng(seed)
    norm = rng.uniform(0.5, 1.5, 64)
    norm[7] = 100
    return rng.standard_normal((20, 64)), norm, rng.standard_normal((32, 64))


def test_folding_is_exact() -> None:
    """By powers of two bit by bit; by any factors up to two roundings of each product."""
    x, norm, weight = model(0)
    expected = linear(rmsnorm(x, norm, 1e-6), weight)
    factors = smoothing_factors(calibrate([rmsnorm(x, norm, 1e-6)]), [weight])
    folded = linear(rmsnorm(x, smooth_norm(norm, factors), 1e-6), smooth_weight(weight, factors))
    assert relative_error(folded, expected) < 1e-15
    powers = 2.0 ** np.rint(np.log2(factors))
    products = rmsnorm(x, norm, 1e-6)[:, None] * weight  # [num_tokens, out, in], before they are summed
    smoothed = rmsnorm(x, smooth_norm(norm, powers), 1e-6)[:, None] * smooth_weight(weight, powers)
    np.testing.assert_array_equal(smoothed, products)


def test_it_helps_int8() -> None:
    x, norm, weight = model(1)
    normed = rmsnorm(x, norm, 1e-6)
    exact = linear(normed, weight)
    plain = relative_error(int8_linear(normed, *int8_quantize(weight)), exact)
    factors = smoothing_factors(calibrate([normed]), [weight])
    smooth = rmsnorm(x, smooth_norm(norm, factors), 1e-6)
    smoothed = relative_error(int8_linear(smooth, *int8_quantize(smooth_weight(weight, factors))), exact)
    assert smoothed < plain / 3


def test_bad_calibration_is_refused() -> None:
    with pytest.raises(ValueError, match="saw no token"):
        calibrate([np.zeros((0, 3))])
    with pytest.raises(ValueError, match="not finite"):
        calibrate([np.array([[1.0, np.inf]])])
    with pytest.raises(ValueError, match=r"alpha must be from 0 to 1, found 1\.5"):
        smoothing_factors(np.ones(1), [np.ones((1, 1))], 1.5)
