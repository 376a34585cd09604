"""All-reduce over islands of GPUs: cuda/all_reduce_islands.cu. Defined by ref.collectives.

Every rank calls the same function in the same order, with arrays of the same shapes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.errors import KernelError
from engine.kernels.all_reduce_pieces import THREADS, chunks
from engine.kernels.channel import Exchange
from engine.kernels.check import ceil_div, type_name, width
from engine.kernels.device import Device, Instance
from engine.kernels.partials import require_partial

Array = Any

LEAST_STAGES = 3


def all_reduce_islands(x: Array, exchange: Exchange, residual: Array | None = None, *, device: Device) -> Array:
    """The sum of the ranks' x [num_tokens, hidden_size] in their order, rounded; plus residual of the same shape and
    type, rounded, which the answer is then written over; on every rank the same bits, those of all_reduce_pieces.

    Raises:
        KernelError: an exchange that make_islands has not made, or one of too few stages.
    """
    name = "all_reduce_islands"
    if not exchange.island_size or exchange.slots.num_stages < LEAST_STAGES:
        stages = exchange.slots.num_stages
        raise KernelError(f"{name}: islands of {exchange.island_size} with {stages} stages; it needs {LEAST_STAGES}")
    require_partial(name, x, residual)
    y = device.empty(x.shape, x.dtype) if residual is None else residual
    if x.size:
        pieces = ceil_div(int(x.size), width(x))
        chunk, blocks = chunks(ceil_div(pieces, exchange.island_size), 1, 4 * width(x), exchange)
        instance = Instance(name, f"{name}<{type_name(name, 'x', x)}, {exchange.island_size}>")
        arguments = (x, residual, y, np.int32(x.size), np.int32(chunk), exchange.struct)
        device.launch(instance, (blocks,), (THREADS,), arguments)
    return y
