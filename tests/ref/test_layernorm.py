"""ref.layernorm: the mean goes, eps is inside the root, bias is optional, heads stand alone."""

import numpy as np
import pytest

from ref.layernorm import add_layernorm, layernorm


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_by_hand(dtype: type) -> None:
    """(1, 5) − 3 = (−2, 2), variance 4, sqrt(4 + 5) = 3; (7, 7) has no variance."""
    x = np.array([[1, 5], [7, 7]], dtype)
    weight, bias = np.array([3, 6], dtype), np.array([10, 20], dtype)
    out = layernorm(x, weight, None, 5.0)
    np.testing.assert_allclose(out, [[-2, 4], [0, 0]], rtol=4 * np.finfo(dtype).eps)
    with_bias = layernorm(x, weight, bias, 5.0)
    np.testing.assert_allclose(with_bias, [[8, 24], [10, 20]], rtol=4 * np.finfo(dtype).eps)
    assert out.dtype == with_bias.dtype == dtype


def test_a_large_mean_costs_no_variance() -> None:
    """mean(x²) − mean(x)² would lose all: (10^9)² has no room for 1 in float64."""
    x = np.array([[1e9 - 1, 1e9 + 1]])
    assert layernorm(x, np.ones(2), None, 0.0).tolist() == [[-1, 1]]


def test_each_head_has_its_own_mean_and_weight() -> None:
    """KRN-08: q/k norm of Command-R+, weight [n_heads, head_dim]."""
    x = np.array([[[1.0, 3.0], [100.0, 300.0]]])
    out = layernorm(x, np.array([[1.0, 2.0], [3.0, 4.0]]), None, 0.0)
    np.testing.assert_allclose(out, [[[-1, 2], [-3, 4]]], rtol=1e-15)


def test_add_layernorm_norms_the_rounded_sum() -> None:
    """(1 + 2^-8, 3 + 2^-8) is stored as (1, 3) in bfloat16: mean 2, norm (−1, 1)."""
    x, residual = np.full((1, 2), 2.0**-8), np.array([[1.0, 3.0]])
    normed, new_residual = add_layernorm(x, residual, np.ones(2), np.array([0.0, 2.0**-9]), 0.0, storage="bfloat16")
    assert new_residual.tolist() == [[1, 3]]
    assert normed.tolist() == [[-1, 1]]  # 1 + 2^-9 rounds to 1
    exact, total = add_layernorm(x, residual, np.ones(2), np.array([0.0, 2.0**-9]), 0.0)
    assert total.tolist() == [[1 + 2.0**-8, 3 + 2.0**-8]]
    np.testing.assert_allclose(exact, [[-1, 1 + 2.0**-9]], rtol=1e-15)
