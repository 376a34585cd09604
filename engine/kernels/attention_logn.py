"""Log-n scaling of queries on a GPU: cuda/attention_logn.cu. Defined by ref.attention."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from engine.errors import KernelError
from engine.kernels.check import ceil_div, require, stride, type_name, width
from engine.kernels.device import Device, Instance

Array = Any

MAX_THREADS = 256


def logn_query(q: Array, positions: Array, length: int, *, device: Device) -> Array:
    """q [num_tokens, n_heads, head_dim], a part of larger rows if need be → the same, contiguous: from position length
    on times log(position + 1) / log(length). positions [num_tokens] int32."""
    kernel = "logn_query"
    require(kernel, "q", q, (None, None, None))
    num_tokens, n_heads, head_dim = q.shape
    require(kernel, "positions", positions, (num_tokens,), np.int32)
    if num_tokens and stride(q, 1) != head_dim:
        raise KernelError(f"{kernel}: heads of q lie {stride(q, 1)} elements apart; expected {head_dim}")
    if length < 2:
        raise KernelError(f"{kernel}: length is {length}; expected 2 or more tokens")
    y = device.empty(q.shape, q.dtype)
    if y.size:
        size = n_heads * head_dim
        pieces = ceil_div(size, width(q))
        threads = min(MAX_THREADS, 32 * ceil_div(pieces, 32))
        arguments = (q, positions, y, np.int32(size), stride(q), np.int32(length), np.float32(1 / math.log(length)))
        instance = Instance("attention_logn", f"logn_query<{type_name(kernel, 'q', q)}>")
        device.launch(instance, (num_tokens, ceil_div(pieces, threads)), (threads,), arguments)
    return y
