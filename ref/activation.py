"""Activation functions of the feed-forward block."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def silu(x: Array) -> Array:
    """x · σ(x) = x / (1 + exp(−x)); shape as x.

    Numerics: exp is taken of −|x| only, which cannot overflow: for negative x, σ(x) = exp(x) / (1 + exp(x)).
    Edge cases: silu(−inf) is NaN, as −inf · 0; finite inputs give finite outputs.
    """
    small = np.exp(-np.abs(x))
    y: Array = x * np.where(x >= 0, 1, small) / (1 + small)
    return y


def gate_up_act(gate_up: Array) -> Array:
    """silu(gate) · up, the gated feed-forward unit of Llama (SwiGLU; Shazeer 2020, "GLU Variants").

    Args:
        gate_up: [..., 2 · intermediate_size]; gate is the first half, up the second, as one matrix product with the
            stacked weights [gate_proj; up_proj] gives them.
    Returns:
        [..., intermediate_size], dtype of gate_up.

    Numerics: one rounding at the end, none between silu and the product.
    """
    intermediate_size = gate_up.shape[-1] // 2
    gate, up = gate_up[..., :intermediate_size], gate_up[..., intermediate_size:]
    return silu(gate) * up
