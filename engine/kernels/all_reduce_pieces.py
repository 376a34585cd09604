"""All-reduce in two trips and many pieces: cuda/all_reduce_pieces.cu. Defined by ref.collectives and
ref.int8_all_reduce.

Every rank calls the same functions in the same order, with arrays of the same shapes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.kernels.carried import Carried, carried_arguments
from engine.kernels.channel import Exchange
from engine.kernels.check import ceil_div, type_name, width
from engine.kernels.device import Device, Instance
from engine.kernels.partials import GROUP, GROUP_BYTES, require_groups, require_partial

Array = Any

THREADS = 512
LEAST_CHUNK = 128  # pieces of 16 bytes: less is not worth a flag
CHUNKS = 4  # of a block, so that one is on its way out while another comes in


def all_reduce_pieces(x: Array, exchange: Exchange, residual: Array | None = None, *, device: Device) -> Array:
    """The sum of the ranks' x [num_tokens, hidden_size] in their order, rounded; plus residual of the same shape and
    type, rounded, which the answer is then written over; on every rank the same bits."""
    require_partial("all_reduce_pieces", x, residual)
    kind = type_name("all_reduce_pieces", "x", x)
    return _launch(f"{kind}, {exchange.world_size}, kPlain", x, exchange, residual, None, (width(x), 16), device)


def int8_all_reduce(
    x: Array,
    exchange: Exchange,
    residual: Array | None = None,
    carried: Carried | None = None,
    *,
    rotate: bool = True,
    device: Device,
) -> Array:
    """ref.int8_all_reduce of the ranks' x [num_tokens, hidden_size], plus residual, rounded once; with what is carried
    ref.int8_feedback.

    Raises:
        KernelError: x is float32, or its rows are no whole groups.
    """
    require_partial("int8_all_reduce", x, residual)
    require_groups("int8_all_reduce", x)
    kind = type_name("int8_all_reduce", "x", x)
    wire = "kRotated" if rotate else "kInt8"
    unit = GROUP, GROUP_BYTES
    return _launch(f"{kind}, {exchange.world_size}, {wire}", x, exchange, residual, carried, unit, device)


def _launch(
    types: str,
    x: Array,
    exchange: Exchange,
    residual: Array | None,
    carried: Carried | None,
    unit: tuple[int, int],
    device: Device,
) -> Array:
    """unit: its numbers, and its bytes on the way."""
    y = device.empty(x.shape, x.dtype) if residual is None else residual
    if x.size:
        slice_units = ceil_div(ceil_div(int(x.size), unit[0]), exchange.world_size)
        chunk, blocks = chunks(slice_units, ceil_div(unit[0], width(x)), unit[1], exchange)
        sizes = np.int32(x.size), np.int32(chunk)
        instance = Instance("all_reduce_pieces", f"all_reduce_pieces<{types}>")
        owed = carried_arguments("all_reduce_pieces", x, carried)
        device.launch(instance, (blocks,), (THREADS,), (x, residual, y, *sizes, *owed, exchange.struct))
    return y


def chunks(slice_units: int, unit_pieces: int, unit_bytes: int, exchange: Exchange) -> tuple[int, int]:
    """(units of a chunk, blocks), for slices of so many units.

    Blocks come first, as a link is full only when many read; then chunks of a block, then their size.
    """
    slots = exchange.slots
    most = slots.slot_bytes // unit_bytes // 8 * 8
    least = min(most, max(LEAST_CHUNK // unit_pieces, 8))
    blocks = min(slots.num_lanes, ceil_div(slice_units, least))
    chunk = min(most, max(least, 8 * ceil_div(ceil_div(slice_units, blocks * CHUNKS), 8)))
    return chunk, blocks
