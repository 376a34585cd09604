"""The sum of the ranks' numbers where all of them are here: cuda/sum_parts.cu. Defined by ref.collectives."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.kernels.check import ceil_div, require, require_aligned, require_contiguous, type_name, width
from engine.kernels.device import Device, Instance

Array = Any

THREADS, BLOCKS_AN_SM = 512, 2


def sum_parts(mine: Array, others: Array, rank: int, residual: Array | None = None, *, device: Device) -> Array:
    """Σ of the ranks' x in their order, plus the residual, rounded once.

    Args:
        mine: x of this rank, [num_tokens, hidden_size].
        others: those of the other ranks, [world_size − 1, num_tokens, hidden_size].
        residual: [num_tokens, hidden_size], which the answer is written over; where there is none it is new.
    """
    kernel = "sum_parts"
    require(kernel, "mine", mine, (None, None))
    require(kernel, "others", others, (None, *mine.shape), mine.dtype)
    arrays = {"mine": mine, "others": others}
    if residual is not None:
        require(kernel, "residual", residual, mine.shape, mine.dtype)
        arrays["residual"] = residual
    for name, array in arrays.items():
        require_contiguous(kernel, name, array)
        require_aligned(kernel, name, array.reshape(-1))
    y = device.empty(mine.shape, mine.dtype) if residual is None else residual
    if mine.size:
        instance = Instance(kernel, f"sum_parts<{type_name(kernel, 'mine', mine)}, {len(others) + 1}>")
        blocks = min(BLOCKS_AN_SM * device.num_sms, ceil_div(int(mine.size), THREADS * width(mine)))
        arguments = (mine, others, residual, y, np.int64(mine.size), np.int32(rank))
        device.launch(instance, (blocks,), (THREADS,), arguments)
    return y
