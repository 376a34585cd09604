"""All-reduce as int8 in two trips of packets: cuda/int8_all_reduce.cu. Defined by ref.int8_all_reduce.

Every rank calls the same function in the same order, with arrays of the same shapes. Its answer is that of
all_reduce_pieces.int8_all_reduce, to the bit; that one is for messages that fit in no slot.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.errors import KernelError
from engine.kernels.carried import Carried, carried_arguments
from engine.kernels.channel import Channel
from engine.kernels.check import ceil_div, literal, require_half, type_name
from engine.kernels.device import Device, Instance
from engine.kernels.partials import GROUP, require_partial

Array = Any

BUNDLE, BUNDLE_PACKETS = 24, 72  # groups that a warp has at once, and what they travel in
MAX_THREADS = 512


def int8_all_reduce(
    x: Array,
    channel: Channel,
    residual: Array | None = None,
    carried: Carried | None = None,
    *,
    rotate: bool = True,
    device: Device,
) -> Array:
    """ref.int8_all_reduce of the ranks' x [num_tokens, hidden_size], plus residual, rounded once; with what is carried
    ref.int8_feedback. The answer is written over the residual.

    Raises:
        KernelError: x is float32, or can_send says no.
    """
    name = "int8_all_reduce"
    require_partial(name, x, residual)
    require_half(name, "x", x)
    if not can_send(x, channel):
        raise KernelError(
            f"{name}: {list(x.shape)} of {channel.world_size} ranks; rows must be whole groups of {GROUP}, with one "
            f"for each rank, and fit in {channel.capacity} packets"
        )
    y = device.empty(x.shape, x.dtype) if residual is None else residual
    bundles = num_bundles(int(x.size), channel.world_size)
    blocks = min(channel.max_blocks, ceil_div(bundles, 2))
    threads = 32 * min(MAX_THREADS // 32, ceil_div(bundles, blocks))
    entry = f"{name}<{type_name(name, 'x', x)}, {channel.world_size}, {literal(rotate)}>"
    arguments = (x, residual, y, np.int32(x.size), *carried_arguments(name, x, carried), channel.struct)
    device.launch(Instance(name, entry), (blocks,), (threads,), arguments)
    return y


def can_send(x: Array, channel: Channel) -> bool:
    """Whether x may be summed so."""
    packets = (channel.world_size + 1) * num_bundles(int(x.size), channel.world_size) * BUNDLE_PACKETS
    return x.shape[1] % GROUP == 0 and x.size // GROUP >= channel.world_size and packets <= channel.capacity


def num_bundles(size: int, world_size: int) -> int:
    """Of the longest slice."""
    return ceil_div(ceil_div(size // GROUP, world_size), BUNDLE)
