"""RMSNorm fused with the residual add, on a CPU. Checked against ref.rmsnorm by conformance."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.weights import LinearWeight

Float32 = NDArray[np.float32]


def rmsnorm(x: Float32, weight: Float32, eps: float, order: NDArray[Any] | None = None) -> Float32:
    """x / sqrt(mean(x²) + eps) · weight over the last axis, in an order if any, [num_tokens, hidden_size] float32."""
    mean_square = np.einsum("th,th->t", x, x) / np.float32(x.shape[1])
    out: Float32 = x * (1.0 / np.sqrt(mean_square + np.float32(eps)))[:, None]
    out *= weight
    return out if order is None else out[:, order]


def add_rmsnorm(
    x: Float32, residual: Float32, weight: Float32, eps: float, order: NDArray[Any] | None = None
) -> tuple[Float32, Float32]:
    """(rmsnorm(x + residual), x + residual); the sum is written over residual."""
    residual += x
    return rmsnorm(residual, weight, eps, order), residual


def norm_quant(x: Float32, weight: Float32, eps: float, into: LinearWeight) -> Float32:
    """rmsnorm: on a CPU every layer takes numbers."""
    return rmsnorm(x, weight, eps)


def add_norm_quant(
    x: Float32, residual: Float32, weight: Float32, eps: float, into: LinearWeight
) -> tuple[Float32, Float32]:
    """add_rmsnorm, likewise."""
    return add_rmsnorm(x, residual, weight, eps)
