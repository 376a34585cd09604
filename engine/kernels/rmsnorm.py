"""RMSNorm on a GPU: cuda/rmsnorm.cu. Defined by ref.rmsnorm."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.errors import KernelError
from engine.kernels.check import ceil_div, require, require_contiguous, stride, type_name, width
from engine.kernels.device import Device, Instance

Array = Any

MAX_THREADS = 512
MAX_ROUNDS = 8


def row_shape(kernel: str, x: Array) -> tuple[int, int]:
    """Threads of a block and rounds of a thread, so that they cover a row of x [num_rows, size] by 16 bytes each.

    Raises:
        KernelError: the row is longer than the largest block covers.
    """
    pieces = ceil_div(x.shape[-1], width(x))
    rounds = ceil_div(pieces, MAX_THREADS)
    if rounds > MAX_ROUNDS:
        raise KernelError(
            f"{kernel}: rows of {x.shape[-1]}; at most {MAX_THREADS * MAX_ROUNDS * width(x)} are possible"
        )
    return 32 * ceil_div(ceil_div(pieces, rounds), 32), rounds


def rmsnorm(x: Array, weight: Array, eps: float, *, device: Device) -> Array:
    """x [num_tokens, hidden_size], weight [hidden_size] → [num_tokens, hidden_size], all of one type."""
    require("rmsnorm", "x", x, (None, None))
    require("rmsnorm", "weight", weight, (x.shape[1],), x.dtype)
    y = device.empty(x.shape, x.dtype)
    if x.size:
        threads, rounds = row_shape("rmsnorm", x)
        instance = Instance("rmsnorm", f"rmsnorm<{type_name('rmsnorm', 'x', x)}, {rounds}>")
        arguments = (x, weight, y, np.int32(x.shape[1]), stride(x), np.float32(eps))
        device.launch(instance, (x.shape[0],), (threads,), arguments)
    return y


def add_rmsnorm(x: Array, residual: Array, weight: Array, eps: float, *, device: Device) -> tuple[Array, Array]:
    """(normed, x + residual), as rmsnorm; the new residual is written over the old one."""
    require("add_rmsnorm", "x", x, (None, None))
    require("add_rmsnorm", "residual", residual, x.shape, x.dtype)
    require("add_rmsnorm", "weight", weight, (x.shape[1],), x.dtype)
    require_contiguous("add_rmsnorm", "weight", weight)
    y = device.empty(x.shape, x.dtype)
    if x.size:
        threads, rounds = row_shape("add_rmsnorm", x)
        instance = Instance("rmsnorm", f"add_rmsnorm<{type_name('add_rmsnorm', 'x', x)}, {rounds}>")
        arguments = (x, residual, weight, y, residual, np.int32(x.shape[1]))
        strides = (stride(x), stride(residual), stride(residual))
        device.launch(instance, (x.shape[0],), (threads,), (*arguments, *strides, np.float32(eps)))
    return y, residual
