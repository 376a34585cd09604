"""One output of a candidate against the truth: how large is the error, where is it, and is it within its limit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.tolerance import SMALLEST_NORMAL, WORST_FACTOR, Tolerance
from ref.numerics import relative_error

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The error of one output, the limit that it must keep, and what is wrong in words ("" = nothing).

    Of the two measures, root mean square and worst element, it is the one nearer to its limit.
    """

    error: float
    limit: float
    problem: str = ""

    @property
    def share(self) -> float:
        """How much of its limit the error uses; above 1 is a failure."""
        return self.error / self.limit if self.limit else (np.inf if self.error else 0.0)


def elementwise_error(actual: Array, truth: Array) -> NDArray[np.float64]:
    """|actual − truth| / max(|truth|, root mean square of truth's row), shape as truth; rows are the last axis.

    That is relative where a value is large in its row and absolute, in units of the row, where it is small: a sum
    that cancels to nearly nothing has no more correct digits than its row has. Elements that are not finite count as
    0 where both agree (NaN with NaN, ∞ with ∞ of the same sign) and as ∞ elsewhere. Integers: 0 or 1.
    """
    if not np.issubdtype(truth.dtype, np.floating):
        return np.asarray(actual != truth, np.float64)
    actual, truth = actual.astype(np.float64), truth.astype(np.float64)
    both_finite = np.isfinite(actual) & np.isfinite(truth)
    agree = (actual == truth) | (np.isnan(actual) & np.isnan(truth))
    finite_truth = np.where(np.isfinite(truth), truth, 0.0)
    row_sums = np.sum(np.square(finite_truth), axis=-1, keepdims=True)
    row_counts = np.sum(np.isfinite(truth), axis=-1, keepdims=True)
    row_sizes = np.sqrt(row_sums / np.maximum(row_counts, 1))
    difference = np.where(both_finite, actual, 0.0) - np.where(both_finite, truth, 0.0)
    scale = np.maximum(np.maximum(np.abs(finite_truth), row_sizes), SMALLEST_NORMAL)
    error: NDArray[np.float64] = np.where(both_finite, np.abs(difference) / scale, np.where(agree, 0.0, np.inf))
    return error


def compare(actual: Array, truth: Array, yardstick: Array, tolerance: Tolerance, storage: str) -> Comparison:
    """Shape, dtype, and every element of one output.

    Args:
        truth: ref run in float64.
        yardstick: ref run in the storage type; its dtype is the one that actual must have.
    """
    if actual.shape != truth.shape:
        return Comparison(np.inf, 0.0, f"has shape {list(actual.shape)}, expected {list(truth.shape)}")
    if actual.dtype != yardstick.dtype:
        return Comparison(np.inf, 0.0, f"is {actual.dtype}, expected {yardstick.dtype}")
    if actual.size == 0:
        return Comparison(0.0, 0.0)
    if tolerance.norm is not None and np.issubdtype(truth.dtype, np.floating):
        return _compare_norms(actual, truth, tolerance.norm)
    errors, yardstick_errors = elementwise_error(actual, truth), elementwise_error(yardstick, truth)
    if not np.isfinite(yardstick_errors).all():
        return Comparison(np.inf, 0.0, f"cannot be judged: ref in {storage} is not finite where it is in float64")
    limit, worst_limit = error_limits(truth, yardstick, tolerance, storage)
    overall = Comparison(_root_mean_square(errors), limit)
    worst = Comparison(float(errors.max()), worst_limit)
    found = max(overall, worst, key=lambda comparison: comparison.share)
    if found.share <= 1:
        return found
    place = np.unravel_index(np.argmax(errors), errors.shape)
    passing = float(np.mean(errors <= worst_limit))
    return Comparison(
        found.error,
        found.limit,
        f"has an error of {overall.error:.3g}, limit {limit:.3g}; {passing:.2%} of {errors.size} elements pass by "
        f"themselves; the worst, at {[int(i) for i in place]}, is {actual[place]!s} where {truth[place]!s} is right: "
        f"error {worst.error:.3g}, limit {worst_limit:.3g}",
    )


def error_limits(truth: Array, yardstick: Array, tolerance: Tolerance, storage: str) -> tuple[float, float]:
    """The largest root mean square, and the largest single one, of the errors of an answer; 0 for integers."""
    if truth.size == 0 or not np.issubdtype(truth.dtype, np.floating):
        return 0.0, 0.0
    errors = elementwise_error(yardstick, truth)
    limit = tolerance.limit(_root_mean_square(errors), storage)
    return limit, WORST_FACTOR * tolerance.limit(float(errors.max()), storage)


def _compare_norms(actual: Array, truth: Array, limit: float) -> Comparison:
    error = relative_error(actual, truth)
    if error <= limit:
        return Comparison(error, limit)
    error = error if np.isfinite(error) else np.inf
    return Comparison(error, limit, f"is off by {error:.3g} of its norm over all elements, limit {limit:.3g}")


def _root_mean_square(errors: NDArray[np.float64]) -> float:
    return float(np.sqrt(np.mean(np.square(errors))))
