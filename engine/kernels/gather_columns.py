"""x with its columns in a weight's order (act-order): cuda/gather_columns.cu."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.errors import KernelError
from engine.kernels.check import ceil_div, require, require_contiguous, stride, type_name
from engine.kernels.device import Device, Instance

Array = Any

THREADS, COLUMNS = 256, 8  # of a block; of a thread
MAX_TOKENS = 65535  # of a grid


def gather_columns(x: Array, order: Array, *, device: Device) -> Array:
    """y[:, k] = x[:, order[k]]: x [num_tokens, columns], order [width] int32 below columns → [num_tokens, width]."""
    kernel = "gather_columns"
    require(kernel, "order", order, (None,), np.int32)
    require(kernel, "x", x, (None, None))
    require_contiguous(kernel, "order", order)
    num_tokens, width = x.shape[0], order.shape[0]
    if x.itemsize != 2 or width % COLUMNS:
        raise KernelError(
            f"{kernel}: x is {x.dtype}, {width} columns of it; expected 16 bits and a multiple of 8 columns"
        )
    y = device.empty((num_tokens, width), x.dtype)
    for first in range(0, num_tokens, MAX_TOKENS):
        rows = slice(first, first + MAX_TOKENS)
        device.launch(
            Instance(kernel, f"gather_columns<{type_name(kernel, 'x', x)}>"),
            (ceil_div(width, COLUMNS * THREADS), y[rows].shape[0]),
            (THREADS,),
            [x[rows], order, y[rows], np.int32(width), stride(x)],
        )
    return y
