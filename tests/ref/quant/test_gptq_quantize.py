"""ref.quant.gptq_quantize: against the plain rule, and against rounding to nearest."""

import numpy as np
import pytest

from ref.quant.gptq_quantize import gptq_hessian, gptq_quantize
from ref.quant.groups import grouped_dequantize, grouped_quantize


def correlated(seed: int, num_tokens: int = 200, n: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """Activations that lie near few directions, as those of a model do, in channels of different sizes; a weight."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((num_tokens, n // 4)) @ rng.standard_normal((n // 4, n)) * rng.uniform(0.1, 3, n)
    return x + 0.1 * rng.standard_normal(x.shape), rng.standard_normal((8, n))


def output_error(x: np.ndarray, weight: np.ndarray, rounded: np.ndarray) -> float:
    return float(np.linalg.norm(x @ (weight - rounded).T) / np.linalg.norm(x @ weight.T))


def test_hessian_by_hand() -> None:
    assert gptq_hessian(np.array([[1.0, 2], [0, 1]])).tolist() == [[2, 4], [4, 10]]


def test_inputs_that_are_alike_share_the_error() -> None:
    """Both inputs are always equal, so only w0 + w1 matters: 2.4 → 2 leaves 0.4, and 3.3 + 0.4 = 3.7 → 4."""
    weight = np.array([[2.4, 3.3, -7.5]])  # the last sets the step to 1
    x = np.array([[1.0, 1, 0], [1, 1, 0], [0, 0, 1]])
    found = gptq_quantize(weight, gptq_hessian(x), 4, -1, damp=1e-9)
    assert found.scales.tolist() == [[1.0]]
    assert grouped_dequantize(found).tolist() == [[2, 4, -8]]


def test_uncorrelated_inputs_are_rounded_to_nearest() -> None:
    weight = np.random.default_rng(0).standard_normal((4, 64))
    found = gptq_quantize(weight, np.eye(64), 4, 32)
    expected = grouped_quantize(weight, 4, 32, symmetric=True)
    np.testing.assert_array_equal(found.q, expected.q)
    np.testing.assert_allclose(found.scales, expected.scales, rtol=1e-12)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize("group_size", [32, -1])
def test_the_output_is_nearer_than_with_rounding_to_nearest(symmetric: bool, act_order: bool, group_size: int) -> None:
    x, weight = correlated(1)
    found = gptq_quantize(weight, gptq_hessian(x), 4, group_size, symmetric=symmetric, act_order=act_order)
    nearest = grouped_quantize(weight, 4, group_size, symmetric=symmetric)
    errors = [output_error(x, weight, grouped_dequantize(rounded)) for rounded in (found, nearest)]
    assert errors[0] < errors[1]
    assert np.bincount(found.g_idx).tolist() == ([64] if group_size == -1 else [32, 32])
    assert (np.sort(found.g_idx) == found.g_idx).all() == (group_size == -1 or not act_order)


@pytest.mark.parametrize("group_size", [16, 32, -1])
def test_blocks_only_save_passes_over_memory(group_size: int) -> None:
    """Any block gives what single inputs give, also when a group reaches past its block."""
    x, weight = correlated(2)
    expected = gptq_quantize(weight, gptq_hessian(x), 4, group_size, block=1)
    for block in (8, 24, 64, 128):
        found = gptq_quantize(weight, gptq_hessian(x), 4, group_size, block=block)
        np.testing.assert_array_equal(found.q, expected.q)
        np.testing.assert_allclose(found.scales, expected.scales, rtol=1e-9)


def test_each_step_is_the_best_answer_to_the_one_before() -> None:
    """The rule by its meaning: after each rounding the rest solves its own least squares."""
    x, weight = correlated(3, n=8)
    hessian = gptq_hessian(x)
    scale = grouped_quantize(weight, 4, -1, symmetric=True).scales[:, 0]
    left, expected = weight.copy(), np.zeros_like(weight)
    for i in range(8):
        expected[:, i] = np.clip(np.rint(left[:, i] / scale), -8, 7) * scale
        error = left[:, i] - expected[:, i]
        rest = np.linalg.solve(hessian[i + 1 :, i + 1 :], hessian[i + 1 :, i])
        left[:, i + 1 :] += error[:, None] * rest
    found = grouped_dequantize(gptq_quantize(weight, hessian, 4, -1, damp=0.0))
    np.testing.assert_allclose(found, expected, atol=1e-9)


def test_dead_inputs_become_zero() -> None:
    x, weight = correlated(4)
    x[:, 5] = 0
    found = grouped_dequantize(gptq_quantize(weight, gptq_hessian(x), 4, 32))
    assert not found[:, 5].any()
    assert np.isfinite(found).all()


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match=r"hessian has shape \[2, 2\]; the weight's 4 inputs"):
        gptq_quantize(np.ones((1, 4)), np.eye(2), 4, -1)
    with pytest.raises(ValueError, match="group_size 3 does not divide 4 inputs"):
        gptq_quantize(np.ones((1, 4)), np.eye(4), 4, 3)
