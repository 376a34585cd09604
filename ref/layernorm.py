"""Layer norm: like ref/rmsnorm.py, but the mean is taken out first.

Source: Ba, Kiros, Hinton 2016, "Layer Normalization". Command-R has it without bias, GPT-2 layouts (CPM-1) with one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ref.numerics import round_to

Array = NDArray[Any]


def layernorm(x: Array, weight: Array, bias: Array | None, eps: float) -> Array:
    """y = (x − mean(x)) / sqrt(var(x) + eps) · weight + bias, over the last axis.

    Args:
        x: [..., hidden_size], or [num_tokens, n_heads, head_dim] to norm each head by itself.
        weight: [hidden_size]; [n_heads, head_dim] for heads with weights of their own, as Command-R+ has for q and k.
        bias: shape of weight, or None.
        eps: keeps a row of equal numbers finite; inside the root.
    Returns:
        shape and dtype of x.

    Numerics: var is the mean of squares of x − mean, so it divides by hidden_size and loses nothing to cancellation;
    all in x's dtype, so give float32 or wider; one rounding at the end.
    Edge cases: a row of equal numbers gives bias, or zeros.
    """
    centred = x - np.mean(x, axis=-1, keepdims=True)
    variance = np.mean(np.square(centred), axis=-1, keepdims=True)  # [..., 1]
    normed: Array = centred / np.sqrt(variance + x.dtype.type(eps)) * weight
    return normed if bias is None else normed + bias


def add_layernorm(
    x: Array, residual: Array, weight: Array, bias: Array | None, eps: float, *, storage: str | None = None
) -> tuple[Array, Array]:
    """new_residual = x + residual; normed = layernorm(new_residual, weight, bias, eps). See ref.rmsnorm.add_rmsnorm.

    Args:
        x, residual: [num_tokens, hidden_size].
        weight: [hidden_size].
        bias: [hidden_size] or None.
    Returns:
        (normed, new_residual), both [num_tokens, hidden_size], dtype of x.

    Numerics: new_residual is rounded to `storage` first, and the norm reads the rounded sum.
    """
    new_residual = round_to(x + residual, storage)
    return round_to(layernorm(new_residual, weight, bias, eps), storage), new_residual
