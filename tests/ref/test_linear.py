"""ref.linear: y = x Wᵀ + b with the weight stored [out, in]."""

import numpy as np

from ref.linear import linear

WEIGHT = np.array([[1, 2], [3, 4], [5, 6]], np.float32)


def test_by_hand() -> None:
    x = np.array([[1, 10], [1, 0]], np.float32)
    assert linear(x, WEIGHT).tolist() == [[21, 43, 65], [1, 3, 5]]
    assert linear(x, WEIGHT, np.array([1, 0, -1], np.float32)).tolist() == [[22, 43, 64], [2, 3, 4]]
    assert linear(x, WEIGHT).dtype == np.float32


def test_no_rows() -> None:
    assert linear(np.empty((0, 2), np.float32), WEIGHT).shape == (0, 3)
