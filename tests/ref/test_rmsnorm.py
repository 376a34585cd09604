"""ref.rmsnorm: eps inside the root, the weight as it is, and which sum the next layer sees."""

import numpy as np
import pytest

from ref.rmsnorm import add_rmsnorm, qk_norm, rmsnorm


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_by_hand(dtype: type) -> None:
    x = np.array([[1, -1], [5, 5]], dtype)
    out = rmsnorm(x, np.array([1, 4], dtype), 3.0)  # sqrt(1 + 3) = 2; sqrt(25 + 3)
    np.testing.assert_allclose(out, [[0.5, -2], [5 / 28**0.5, 20 / 28**0.5]], rtol=4 * np.finfo(dtype).eps)
    assert out.dtype == dtype


def test_a_row_of_zeros_stays_zero() -> None:
    assert rmsnorm(np.zeros((1, 4)), np.ones(4), 1e-6).tolist() == [[0, 0, 0, 0]]


def test_add_rmsnorm_is_the_sum_and_its_norm() -> None:
    x, residual, weight = np.array([[1.0, 2.0]]), np.array([[3.0, -2.0]]), np.array([1.0, 1.0])
    normed, new_residual = add_rmsnorm(x, residual, weight, 1.0)
    assert new_residual.tolist() == [[4, 0]]
    np.testing.assert_allclose(normed, [[4 / 3, 0]], rtol=1e-15)  # mean square 8, plus 1, root 3
    assert residual.tolist() == [[3, -2]]


def test_the_norm_reads_the_rounded_sum() -> None:
    """1 + 2^-8 is no bfloat16: the stored sum is 1, and the norm must be that of 1."""
    x, residual, weight = np.full((1, 2), 2.0**-8), np.array([[1.0, 3.0]]), np.ones(2)
    normed, new_residual = add_rmsnorm(x, residual, weight, 0.0, storage="bfloat16")
    assert new_residual.tolist() == [[1, 3]]
    assert normed.tolist() == [[0.447265625, 1.34375]]  # 1/√5 = 0.44721 and 3/√5 = 1.34164 with 8 bits


def test_qk_norm_is_by_head_and_the_weight_may_be_too() -> None:
    """Heads (1, 1) and (7, 1) of q have root mean squares 1 and 5; k has one head, (3, 3)."""
    q, k = np.array([[[1.0, 1.0], [7.0, 1.0]]]), np.array([[[3.0, 3.0]]])
    q_normed, k_normed = qk_norm(q, k, np.array([1.0, 10.0]), np.array([2.0, 4.0]), 0.0)
    np.testing.assert_allclose(q_normed, [[[1, 10], [1.4, 2]]], rtol=1e-15)
    np.testing.assert_allclose(k_normed, [[[2, 4]]], rtol=1e-15)
    by_head, _ = qk_norm(q, k, np.array([[1.0, 10.0], [5.0, 0.0]]), np.array([[2.0, 4.0]]), 0.0)
    np.testing.assert_allclose(by_head, [[[1, 10], [7, 0]]], rtol=1e-15)
