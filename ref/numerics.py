"""Number formats, softmax and error measures: the ground on which every other file stands.

Functions of ref take any floating dtype and answer in it. Run in float64 they are the truth; run in float32, or
with `round_to` at the places that a docstring names under "Numerics", they are the yardstick for kernels.

Source: IEEE 754-2019 (roundTiesToEven); Intel 2018, "BFLOAT16 – Hardware Numerics Definition"; Blanchard, Higham,
Higham 2021, "Accurately computing the log-sum-exp and softmax functions"; Higham 2002, "Accuracy and Stability of
Numerical Algorithms" (errors in a norm).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

SMALLEST_NORMAL = 2.0**-126  # of float32 and bfloat16


def bf16_bits(x: Array) -> NDArray[np.uint16]:
    """The bfloat16 nearest to each element, ties to even, as 16 bits; shape as x.

    A bfloat16 is the upper half of a float32. Adding 0x7FFF + (lowest kept bit) carries into the upper half
    exactly when the lower half is above one half, or is one half and the kept part is odd.

    Numerics: x goes through float32 first, so a float64 is rounded twice; give float32 where that matters.
    Edge cases: overflow becomes inf, inf stays, every NaN becomes the quiet NaN 0x7FC0 with its sign; subnormals
    are kept.
    """
    bits = np.asarray(x).astype(np.float32).view(np.uint32)
    lowest_kept = (bits >> 16) & 1
    rounded = ((bits + 0x7FFF + lowest_kept) >> 16).astype(np.uint16)
    quiet_nan = ((bits >> 16) & 0x8000 | 0x7FC0).astype(np.uint16)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(is_nan, quiet_nan, rounded)


def bf16_to_float32(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """The value of each bfloat16, given as 16 bits; exact, shape as bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def round_to(x: Array, storage: str | None) -> Array:
    """x rounded to what the storage type can hold, but kept in x's own dtype.

    Args:
        x: [...], floating.
        storage: "float64", "float32", "float16", "bfloat16" or None (no rounding).
    Returns:
        shape and dtype of x.
    Raises:
        ValueError: another storage. Functions that hand their `storage` on to this one do not say it again.
    """
    if storage is None:
        return x
    if storage == "bfloat16":
        return bf16_to_float32(bf16_bits(x)).astype(x.dtype)
    if storage not in ("float64", "float32", "float16"):
        raise ValueError(f"storage is {storage!r}; known are float64, float32, float16 and bfloat16")
    with np.errstate(over="ignore"):  # 70000 is inf in float16: meant, not a mistake
        return x.astype(storage).astype(x.dtype)


def flushed(x: Array) -> Array:
    """x with 0 for what lies below 2⁻¹²⁶, the smallest normal float32, as units that flush have it; shape as x.

    Args:
        x: [...], not negative: scales. What one divides by must not be less: its inverse would overflow.

    Edge cases: NaN stays.
    """
    return np.where(x < SMALLEST_NORMAL, x.dtype.type(0), x)


def logsumexp(x: Array, axis: int = -1) -> Array:
    """log Σ exp(x) along axis, which is dropped: [..., n] → [...], dtype of x.

    The largest element is taken out first, so that no exp overflows.
    Edge cases: all −inf, or an axis of length 0, gives −inf.
    """
    if x.shape[axis] == 0:
        return np.full(np.delete(np.array(x.shape), axis), -np.inf, x.dtype)
    largest = np.max(x, axis=axis, keepdims=True)
    shift = np.where(np.isfinite(largest), largest, 0).astype(x.dtype)
    with np.errstate(divide="ignore"):  # log 0 = −inf is the answer
        total = np.log(np.sum(np.exp(x - shift), axis=axis))
    result: Array = total + np.squeeze(shift, axis)
    return result


def softmax(x: Array, axis: int = -1) -> Array:
    """exp(x) / Σ exp(x) along axis; shape and dtype as x.

    Numerics: the largest element is subtracted first; without that exp overflows at 89 in float32.
    Edge cases: a row that is −inf everywhere (nothing may be attended to) is all zeros, not NaN.
    """
    if x.shape[axis] == 0:
        return x.copy()
    largest = np.max(x, axis=axis, keepdims=True)
    weights: Array = np.exp(x - np.where(np.isfinite(largest), largest, 0).astype(x.dtype))
    total = np.sum(weights, axis=axis, keepdims=True)
    result: Array = weights / np.where(total == 0, 1, total).astype(x.dtype)
    return result


def relative_error(actual: Array, expected: Array) -> float:
    """‖actual − expected‖ / ‖expected‖ over all elements, Euclidean norms in float64; both are of one shape.

    Edge cases: both zero or empty gives 0; expected zero alone gives inf; a NaN in either gives NaN.
    """
    difference = float(np.linalg.norm((actual.astype(np.float64) - expected.astype(np.float64)).ravel()))
    size = float(np.linalg.norm(expected.astype(np.float64).ravel()))
    if size == 0:
        return 0.0 if difference == 0 else float("inf")
    return difference / size


def max_abs_error(actual: Array, expected: Array) -> float:
    """max |actual − expected|, in float64, of two arrays of one shape; 0 for empty ones."""
    if actual.size == 0:
        return 0.0
    return float(np.max(np.abs(actual.astype(np.float64) - expected.astype(np.float64))))
