"""Root-mean-square norm: keeps the size of the hidden state in hand between layers.

Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization". Unlike LayerNorm it subtracts no mean.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ref.numerics import round_to

Array = NDArray[Any]


def rmsnorm(x: Array, weight: Array, eps: float) -> Array:
    """y = x / sqrt(mean(x²) + eps) · weight, over the last axis.

    Args:
        x: [..., hidden_size].
        weight: [hidden_size]; the factor is weight itself, not 1 + weight.
        eps: keeps a row of zeros finite; inside the root.
    Returns:
        [..., hidden_size], dtype of x.

    Numerics: the mean is taken in x's dtype, so give float32 or wider; one rounding at the end. Llama as published
    rounds x / rms to the storage type before it multiplies by weight; we do not.
    Edge cases: a row of zeros gives zeros.
    """
    mean_square = np.mean(np.square(x), axis=-1, keepdims=True)  # [..., 1]
    normed: Array = x / np.sqrt(mean_square + x.dtype.type(eps))
    return normed * weight


def rmsnorm_ordered(x: Array, weight: Array, eps: float, order: Array) -> Array:
    """rmsnorm(x, weight, eps)[…, order]: for a layer whose columns lie in another order (act-order).

    Args:
        x, weight, eps: as in rmsnorm.
        order: [hidden_size], which element stands at each place.
    Returns:
        [..., hidden_size], dtype of x.
    """
    return rmsnorm(x, weight, eps)[..., order]


def qk_norm(q: Array, k: Array, q_weight: Array, k_weight: Array, eps: float) -> tuple[Array, Array]:
    """rmsnorm of every head of q and k by itself, before rope: scores then cannot outgrow the softmax.

    Args:
        q: [num_tokens, n_heads, head_dim].
        k: [num_tokens, n_kv_heads, head_dim].
        q_weight, k_weight: [head_dim], the same for all heads; [n_heads, head_dim] and [n_kv_heads, head_dim] where
            each head has its own.
    Returns:
        (q, k) normed, shapes and dtypes as given.

    Source: Dehghani et al. 2023, "Scaling Vision Transformers to 22 Billion Parameters"; Qwen3.
    Numerics: as rmsnorm.
    """
    return rmsnorm(q, q_weight, eps), rmsnorm(k, k_weight, eps)


def add_rmsnorm(
    x: Array, residual: Array, weight: Array, eps: float, *, storage: str | None = None
) -> tuple[Array, Array]:
    """new_residual = x + residual; normed = rmsnorm(new_residual, weight, eps).

    A pre-norm decoder adds each block's output to the residual stream and norms the sum for the next block. The
    two steps are one here because one pass over memory can do both.

    Args:
        x, residual: [num_tokens, hidden_size].
        weight: [hidden_size].
    Returns:
        (normed, new_residual), both [num_tokens, hidden_size], dtype of x.

    Numerics: new_residual is rounded to `storage` first, and the norm reads the rounded sum, because that is what
    the next layer will read too.
    """
    new_residual = round_to(x + residual, storage)
    return round_to(rmsnorm(new_residual, weight, eps), storage), new_residual


def add_rmsnorm_ordered(
    x: Array, residual: Array, weight: Array, eps: float, order: Array, *, storage: str | None = None
) -> tuple[Array, Array]:
    """add_rmsnorm, with normed[…, order]; new_residual keeps its own order.

    Args:
        x, residual, weight, eps: as in add_rmsnorm.
        order: [hidden_size], as in rmsnorm_ordered.
    Returns:
        (normed, new_residual), both [num_tokens, hidden_size], dtype of x.
    """
    normed, new_residual = add_rmsnorm(x, residual, weight, eps, storage=storage)
    return normed[..., order], new_residual
