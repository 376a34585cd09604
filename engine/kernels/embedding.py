"""Rows of a table on a GPU: cuda/embedding.cu. Defined by ref.embedding."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.kernels.check import ceil_div, require, stride, type_name, width
from engine.kernels.device import Device, Instance

Array = Any

MAX_THREADS = 256


def embedding(token_ids: Array, table: Array, *, out: Array | None = None, device: Device) -> Array:
    """token_ids [num_tokens] int32, table [vocab_size, hidden_size] → [num_tokens, hidden_size], type of table."""
    require("embedding", "token_ids", token_ids, (None,), np.int32)
    require("embedding", "table", table, (None, None))
    shape = (token_ids.shape[0], table.shape[1])
    y = device.empty(shape, table.dtype) if out is None else out
    require("embedding", "out", y, shape, table.dtype)
    if y.size:
        instance = Instance("embedding", f"embedding<{type_name('embedding', 'table', table)}>")
        pieces = ceil_div(table.shape[1], width(table))
        threads = min(MAX_THREADS, 32 * ceil_div(pieces, 32))
        arguments = (token_ids, table, y, np.int32(table.shape[0]), np.int32(table.shape[1]), stride(table))
        device.launch(instance, (token_ids.shape[0], ceil_div(pieces, threads)), (threads,), arguments)
    return y
