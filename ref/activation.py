"""Activation functions of the feed-forward block, and the gated unit.

Source: Hendrycks and Gimpel 2016, "Gaussian Error Linear Units" (gelu, and silu in passing); Ramachandran, Zoph, Le
2017, "Searching for Activation Functions" (silu as swish); Nair and Hinton 2010, "Rectified Linear Units Improve
Restricted Boltzmann Machines" (relu); names are those of Hugging Face configs, hidden_act.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

_erfc = np.vectorize(math.erfc, otypes=[np.float64])  # NumPy has none


def sigmoid(x: Array) -> Array:
    """σ(x) = 1 / (1 + exp(−x)); shape and dtype as x.

    Numerics: exp is taken of −|x| only, which cannot overflow: for negative x, σ(x) = exp(x) / (1 + exp(x)).
    """
    small = np.exp(-np.abs(x))
    y: Array = np.where(x >= 0, 1, small).astype(x.dtype) / (1 + small)
    return y


def silu(x: Array) -> Array:
    """x · σ(x) = x / (1 + exp(−x)); shape and dtype as x. Also called swish.

    Numerics: exp is taken of −|x| only, as in sigmoid.
    Edge cases: silu(−inf) is NaN, as −inf · 0; finite inputs give finite outputs.
    """
    small = np.exp(-np.abs(x))
    y: Array = x * np.where(x >= 0, 1, small) / (1 + small)
    return y


def gelu(x: Array) -> Array:
    """x · Φ(x) = x · (1 + erf(x / √2)) / 2 = x · erfc(−x / √2) / 2, Φ the normal distribution; shape and dtype as x.

    Numerics: erfc in float64, as 1 + erf loses its digits where x is far below 0; the product in x's dtype.
    """
    y: Array = x * (_erfc(x / -math.sqrt(2)) / 2).astype(x.dtype)
    return y


def gelu_tanh(x: Array) -> Array:
    """x · (1 + tanh(√(2/π) · (x + 0.044715 x³))) / 2: gelu to within 5e-4, by another formula; shape and dtype as x."""
    inner = x.dtype.type(math.sqrt(2 / math.pi)) * (x + x.dtype.type(0.044715) * x * x * x)
    y: Array = x * (1 + np.tanh(inner)) / 2
    return y


def relu(x: Array) -> Array:
    """max(x, 0); shape and dtype as x."""
    y: Array = np.maximum(x, 0)
    return y


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {  # by hidden_act of a Hugging Face config
    "silu": silu,
    "gelu": gelu,
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "relu": relu,
}


def activation_named(name: str) -> Callable[[Array], Array]:
    """The function that a config's hidden_act means.

    Raises:
        ValueError: a name that is not known.
    """
    if name not in ACTIVATIONS:
        raise ValueError(f"activation {name!r} is not supported; known are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def act(x: Array, activation: str) -> Array:
    """activation(x): the feed-forward block without a gate, as GPT-2 has it.

    Args:
        x: [..., intermediate_size].
        activation: a name of ACTIVATIONS.
    Returns:
        shape and dtype of x.
    Raises:
        ValueError: an activation that is not known.
    """
    return activation_named(activation)(x)


def gate_up_act(gate_up: Array, activation: str = "silu") -> Array:
    """activation(gate) · up, the gated feed-forward unit (Shazeer 2020, "GLU Variants Improve Transformer").

    With silu it is SwiGLU, the unit of Llama; with gelu GeGLU, that of CPM-Ant.

    Args:
        gate_up: [..., 2 · intermediate_size]; gate is the first half, up the second, as one matrix product with the
            stacked weights [gate_proj; up_proj] gives them.
        activation: a name of ACTIVATIONS.
    Returns:
        [..., intermediate_size], dtype of gate_up.
    Raises:
        ValueError: an activation that is not known.

    Numerics: one rounding at the end, none between the activation and the product.
    """
    intermediate_size = gate_up.shape[-1] // 2
    gate, up = gate_up[..., :intermediate_size], gate_up[..., intermediate_size:]
    return activation_named(activation)(gate) * up
