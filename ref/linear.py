"""The linear layer: nearly all weights and nearly all arithmetic of a language model are here.

Source: torch.nn.Linear, whose layout [out, in] Hugging Face checkpoints have.
"""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

Array = NDArray[Any]


def linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """y = x Wᵀ + b.

    The weight is stored [out, in], as Hugging Face checkpoints store it: row o holds what output o takes from
    each input, so y[t, o] = Σ_i x[t, i] · weight[o, i] + bias[o].

    Args:
        x: [..., in_features].
        weight: [out_features, in_features].
        bias: [out_features] or None.
    Returns:
        [..., out_features], dtype of x.

    Numerics: sums in x's dtype; the bias is added before the one rounding at the end.
    Edge cases: no rows gives no rows.
    """
    y: Array = x @ weight.T  # [..., out_features]
    if bias is not None:
        y = y + bias
    return y


def logits(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """linear of the head, whose output no kernel rounds to the storage type: a vocabulary's logits lie close together.

    Args:
        x: [num_rows, hidden_size].
        weight: [vocab_size, hidden_size].
        bias: [vocab_size] or None.
    Returns:
        [num_rows, vocab_size], dtype of x; a kernel over 16-bit weights gives float32.

    Source: composed of linear.
    """
    return linear(x, weight, bias)
