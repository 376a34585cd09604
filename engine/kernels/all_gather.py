"""Parts of rows side by side: cuda/all_gather.cu. Defined by ref.collectives.

Every rank calls the same functions in the same order, with parts of the same shape.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.errors import KernelError
from engine.kernels.channel import Exchange
from engine.kernels.check import ceil_div, require, require_contiguous, type_name, width
from engine.kernels.device import Device, Instance

Array = Any

THREADS = 512
PIECE_BYTES = 16
LEAST_CHUNK = 128  # pieces: less is not worth a flag
LEAST_STAGES = 4


def all_gather(
    x: Array, exchange: Exchange, total: int, *, takes: bool = True, num_senders: int | None = None, device: Device
) -> Array | None:
    """The ranks' x [num_rows, part] side by side in rank order: [num_rows, total], where this rank takes it.

    Args:
        total: columns; what the last parts have beyond them is padding.
        num_senders: only so many ranks, from rank 0 on, bring something; x of the others says the shape alone.
    Raises:
        KernelError: parts that do not give so many columns, or an exchange of too few stages.
    """
    require("all_gather", "x", x, (None, None))
    require_contiguous("all_gather", "x", x)
    senders = exchange.world_size if num_senders is None else num_senders
    if total > senders * x.shape[1]:
        raise KernelError(f"all_gather: {senders} parts of {x.shape[1]} columns do not give {total}")
    if exchange.slots.num_stages < LEAST_STAGES:
        raise KernelError(f"all_gather: {exchange.slots.num_stages} stages; it takes {LEAST_STAGES} or more")
    y = device.empty((x.shape[0], total), x.dtype) if takes else None
    if x.size:
        kind = type_name("all_gather", "x", x)
        num_pieces = x.shape[0] * ceil_div(x.shape[1], width(x))
        most = exchange.slots.slot_bytes // PIECE_BYTES
        blocks = min(exchange.slots.num_lanes, ceil_div(num_pieces, min(most, LEAST_CHUNK)))
        chunk = min(most, ceil_div(num_pieces, blocks))
        sizes = np.int32(x.shape[0]), np.int32(x.shape[1]), np.int32(total), np.int32(senders), np.int32(chunk)
        instance = Instance("all_gather", f"all_gather<{kind}, {exchange.world_size}>")
        device.launch(instance, (blocks,), (THREADS,), (x, y, *sizes, exchange.struct))
    return y
