"""ref.activation: silu and the gated unit, gate first."""

import math

import numpy as np
import pytest

from ref.activation import gate_up_act, silu


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_silu_by_hand(dtype: type) -> None:
    x = np.array([0, math.log(3), -math.log(3)], dtype)
    expected = [0, 0.75 * math.log(3), -0.25 * math.log(3)]
    np.testing.assert_allclose(silu(x), expected, rtol=4 * np.finfo(dtype).eps)
    assert silu(x).dtype == dtype


def test_silu_of_large_values_does_not_overflow() -> None:
    assert silu(np.array([1000, -1000], np.float32)).tolist() == [1000, 0]


def test_the_gate_is_the_first_half() -> None:
    out = gate_up_act(np.array([[math.log(3), 0.0, 2.0, 5.0]]))  # gates ln 3 and 0, ups 2 and 5
    np.testing.assert_allclose(out, [[1.5 * math.log(3), 0]], rtol=1e-15)
