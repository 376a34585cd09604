"""All-reduce between two ranks, in chunks: cuda/all_reduce_pair.cu; as int8 in packets: cuda/int8_all_reduce_pair.cu.
Defined by ref.collectives and ref.int8_all_reduce.

Both ranks call the same functions in the same order, with arrays of the same shapes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.errors import KernelError
from engine.kernels.carried import Carried, carried_arguments
from engine.kernels.channel import Channel, Exchange
from engine.kernels.check import ceil_div, literal, type_name, width
from engine.kernels.device import Device, Instance
from engine.kernels.partials import require_groups, require_partial

Array = Any

MAX_WARPS = 16  # of a block
ROUNDS, LANES = 4, 32  # of a bundle in a chunk
BUNDLE_BYTES, INT8_BUNDLE_BYTES = 2048, 2176  # of a warp in a slot
CHUNKS = 4  # of a block
PACKET_NUMBERS, BUNDLE_PACKETS = 1024, 96  # of a bundle in packets


def all_reduce_pair(x: Array, exchange: Exchange, residual: Array | None = None, *, device: Device) -> Array:
    """The sum of both ranks' x [num_tokens, hidden_size], plus residual of the same shape and type, rounded once; the
    answer is written over the residual; on both ranks the same bits.

    Raises:
        KernelError: there are more ranks.
    """
    name = "all_reduce_pair"
    _check(name, x, residual, exchange.world_size)
    kind = type_name(name, "x", x)
    bundle = ROUNDS * LANES * width(x), BUNDLE_BYTES
    return _launch(name, f"{kind}, kPlain", x, exchange, residual, None, bundle, device)


def int8_all_reduce_pair(
    x: Array,
    exchange: Exchange,
    residual: Array | None = None,
    carried: Carried | None = None,
    *,
    rotate: bool = True,
    device: Device,
) -> Array:
    """ref.int8_all_reduce of both ranks' x [num_tokens, hidden_size], plus residual, rounded once, written over the
    residual; with what is carried ref.int8_feedback.

    Raises:
        KernelError: there are more ranks; x is float32, or its rows are no whole groups.
    """
    name = "int8_all_reduce_pair"
    _check(name, x, residual, exchange.world_size)
    require_groups(name, x)
    arguments = f"{type_name(name, 'x', x)}, {'kRotated' if rotate else 'kInt8'}"
    return _launch(name, arguments, x, exchange, residual, carried, (ROUNDS * LANES * 16, INT8_BUNDLE_BYTES), device)


def int8_packets(
    x: Array,
    channel: Channel,
    residual: Array | None = None,
    carried: Carried | None = None,
    *,
    rotate: bool = True,
    device: Device,
) -> Array:
    """The same through a channel, for small arrays, to the bit.

    Raises:
        KernelError: the same; x that is longer than a slot of the channel.
    """
    name = "int8_all_reduce_pair"
    _check(name, x, residual, channel.world_size)
    require_groups(name, x)
    bundles = ceil_div(int(x.size), PACKET_NUMBERS)
    if bundles * BUNDLE_PACKETS > channel.capacity:
        raise KernelError(f"{name}: {x.nbytes} bytes do not fit in {channel.capacity} packets")
    y = device.empty(x.shape, x.dtype) if residual is None else residual
    if x.size:
        blocks = min(channel.max_blocks, ceil_div(bundles, 2))
        threads = 32 * min(MAX_WARPS, ceil_div(bundles, blocks))
        entry = f"{name}<{type_name(name, 'x', x)}, {literal(rotate)}>"
        arguments = (x, residual, y, np.int32(x.size), *carried_arguments(name, x, carried), channel.struct)
        device.launch(Instance(name, entry), (blocks,), (threads,), arguments)
    return y


def most_packet_bytes(channel: Channel) -> int:
    """Of an array of 16-bit numbers that int8_packets takes."""
    return channel.capacity // BUNDLE_PACKETS * PACKET_NUMBERS * 2


def _launch(
    name: str,
    types: str,
    x: Array,
    exchange: Exchange,
    residual: Array | None,
    carried: Carried | None,
    bundle: tuple[int, int],
    device: Device,
) -> Array:
    """bundle: its numbers, and its bytes in a slot."""
    y = device.empty(x.shape, x.dtype) if residual is None else residual
    if x.size:
        blocks, warps = grid(ceil_div(int(x.size), bundle[0]), bundle[1], exchange)
        instance = Instance("all_reduce_pair", f"all_reduce_pair<{types}>")
        arguments = (x, residual, y, np.int32(x.size), *carried_arguments(name, x, carried), exchange.struct)
        device.launch(instance, (blocks,), (32 * warps,), arguments)
    return y


def grid(bundles: int, bundle_bytes: int, exchange: Exchange) -> tuple[int, int]:
    """(blocks, warps of each) for so many bundles: blocks come first, as each waits by itself; then chunks of a block,
    so that one goes out while another comes in; then warps."""
    most = min(MAX_WARPS, exchange.slots.slot_bytes // bundle_bytes)
    blocks = min(exchange.slots.num_lanes, bundles)
    return blocks, min(most, ceil_div(bundles, blocks * CHUNKS))


def _check(name: str, x: Array, residual: Array | None, world_size: int) -> None:
    if world_size != 2:
        raise KernelError(f"{name}: {world_size} ranks; it is for two")
    require_partial(name, x, residual)
