"""The linear layer: nearly all weights and nearly all arithmetic of a language model are here.

Source: torch.nn.Linear, whose layout [out, in] Hugging Face checkpoints have.
"""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from ref.activation import gate_up_act
from ref.numerics import round_to

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


def linear_gate_up_act(
    x: Array, weight: Array, activation: str = "silu", bias: Array | None = None, *, storage: str | None = None
) -> Array:
    """The first half of a gated MLP: f(x Gᵀ + b) · (x Uᵀ + c), with G and U one below the other in the weight.

    Args:
        x: [..., in_features].
        weight: [2 · size, in_features], the rows of gates first.
        activation: f, as hidden_act names it.
        bias: [2 · size] or None.
        storage: the type in which a kernel of linear alone would store the products.
    Returns:
        [..., size], dtype of x.

    Numerics: each product is rounded to storage, as if it had been written and read again; then as gate_up_act.
    Source: composed of linear and gate_up_act.
    """
    return gate_up_act(round_to(linear(x, weight, bias), storage), activation)
