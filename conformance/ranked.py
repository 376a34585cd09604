"""Several ranks in one process, for cases of kernels that wait for each other.

A candidate writes what each rank does as a function without arguments and has them run `together`: on a GPU on a stream
each, on the host shim on a thread each. The memory between them is what a channel of real ranks is made of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from engine.kernels.channel import (
    STATE_WORDS,
    Report,
    Slots,
    alarm_words,
    make_channel,
    make_exchange,
    make_islands,
    reports,
    slots_bytes,
)
from engine.kernels.device import Device
from engine.ops import OpTable

Array = Any
Rank = Callable[[], Any]

PATHS = ("window", "peer")  # one inbox of the host for all; one of each GPU
PATIENCE_S = 20.0


@dataclass(frozen=True, slots=True)
class RankedOps(OpTable):
    """An op table with what several ranks need."""

    device: Device
    together: Callable[[Sequence[Rank]], list[Any]]
    window: Callable[[int], Array]  # so many bytes of the host that the device sees too, zeros


def with_ranks(
    ops: OpTable,
    device: Device,
    together: Callable[[Sequence[Rank]], list[Any]],
    window: Callable[[int], Array],
) -> RankedOps:
    return RankedOps(
        **{field.name: getattr(ops, field.name) for field in fields(OpTable)},
        device=device,
        together=together,
        window=window,
    )


def one_after_another(ranks: Sequence[Rank]) -> list[Any]:
    """Where no kernel runs, none waits."""
    return [rank() for rank in ranks]


@dataclass(frozen=True, slots=True)
class Group:
    """A Channel or Exchange of each rank, and their alarm."""

    channels: list[Any]
    alarm: Array

    def reports(self) -> list[Report]:
        return reports(np.frombuffer(self.alarm.tobytes(), np.uint32))


def make_group(
    ops: RankedOps,
    world_size: int,
    path: str,
    num_bytes: int,
    last_number: int = 0,
    patience_s: float | None = None,
    max_blocks: int = 64,
) -> Group:
    """Channels for arrays of so many bytes; path: one of PATHS. last_number: the number that they have come to."""
    size = slots_bytes(world_size, num_bytes)
    shared = ops.window(size) if path == "window" else None
    inboxes = [zeros(ops.device, size, np.uint8) if shared is None else shared for _ in range(world_size)]
    alarm = ops.window(4 * alarm_words(world_size)).view(np.uint32)
    channels = []
    for rank, inbox in enumerate(inboxes):
        state = zeros(ops.device, STATE_WORDS, np.uint32)
        state[0], state[1] = last_number << 16 & 0xFFFFFFFF, last_number >> 16  # the count, see channel.cuh
        others = [other for peer, other in enumerate(inboxes) if peer != rank] if shared is None else [inbox]
        memory = {"outboxes": others, "inbox": inbox, "state": state, "alarm": alarm}
        channels.append(
            make_channel(rank, world_size, **memory, patience_s=patience_s or PATIENCE_S, max_blocks=max_blocks)
        )
    return Group(channels, alarm)


def make_exchanges(
    ops: RankedOps,
    world_size: int,
    path: str,
    slots: Slots,
    patience_s: float | None = None,
    has_owners: bool = True,
) -> Group:
    """As make_group, for messages in pieces."""
    is_window = path == "window"
    size = slots.inbox_bytes(world_size, is_window, has_owners)
    if is_window:
        whole = ops.window(world_size * size)
        inboxes = [whole[rank * size : (rank + 1) * size] for rank in range(world_size)]
    else:
        inboxes = [zeros(ops.device, size, np.uint8) for _ in range(world_size)]
    alarm = ops.window(4 * alarm_words(world_size)).view(np.uint32)
    shared = {"inboxes": inboxes, "is_window": is_window, "alarm": alarm, "slots": slots}
    exchanges = [
        make_exchange(
            rank,
            world_size,
            **shared,
            state=zeros(ops.device, STATE_WORDS, np.uint32),
            patience_s=patience_s or PATIENCE_S,
            has_owners=has_owners,
        )
        for rank in range(world_size)
    ]
    return Group(exchanges, alarm)


def make_island_exchanges(
    ops: RankedOps, world_size: int, island_size: int, slots: Slots, patience_s: float | None = None
) -> Group:
    """As make_exchanges, for islands: each rank is given the inboxes of its own alone."""
    inbox_bytes, window_bytes = slots.island_bytes(island_size)
    inboxes = [zeros(ops.device, inbox_bytes, np.uint8) for _ in range(world_size)]
    whole = ops.window(world_size * window_bytes)
    windows = [whole[rank * window_bytes : (rank + 1) * window_bytes] for rank in range(world_size)]
    alarm = ops.window(4 * alarm_words(world_size)).view(np.uint32)
    exchanges = [
        make_islands(
            rank,
            world_size,
            inboxes=inboxes[rank // island_size * island_size :][:island_size],
            windows=windows,
            state=zeros(ops.device, STATE_WORDS, np.uint32),
            alarm=alarm,
            slots=slots,
            patience_s=patience_s or PATIENCE_S,
        )
        for rank in range(world_size)
    ]
    return Group(exchanges, alarm)


def zeros(device: Device, size: int, dtype: Any) -> Array:
    array = device.empty((size,), dtype)
    array[...] = 0
    return array
