"""LayerNorm, alone and fused with the residual add, on a CPU. Checked against ref.layernorm by conformance."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]


def layernorm(x: Float32, weight: Float32, bias: Float32 | None, eps: float) -> Float32:
    """(x − mean) / sqrt(var + eps) · weight + bias over the last axis, shape as x, float32.

    x is [num_tokens, hidden_size] with weight and bias [hidden_size], or heads [num_tokens, n_heads, head_dim] with
    weight [n_heads, head_dim].
    """
    out: Float32 = x - x.mean(axis=-1, keepdims=True)
    variance = np.einsum("...h,...h->...", out, out) / np.float32(x.shape[-1])
    out *= (1.0 / np.sqrt(variance + np.float32(eps)))[..., None]
    out *= weight
    if bias is not None:
        out += bias
    return out


def add_layernorm(
    x: Float32, residual: Float32, weight: Float32, bias: Float32 | None, eps: float
) -> tuple[Float32, Float32]:
    """(layernorm(x + residual), x + residual); the sum is written over residual."""
    residual += x
    return layernorm(residual, weight, bias, eps), residual
