"""ref.activation: values by hand, and the gated unit, gate first."""

import math

import numpy as np
import pytest

from ref.activation import ACTIVATIONS, activation_named, gate_up_act, gelu, gelu_tanh, relu, sigmoid, silu


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_silu_and_sigmoid_by_hand(dtype: type) -> None:
    x = np.array([0, math.log(3), -math.log(3)], dtype)
    expected = [0, 0.75 * math.log(3), -0.25 * math.log(3)]
    np.testing.assert_allclose(silu(x), expected, rtol=4 * np.finfo(dtype).eps)
    np.testing.assert_allclose(sigmoid(x), [0.5, 0.75, 0.25], rtol=4 * np.finfo(dtype).eps)
    assert silu(x).dtype == sigmoid(x).dtype == dtype


def test_large_values_do_not_overflow() -> None:
    x = np.array([1000, -1000], np.float32)
    assert silu(x).tolist() == [1000, 0]
    assert sigmoid(x).tolist() == [1, 0]
    assert gelu_tanh(x).tolist() == gelu(x).tolist() == [1000, 0]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_gelu_by_tables_of_the_normal_distribution(dtype: type) -> None:
    """Φ(1) = 0.8413447460685429, Φ(2) = 0.9772498680518208, Φ(−1) = 1 − Φ(1)."""
    out = gelu(np.array([0, 1, 2, -1], dtype))
    expected = [0, 0.8413447460685429, 1.9544997361036416, -0.15865525393145707]
    np.testing.assert_allclose(out, expected, rtol=4 * np.finfo(dtype).eps)
    assert out.dtype == dtype


def test_gelu_keeps_its_digits_far_below_zero() -> None:
    """Φ(−8) = 6.220960574271785e-16."""
    np.testing.assert_allclose(gelu(np.array([-8.0])), [-8 * 6.220960574271785e-16], rtol=1e-14)


def test_gelu_tanh_by_hand() -> None:
    """x = 1: tanh(0.7978845608 · 1.044715) = tanh(0.8335618) = 0.6823833, so 0.8411919906; not gelu's 0.84134."""
    np.testing.assert_allclose(gelu_tanh(np.array([1.0, -1.0])), [0.8411919906, -0.1588080094], rtol=1e-9)
    x = np.linspace(-6, 6, 1201)
    difference = np.max(np.abs(gelu_tanh(x) - gelu(x)))
    assert 1e-4 < difference < 5e-4


def test_relu_cuts_at_zero() -> None:
    assert relu(np.array([-2.0, 0, 3], np.float32)).tolist() == [0, 0, 3]


def test_the_gate_is_the_first_half() -> None:
    out = gate_up_act(np.array([[math.log(3), 0.0, 2.0, 5.0]]))  # gates ln 3 and 0, ups 2 and 5
    np.testing.assert_allclose(out, [[1.5 * math.log(3), 0]], rtol=1e-15)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_gate_goes_through_the_named_activation(name: str) -> None:
    out = gate_up_act(np.array([[1.0, -2.0, 3.0, 5.0]]), name)
    np.testing.assert_array_equal(out, [[3, 5]] * ACTIVATIONS[name](np.array([[1.0, -2.0]])))


def test_names_are_those_of_configs_and_others_are_refused() -> None:
    assert activation_named("gelu_new") is activation_named("gelu_pytorch_tanh") is gelu_tanh
    with pytest.raises(ValueError, match="activation 'quick_gelu' is not supported; known are silu, gelu"):
        gate_up_act(np.zeros((1, 2)), "quick_gelu")
