"""RMSNorm fused with the residual add, on a CPU. Checked against ref.rmsnorm by conformance."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.weights import LinearWeight

Float32 = NDArray[np.float32]


def rmsnorm(x: Float32, weight: Float32, eps: float) -> Float32:
    """x / sqrt(mean(x²) + eps) · weight over the last axis, [num_tokens, hidden_size] float32."""
    mean_square = np.einsum("th,th->t", x, x) / np.float32(x.shape[1])
    out: Float32 = x * (1.0 / np.sqrt(mean_square + np.float32(eps)))[:, None]
    out *= weight
    return out


def rmsnorm_ordered(x: Float32, weight: Float32, eps: float, order: NDArray[Any]) -> Float32:
    """rmsnorm, whose element order[k] stands at place k."""
    return rmsnorm(x, weight, eps)[:, order]


def add_rmsnorm(x: Float32, residual: Float32, weight: Float32, eps: float) -> tuple[Float32, Float32]:
    """(rmsnorm(x + residual), x + residual); the sum is written over residual."""
    residual += x
    return rmsnorm(residual, weight, eps), residual


def add_rmsnorm_ordered(
    x: Float32, residual: Float32, weight: Float32, eps: float, order: NDArray[Any]
) -> tuple[Float32, Float32]:
    """The same of rmsnorm_ordered."""
    normed, residual = add_rmsnorm(x, residual, weight, eps)
    return normed[:, order], residual


def norm_quant(x: Float32, weight: Float32, eps: float, into: LinearWeight) -> Float32:
    """rmsnorm: on a CPU every layer takes numbers."""
    return rmsnorm(x, weight, eps)


def add_norm_quant(
    x: Float32, residual: Float32, weight: Float32, eps: float, into: LinearWeight
) -> tuple[Float32, Float32]:
    """add_rmsnorm, likewise."""
    return add_rmsnorm(x, residual, weight, eps)
