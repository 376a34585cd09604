"""INT8: a row of numbers as integers from −127 to 127 and one scale.

    scale = max |x| / 127        q = round(x / scale)        x ≈ q · scale

A weight [out, in] has a scale a row, known once it is loaded; activations [num_tokens, in] have a scale a token, found
anew in every call. Both scales stand outside the sum over `in`, so the sum itself is integer arithmetic:

    y[t, o] = Σ_i x[t, i] · w[o, i] ≈ x_scale[t] · w_scale[o] · Σ_i qx[t, i] · qw[o, i]

Source: Dettmers et al. 2022, "LLM.int8()" (vector-wise quantization). Symmetric, so −128 is not used and a negated
row is the negated integers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ref.numerics import flushed

Array = NDArray[Any]
Int8 = NDArray[np.int8]

INT8_MAX = 127


def int8_quantize(x: Array) -> tuple[Int8, Array]:
    """Integers and scale of each row, the last axis: a weight's output channel or a token of activations.

    Args:
        x: [..., n], floating.
    Returns:
        (q [..., n] int8, scale [...] in x's dtype).

    Numerics: x is divided by the scale and rounded half to even, so |x − q · scale| ≤ scale / 2.
    Edge cases: a row of zeros has scale 0 and q 0, and so has one whose scale would be below 2⁻¹²⁶. A row with an inf
    or a NaN has scale NaN and q 0, so that all its products are NaN and no other row's are: int8 has no code for
    either. n = 0 gives scale 0.
    """
    absmax = np.max(np.abs(x), axis=-1, initial=0)  # a NaN wins
    scale: Array = np.where(np.isfinite(absmax), absmax, np.nan) / x.dtype.type(INT8_MAX)
    scale = flushed(scale.astype(x.dtype))
    return int8_quantize_static(x, scale[..., None]), scale


def int8_quantize_static(x: Array, scale: Array) -> Int8:
    """round(x / scale), half to even, kept within ±127: x [...], scale of a shape that broadcasts against it → [...].

    Edge cases: a scale below 2⁻¹²⁶ or NaN, and a NaN in x, give 0; what lies beyond ±127.5 steps becomes ±127.
    """
    scale = flushed(scale)
    usable = np.where(scale > 0, scale, 1).astype(x.dtype)
    steps = np.where(scale > 0, np.rint(x / usable), 0)
    q: Int8 = np.clip(np.nan_to_num(steps, nan=0.0), -INT8_MAX, INT8_MAX).astype(np.int8)
    return q


def int8_dequantize(q: Int8, scale: Array) -> Array:
    """q · scale: [..., n] int8, [...] → [..., n] in scale's dtype."""
    return q.astype(scale.dtype) * scale[..., None]


def int8_matmul(xq: NDArray[Any], wq: NDArray[Any]) -> NDArray[np.int32]:
    """xq wqᵀ in integers, as tensor cores do it: [num_tokens, in], [out, in] int8 → [num_tokens, out] int32.

    Raises:
        OverflowError: a sum is outside int32. With all numbers within ±127 that takes in > 133 144.

    Numerics: exact. The products run in float64, which holds integers to 2⁵³ and is quicker in NumPy than int32.
    """
    sums = xq.astype(np.float64) @ wq.astype(np.float64).T
    limits = np.iinfo(np.int32)
    if sums.size and (sums.min() < limits.min or sums.max() > limits.max):
        raise OverflowError(f"an integer sum over {xq.shape[-1]} products does not fit int32")
    return sums.astype(np.int32)


def int8_linear(x: Array, wq: Int8, w_scale: Array, bias: Array | None = None) -> Array:
    """y = x Wᵀ + b with both sides in int8: W8A8.

    Args:
        x: [num_tokens, in], floating; quantized per token here.
        wq: [out, in] int8.
        w_scale: [out].
        bias: [out] or None.
    Returns:
        [num_tokens, out], dtype of x.

    Raises:
        OverflowError: see int8_matmul.

    Numerics: int32 sums are exact; the two scales are multiplied in x's dtype after the sum, then the bias is added.
    Edge cases: a token of zeros gives the bias; an inf or NaN in a token makes that token's row NaN.
    """
    xq, x_scale = int8_quantize(x)
    return int8_scale(int8_matmul(xq, wq), x_scale, w_scale.astype(x.dtype), bias)


def int8_scale(sums: NDArray[np.int32], x_scale: Array, w_scale: Array, bias: Array | None = None) -> Array:
    """Integer sums to numbers: sums · x_scale · w_scale + bias.

    Args:
        sums: [num_tokens, out] int32.
        x_scale: [num_tokens].
        w_scale: [out].
        bias: [out] or None.
    Returns:
        [num_tokens, out], dtype of x_scale.
    """
    y: Array = sums.astype(x_scale.dtype) * x_scale[:, None] * w_scale
    return y if bias is None else y + bias.astype(y.dtype)
