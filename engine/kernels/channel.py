"""A rank's end of a channel: the memory through which ranks add up while their kernels run (cuda/include/channel.cuh).

Who makes that memory is no matter here: a window of the host that every GPU has mapped (one inbox, which is
everybody's only outbox), or an inbox of each GPU that the others write to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import KernelError

Array = Any

MAX_RANKS = 8  # as in channel.cuh, and so are these
PACKET_BYTES = 16
NUM_SETS = 2
ALARM_WORDS = 4
STATE_WORDS = 4

STRUCT = np.dtype(
    [
        ("outboxes", np.uint64, MAX_RANKS),
        ("inbox", np.uint64),
        ("state", np.uint64),
        ("alarm", np.uint64),
        ("capacity", np.int64),
        ("patience", np.uint64),
        ("num_outboxes", np.int32),
        ("rank", np.int32),
        ("world_size", np.int32),
        ("id", np.int32),
    ],
    align=True,
)


@dataclass(frozen=True, slots=True)
class Channel:
    """One stream's way to the other ranks. All calls that use it come in one order, the same on all ranks.

    struct: what kernels get. memory: what must live as long. max_blocks: of a kernel that waits; all that may wait at
    the same time fit on the GPU together.
    """

    rank: int
    world_size: int
    capacity: int  # packets of a slot
    max_blocks: int
    struct: np.void
    state: Array  # see make_channel
    memory: tuple[Array, ...]

    @property
    def most_bytes(self) -> int:
        """Of an array."""
        return self.capacity * 12


@dataclass(frozen=True, slots=True)
class Report:
    """A rank whose kernel waits for another, or gave up."""

    rank: int
    peer: int
    channel: int
    number: int  # of the collective, on that channel
    milliseconds: int  # for so long


def make_channel(
    rank: int,
    world_size: int,
    *,
    outboxes: Sequence[Array],
    inbox: Array,
    state: Array,
    alarm: Array,
    number: int = 0,
    patience_s: float = 10.0,
    max_blocks: int = 64,
) -> Channel:
    """A channel over memory that is there, all of it zeros at first.

    Args:
        outboxes: where this rank's words go; of the size of inbox.
        inbox: [num_bytes] uint8, slots_bytes long.
        state: [STATE_WORDS] uint32 of the device, this rank's own.
        alarm: [alarm_words(world_size)] uint32, one for all ranks; see reports and last_wait.
        number: of the channel, for reports.
    Raises:
        KernelError: more ranks than kernels know.
    """
    if not 2 <= world_size <= MAX_RANKS or not 1 <= len(outboxes) <= MAX_RANKS:
        raise KernelError(f"{world_size} ranks with {len(outboxes)} outboxes each; kernels add up 2 to {MAX_RANKS}")
    struct: np.void = np.zeros(1, STRUCT)[0]
    struct["outboxes"][: len(outboxes)] = [address(outbox) for outbox in outboxes]
    struct["inbox"], struct["state"], struct["alarm"] = address(inbox), address(state), address(alarm)
    capacity = int(inbox.nbytes) // (NUM_SETS * world_size * PACKET_BYTES)
    struct["capacity"], struct["patience"] = capacity, int(patience_s * 1e9)
    struct["num_outboxes"], struct["rank"], struct["world_size"] = len(outboxes), rank, world_size
    struct["id"] = number
    return Channel(rank, world_size, capacity, max_blocks, struct, state, (*outboxes, inbox, alarm))


def slots_bytes(world_size: int, num_bytes: int) -> int:
    """Of an inbox through which arrays of so many bytes go."""
    return NUM_SETS * world_size * PACKET_BYTES * packets(num_bytes)


def packets(num_bytes: int) -> int:
    """Of an array: 12 bytes each."""
    return -(-num_bytes // 12)


def alarm_words(world_size: int) -> int:
    return ALARM_WORDS * (1 + 2 * world_size)


def reports(alarm: NDArray[np.uint32]) -> list[Report]:
    """What ranks that gave up have left in an alarm; none where all is well."""
    return [report for report in _rows(alarm, 0) if report is not None]


def last_wait(alarm: NDArray[np.uint32], rank: int) -> Report | None:
    """Whom the kernels of a rank were waiting for when they last said so, which they do again and again; None: they
    have never waited for long."""
    return _rows(alarm, 1)[rank]


def _rows(alarm: NDArray[np.uint32], half: int) -> list[Report | None]:
    """Of every rank: those who gave up; or who waits."""
    rows = alarm.reshape(-1, ALARM_WORDS)[1:].tolist()
    num_ranks = len(rows) // 2
    of_half = rows[half * num_ranks :][:num_ranks]
    return [
        Report(rank, peer - 1, channel, number, milliseconds) if peer else None
        for rank, (peer, channel, number, milliseconds) in enumerate(of_half)
    ]


def address(array: Array) -> int:
    """Of the first element."""
    host = getattr(array, "__array_interface__", None)  # of a NumPy array
    return int(array.data.ptr if host is None else host["data"][0])


EXCHANGE = np.dtype(
    [
        ("scatter_to", np.uint64, MAX_RANKS),
        ("scatter_from", np.uint64, MAX_RANKS),
        ("gather_to", np.uint64, MAX_RANKS),
        ("gather_from", np.uint64, MAX_RANKS),
        ("state", np.uint64),
        ("alarm", np.uint64),
        ("patience", np.uint64),
        ("slot_bytes", np.int32),
        ("num_stages", np.int32),
        ("num_outboxes", np.int32),
        ("rank", np.int32),
        ("world_size", np.int32),
        ("id", np.int32),
    ],
    align=True,
)
FLAG_BYTES = 128  # behind a slot


@dataclass(frozen=True, slots=True)
class Slots:
    """How the memory of an Exchange is cut: a block has num_stages slots of slot_bytes, a multiple of 512, for each
    other rank."""

    num_lanes: int = 32  # blocks at most
    num_stages: int = 4
    slot_bytes: int = 16384

    @property
    def area_bytes(self) -> int:
        return self.num_lanes * self.num_stages * (self.slot_bytes + FLAG_BYTES)

    def island_bytes(self, island_size: int) -> tuple[int, int]:
        """(an inbox, a window) of one rank for make_islands."""
        return 2 * island_size * self.area_bytes, 2 * self.area_bytes

    def inbox_bytes(self, world_size: int, is_window: bool, has_owners: bool = True) -> int:
        """Of one rank: an area for each rank's shares, where sums have owners; one for what each rank hands to all, or
        one for its own that all read."""
        return ((world_size if has_owners else 0) + (1 if is_window else world_size)) * self.area_bytes


@dataclass(frozen=True, slots=True)
class Exchange:
    """As Channel, for messages that go in pieces."""

    rank: int
    world_size: int
    slots: Slots
    struct: np.void
    state: Array  # see make_channel
    memory: tuple[Array, ...]
    island_size: int = 0  # ranks of an island, see make_islands


def make_exchange(
    rank: int,
    world_size: int,
    *,
    inboxes: Sequence[Array],
    is_window: bool,
    state: Array,
    alarm: Array,
    slots: Slots,
    number: int = 0,
    patience_s: float = 10.0,
    has_owners: bool = True,
) -> Exchange:
    """An exchange over memory that is there, all of it zeros at first.

    Args:
        inboxes: [slots.inbox_bytes] uint8 of each rank, by rank; is_window: all of them are memory that all read.
        has_owners: whether ranks add up slices of their own; all_gather and all_reduce_pair have none.
        state, alarm, number: as of make_channel.
    Raises:
        KernelError: more ranks than kernels know.
    """
    if not 2 <= world_size <= MAX_RANKS:
        raise KernelError(f"{world_size} ranks; kernels add up 2 to {MAX_RANKS}")
    struct: np.void = np.zeros(1, EXCHANGE)[0]
    begins, area = [address(inbox) for inbox in inboxes], slots.area_bytes
    first = world_size * area if has_owners else 0
    sums_at = [first + (0 if is_window else owner) * area for owner in range(world_size)]
    readers = [rank] if is_window else [peer for peer in range(world_size) if peer != rank]
    for peer in range(world_size):
        if has_owners:
            struct["scatter_to"][peer] = begins[peer] + rank * area
            struct["scatter_from"][peer] = begins[rank] + peer * area
        struct["gather_from"][peer] = begins[peer if is_window else rank] + sums_at[peer]
    struct["gather_to"][: len(readers)] = [begins[reader] + sums_at[rank] for reader in readers]
    struct["state"], struct["alarm"], struct["patience"] = address(state), address(alarm), int(patience_s * 1e9)
    struct["slot_bytes"], struct["num_stages"] = slots.slot_bytes, slots.num_stages
    struct["num_outboxes"], struct["rank"], struct["world_size"] = len(readers), rank, world_size
    struct["id"] = number
    return Exchange(rank, world_size, slots, struct, state, (*inboxes, alarm))


def make_islands(
    rank: int,
    world_size: int,
    *,
    inboxes: Sequence[Array],
    windows: Sequence[Array],
    state: Array,
    alarm: Array,
    slots: Slots,
    number: int = 0,
    patience_s: float = 10.0,
) -> Exchange:
    """An exchange of islands, runs of as many ranks each: for all_reduce_islands alone. All memory is zeros at first.

    Args:
        inboxes: [first of slots.island_bytes] uint8 of each rank of this island, in memory of its GPU.
        windows: [second of slots.island_bytes] uint8 of each rank of all islands, memory that all read.
        state, alarm, number: as of make_channel.
    Raises:
        KernelError: there is one island, or no whole number of them.
    """
    size = len(inboxes)
    if size < 2 or world_size < 2 * size or world_size % size or world_size > MAX_RANKS:
        raise KernelError(f"{world_size} ranks in islands of {size}; kernels add up 4 to {MAX_RANKS}, in equal islands")
    struct: np.void = np.zeros(1, EXCHANGE)[0]
    area, place = slots.area_bytes, rank % size
    begins, likes = [address(inbox) for inbox in inboxes], [address(window) for window in windows]
    others = [peer for peer in range(size) if peer != place]
    for peer in range(size):
        member = rank - place + peer
        struct["scatter_to"][member] = begins[peer] + place * area
        struct["scatter_from"][member] = begins[place] + peer * area
        struct["gather_from"][member] = begins[place] + (size + peer) * area
    outboxes = [begins[peer] + (size + place) * area for peer in others]
    before, after, last = rank - size, rank + size, world_size - size + place
    if before >= 0:
        struct["scatter_from"][before] = likes[rank]
    if after < world_size:
        struct["scatter_to"][after] = likes[after]
        struct["gather_from"][last] = likes[last] + area
    else:
        outboxes.append(likes[rank] + area)
    struct["gather_to"][: len(outboxes)] = outboxes
    struct["state"], struct["alarm"], struct["patience"] = address(state), address(alarm), int(patience_s * 1e9)
    struct["slot_bytes"], struct["num_stages"] = slots.slot_bytes, slots.num_stages
    struct["num_outboxes"], struct["rank"], struct["world_size"] = len(outboxes), rank, world_size
    struct["id"] = number
    return Exchange(rank, world_size, slots, struct, state, (*inboxes, *windows, alarm), size)
