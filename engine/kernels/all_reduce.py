"""All-reduce in one trip: cuda/all_reduce.cu. Defined by ref.collectives and ref.rmsnorm.

Every rank calls the same functions in the same order, with arrays of the same shapes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.errors import KernelError
from engine.kernels.channel import Channel, packets
from engine.kernels.check import ceil_div, require, type_name, width
from engine.kernels.device import Device, Instance
from engine.kernels.partials import require_partial

Array = Any

MAX_THREADS = 512
MAX_ROUNDS = 2  # of a thread, in a row that is normed


def all_reduce(x: Array, channel: Channel, residual: Array | None = None, *, device: Device) -> Array:
    """The sum of the ranks' x [num_tokens, hidden_size] in their order, plus residual of the same shape and type, which
    the answer is then written over; on every rank the same bits.

    Raises:
        KernelError: x that is longer than a slot of the channel.
    """
    kind = _check("all_reduce", x, residual, channel)
    y = device.empty(x.shape, x.dtype) if residual is None else residual
    if x.size:
        threads, blocks = shape(packets(int(x.nbytes)), channel)
        instance = Instance("all_reduce", f"all_reduce<{kind}, {channel.world_size}>")
        arguments = (x, residual, y, np.int32(x.size), channel.struct)
        device.launch(instance, (blocks,), (threads,), arguments)
    return y


def can_fuse(x: Array) -> bool:
    """Whether all_reduce_add_rmsnorm takes rows like those of x."""
    return bool(x.shape[1] % width(x) == 0 and x.shape[1] <= MAX_ROUNDS * MAX_THREADS * width(x))


def all_reduce_add_rmsnorm(
    x: Array, residual: Array, weight: Array, eps: float, channel: Channel, *, device: Device
) -> tuple[Array, Array]:
    """(normed, sum + residual): all_reduce with the residual, and its rmsnorm; the sum is written over the residual.

    Raises:
        KernelError: as all_reduce; rows that can_fuse does not take.
    """
    name = "all_reduce_add_rmsnorm"
    kind = _check(name, x, residual, channel, whole_rows=True)
    require(name, "weight", weight, (x.shape[1],), x.dtype)
    if not can_fuse(x):
        raise KernelError(f"{name}: rows of {x.shape[1]}; see can_fuse")
    y = device.empty(x.shape, x.dtype)
    if x.size:
        pieces = x.shape[1] // width(x)
        rounds = ceil_div(pieces, MAX_THREADS)
        threads = 32 * ceil_div(ceil_div(pieces, rounds), 32)
        blocks = min(x.shape[0], channel.max_blocks)
        instance = Instance("all_reduce", f"{name}<{kind}, {channel.world_size}, {rounds}>")
        sizes = np.int32(x.shape[0]), np.int32(x.shape[1]), np.float32(eps)
        device.launch(instance, (blocks,), (threads,), (x, residual, weight, y, residual, *sizes, channel.struct))
    return y, residual


def shape(num_packets: int, channel: Channel) -> tuple[int, int]:
    """(threads of a block, blocks) for so many packets: few of them are spread over many small blocks, as each waits
    for a link's answer only once."""
    blocks = min(channel.max_blocks, ceil_div(num_packets, 128))
    most = MAX_THREADS if channel.world_size <= 4 else MAX_THREADS // 2
    threads = min(most, 32 * ceil_div(ceil_div(num_packets, blocks), 32))
    return threads, blocks


def _check(kernel: str, x: Array, residual: Array | None, channel: Channel, whole_rows: bool = False) -> str:
    require_partial(kernel, x, residual)
    needed = x.shape[0] * packets(x.shape[1] * int(x.itemsize)) if whole_rows else packets(int(x.nbytes))
    if needed > channel.capacity:
        raise KernelError(f"{kernel}: {x.nbytes} bytes are {needed} packets; the channel takes {channel.capacity}")
    return type_name(kernel, "x", x)
