"""Rows of a table on a GPU: cuda/embedding.cu. Defined by ref.embedding."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.kernels.check import ceil_div, require, stride, type_name, width
from engine.kernels.device import Device, Dims, Instance

Array = Any

MAX_THREADS = 256


def embedding(
    token_ids: Array, table: Array, first: int | None = None, *, out: Array | None = None, device: Device
) -> Array:
    """token_ids [num_tokens] int32, table [vocab_size, hidden_size] → [num_tokens, hidden_size], type of table."""
    require("embedding", "token_ids", token_ids, (None,), np.int32)
    require("embedding", "table", table, (None, None))
    shape = (token_ids.shape[0], table.shape[1])
    y = device.empty(shape, table.dtype) if out is None else out
    require("embedding", "out", y, shape, table.dtype)
    if y.size:
        instance = Instance("embedding", f"embedding<{type_name('embedding', 'table', table)}>")
        arguments = (token_ids, table, y, np.int32(table.shape[0]), np.int32(table.shape[1]), stride(table))
        device.launch(instance, *_grid(table, token_ids.shape[0]), [*arguments, *_first(first)])
    return y


def position_embedding(
    token_ids: Array,
    positions: Array,
    table: Array,
    position_table: Array,
    first: int | None = None,
    *,
    device: Device,
) -> Array:
    """The same with the row of position_table [num_positions, hidden_size] at positions [num_tokens] int32 added."""
    kernel = "position_embedding"
    require(kernel, "token_ids", token_ids, (None,), np.int32)
    require(kernel, "positions", positions, token_ids.shape, np.int32)
    require(kernel, "table", table, (None, None))
    require(kernel, "position_table", position_table, (None, table.shape[1]), table.dtype)
    y = device.empty((token_ids.shape[0], table.shape[1]), table.dtype)
    if y.size:
        instance = Instance("embedding", f"position_embedding<{type_name(kernel, 'table', table)}>")
        arguments = [token_ids, positions, table, position_table, y]
        arguments += map(np.int32, (table.shape[0], position_table.shape[0], table.shape[1]))
        grid, block = _grid(table, token_ids.shape[0])
        device.launch(instance, grid, block, [*arguments, stride(table), stride(position_table), *_first(first)])
    return y


def _first(first: int | None) -> tuple[np.int32, np.float32]:
    """The id of the table's first row, and what the row of an id outside is filled with."""
    return (np.int32(0), np.float32(np.nan)) if first is None else (np.int32(first), np.float32(0))


def _grid(table: Array, num_tokens: int) -> tuple[Dims, Dims]:
    """Blocks and threads, of 16 bytes each."""
    pieces = ceil_div(table.shape[1], width(table))
    threads = min(MAX_THREADS, 32 * ceil_div(pieces, 32))
    return (num_tokens, ceil_div(pieces, threads)), (threads,)
