"""LayerNorm on a GPU: cuda/layernorm.cu. Defined by ref.layernorm."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.kernels.check import require, require_contiguous, stride, type_name
from engine.kernels.device import Device, Instance
from engine.kernels.rmsnorm import row_shape

Array = Any


def layernorm(x: Array, weight: Array, bias: Array | None, eps: float, *, device: Device) -> Array:
    """x [num_tokens, hidden_size] by weight [hidden_size], or heads [num_tokens, n_heads, head_dim] by a weight each
    [n_heads, head_dim]; bias like weight, or None. Shape and type of x, contiguous."""
    require("layernorm", "x", x, (None,) * x.ndim)
    require("layernorm", "weight", weight, x.shape[1:], x.dtype)
    require_contiguous("layernorm", "weight", weight)
    if bias is not None:
        require("layernorm", "bias", bias, x.shape[1:], x.dtype)
        require_contiguous("layernorm", "bias", bias)
    rows = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    y = device.empty(x.shape, x.dtype)
    if x.size:
        threads, rounds = row_shape("layernorm", rows)
        instance = Instance("layernorm", f"layernorm<{type_name('layernorm', 'x', x)}, {rounds}>")
        num_weights = np.int32(weight.size // x.shape[-1])
        arguments = (rows, weight, bias, y, num_weights, np.int32(x.shape[-1]), stride(rows), np.float32(eps))
        device.launch(instance, (rows.shape[0],), (threads,), arguments)
    return y


def add_layernorm(
    x: Array, residual: Array, weight: Array, bias: Array | None, eps: float, *, device: Device
) -> tuple[Array, Array]:
    """(normed, x + residual) of [num_tokens, hidden_size]; the new residual is written over the old one."""
    require("add_layernorm", "x", x, (None, None))
    require("add_layernorm", "residual", residual, x.shape, x.dtype)
    require("add_layernorm", "weight", weight, (x.shape[1],), x.dtype)
    if bias is not None:
        require("add_layernorm", "bias", bias, (x.shape[1],), x.dtype)
    y = device.empty(x.shape, x.dtype)
    if x.size:
        threads, rounds = row_shape("add_layernorm", x)
        instance = Instance("layernorm", f"add_layernorm<{type_name('add_layernorm', 'x', x)}, {rounds}>")
        arguments = (x, residual, weight, bias, y, residual, np.int32(x.shape[1]))
        strides = (stride(x), stride(residual), stride(residual))
        device.launch(instance, (x.shape[0],), (threads,), (*arguments, *strides, np.float32(eps)))
    return y, residual
