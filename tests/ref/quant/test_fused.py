"""ref.quant.fused: the same numbers as one step after the other."""

import numpy as np
import pytest

from ref.numerics import round_to
from ref.quant.fused import add_norm_quant, dequant_add_norm, norm_quant, quantize_activations
from ref.quant.int8 import int8_linear, int8_matmul, int8_quantize
from ref.rmsnorm import add_rmsnorm, rmsnorm


def test_norm_quant_by_hand() -> None:
    """Rms of 3, 4 (with a mean square of 12.5) times a factor that makes it 127 and 2 · 63.5."""
    x = np.array([[3.0, 4]])
    weight = np.sqrt(12.5) * np.array([127 / 3, -63.5 / 4])
    codes, scales = norm_quant(x, weight, 0.0, "int8")
    assert codes.tolist() == [[127, -64]]
    np.testing.assert_allclose(scales, [1], rtol=1e-15)


@pytest.mark.parametrize("kind", ["int8", "fp8", "fp8_block"])
def test_one_pass_is_two(kind: str) -> None:
    rng = np.random.default_rng(0)
    x, residual = rng.standard_normal((2, 4, 192))
    weight = rng.uniform(0.5, 1.5, 192)
    x[1] = residual[1] = 0
    codes, scales, new_residual = add_norm_quant(x, residual, weight, 1e-6, kind, storage="bfloat16")
    normed = round_to(rmsnorm(round_to(x + residual, "bfloat16"), weight, 1e-6), "bfloat16")
    expected_codes, expected_scales = quantize_activations(normed, kind)
    np.testing.assert_array_equal(new_residual, round_to(x + residual, "bfloat16"))
    np.testing.assert_array_equal(codes, expected_codes)
    np.testing.assert_array_equal(scales, expected_scales)
    assert scales.shape == ((4, 2) if kind == "fp8_block" else (4,))
    assert not codes[1].any()


def test_dequant_add_norm_after_an_int8_matmul() -> None:
    rng = np.random.default_rng(1)
    x, weight, norm = rng.standard_normal((3, 16)), rng.standard_normal((8, 16)), rng.uniform(0.5, 1.5, 8)
    residual = rng.standard_normal((3, 8))
    (xq, xs), (wq, ws) = int8_quantize(x), int8_quantize(weight)
    normed, new_residual = dequant_add_norm(int8_matmul(xq, wq), xs[:, None] * ws, residual, norm, 1e-6)
    expected = add_rmsnorm(int8_linear(x, wq, ws), residual, norm, 1e-6)
    np.testing.assert_allclose(new_residual, expected[1], rtol=1e-14)
    np.testing.assert_allclose(normed, expected[0], rtol=1e-12)


def test_dequant_add_norm_in_groups_by_hand() -> None:
    q = np.array([[1, 2, 3, 4]], np.int8)
    scales = np.array([[0.5, 2.0]], np.float16)
    _, new_residual = dequant_add_norm(q, scales, np.ones((1, 4)), np.ones(4), 1e-6)
    assert new_residual.tolist() == [[1.5, 2, 7, 9]]
    with pytest.raises(ValueError, match="3 groups do not divide a hidden_size of 4"):
        dequant_add_norm(q, np.ones((1, 3)), np.ones((1, 4)), np.ones(4), 1e-6)


def test_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="kind is 'int4'; known are int8, fp8, fp8_block"):
        quantize_activations(np.ones((1, 2)), "int4")
