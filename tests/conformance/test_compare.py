"""What an error is, and what compare says of an output."""

from typing import Any

import numpy as np
import pytest

from conformance.compare import Comparison, compare, elementwise_error
from conformance.tolerance import EXACT, RULE, WORST_FACTOR

NAN, INF = np.nan, np.inf
FLOOR = 8 * 2.0**-24


def compared(actual: Any, truth: Any, yardstick: Any = None, **changed: Any) -> Comparison:
    truth = np.asarray(truth)
    if yardstick is None:
        yardstick = truth.astype(np.float32)
    return compare(np.asarray(actual), truth, yardstick, **{"tolerance": RULE, "storage": "float32"} | changed)


def test_elementwise_error() -> None:
    """Root mean square of (3, 4, 0, 0) is 2.5: 3 and 4 are above it, so their errors are relative; 0 is below."""
    errors = elementwise_error(np.array([[3.3, 4.0, 0.5, -0.25]]), np.array([[3.0, 4.0, 0.0, 0.0]]))
    np.testing.assert_allclose(errors, [[0.1, 0.0, 0.2, 0.1]], rtol=1e-12)


def test_rows_have_scales_of_their_own() -> None:
    errors = elementwise_error(
        np.array([[1001.0, 1000.0], [0.002, 0.001]]), np.array([[1000.0, 1000.0], [0.001, 0.001]])
    )
    np.testing.assert_allclose(errors, [[0.001, 0.0], [1.0, 0.0]], rtol=1e-9)


def test_values_that_are_not_finite() -> None:
    truth = np.array([NAN, INF, -INF, INF, 1.0, NAN, 1.0])
    actual = np.array([NAN, INF, -INF, -INF, NAN, 1.0, 1.0])
    assert elementwise_error(actual, truth).tolist() == [0, 0, 0, INF, INF, INF, 0]


def test_a_row_of_zeros_must_be_zeros() -> None:
    assert compared(np.zeros(3, np.float32), np.zeros(3)).problem == ""
    assert compared(np.array([0, 1e-30, 0], np.float32), np.zeros(3)).problem != ""


def test_integers_are_equal_or_not() -> None:
    assert compared([1, 2], np.array([1, 2]), np.array([1, 2])) == Comparison(0.0, 0.0)
    assert "[1], is 3 where 2 is right" in compared([1, 3], np.array([1, 2]), np.array([1, 2])).problem


def test_shape_and_dtype() -> None:
    assert compared(np.zeros((2, 1), np.float32), np.zeros(2)).problem == "has shape [2, 1], expected [2]"
    assert compared(np.zeros(2), np.zeros(2)).problem == "is float64, expected float32"
    assert compared(np.zeros(0, np.float32), np.zeros(0)) == Comparison(0.0, 0.0)


@pytest.mark.parametrize(("error", "passes"), [(0.75 * FLOOR, True), (1.25 * FLOOR, False)])
def test_the_floor_bounds_the_root_mean_square(error: float, passes: bool) -> None:
    truth = np.ones(1000)  # float32 steps by a quarter of the floor there
    comparison = compared(np.full(1000, 1 + error, np.float32), truth)
    assert (comparison.problem == "") is passes
    assert comparison.limit == FLOOR


@pytest.mark.parametrize(("factor", "passes"), [(0.9, True), (1.1, False)])
def test_the_worst_element_has_a_limit_of_its_own(factor: float, passes: bool) -> None:
    """One element among many hardly moves the root mean square, and is found all the same."""
    truth = np.ones(10000)
    actual = np.ones(10000, np.float32)
    actual[1234] += np.float32(factor * WORST_FACTOR * FLOOR)
    comparison = compared(actual, truth)
    assert (comparison.problem == "") is passes
    assert passes or "99.99% of 10000 elements pass" in comparison.problem
    assert passes or "the worst, at [1234], is 1.0000021 where 1.0 is right" in comparison.problem


def test_the_yardstick_moves_the_limit() -> None:
    truth = np.ones(100)
    yardstick = np.full(100, 1.001, np.float32)
    assert compared(np.full(100, 1.0019, np.float32), truth, yardstick).problem == ""
    assert compared(np.full(100, 1.0021, np.float32), truth, yardstick).problem != ""
    assert compared(np.full(100, 1.0001, np.float32), truth, yardstick, tolerance=EXACT).problem != ""


def test_a_yardstick_that_overflows_is_no_excuse() -> None:
    comparison = compared(np.ones(2, np.float32), np.ones(2), np.array([1, INF], np.float32))
    assert comparison.problem == "cannot be judged: ref in float32 is not finite where it is in float64"
