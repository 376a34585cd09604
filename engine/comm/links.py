"""All memory through which the GPUs of a group of ranks exchange numbers, and what kernels are told of it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import cupy
import numpy as np
from numpy.typing import NDArray

from engine.comm import alarm as links_of
from engine.comm.alarm import Alarm, link_id
from engine.comm.copies import Copies
from engine.comm.host_window import HostWindow
from engine.comm.islands import island_size
from engine.comm.meeting import Meeting
from engine.comm.peer import PeerMemory, problems_of
from engine.errors import ConfigError
from engine.kernels.channel import (
    MAX_RANKS,
    STATE_WORDS,
    Channel,
    Exchange,
    Slots,
    alarm_words,
    make_channel,
    make_exchange,
    make_islands,
    slots_bytes,
)
from engine.kernels.device import Array

logger = logging.getLogger(__name__)

ONE_TRIP_BYTES = 4 << 20  # of the largest array that goes in one trip
PAIR_SLOTS = Slots(num_lanes=64, num_stages=8, slot_bytes=34816)  # of two ranks: 16 bundles
PATIENCE_S = 30.0
WINDOW, PEER = "window", "peer"
ALIGNMENT = 4096


class Links:
    """Ways between the GPUs of a group of ranks of one host, of one stream each.

    channels, exchanges: by the memory that they go through, WINDOW always and PEER where GPUs reach each other.
    islands: where they do so in islands alone. copies: through the window, if asked for. gathers: an exchange for parts
    of rows. alarm: of all that they wait on.

    Args:
        number: of the group, see engine.comm.alarm.link_id.
        members: the ranks of the group, among all of the job; by default they are all.
        largest_island: see island_size; 1: memory of other GPUs is not tried.
        has_copies: whether arrays are copied too, for sums.
        max_blocks: of a kernel that waits.
    Raises:
        ConfigError: on all ranks, where there is no window of the host.
    """

    def __init__(
        self,
        meeting: Meeting,
        number: int = 0,
        members: Sequence[int] = (),
        largest_island: int = MAX_RANKS,
        max_blocks: int = 64,
        has_copies: bool = True,
    ) -> None:
        self.meeting, self._number, self._max_blocks = meeting, number, max_blocks
        world_size = meeting.size
        self._slots = Slots(slot_bytes=max(512, 32768 // world_size // 512 * 512))
        self._has_owners = world_size > 2
        self._sum_slots = self._slots if self._has_owners else PAIR_SLOTS
        self.island_size = self._find_islands(members or range(world_size), largest_island)
        has_islands = 1 < self.island_size < world_size
        self._island_slots = Slots(slot_bytes=max(512, 65536 // self.island_size // 512 * 512))
        self._island_bytes = self._island_slots.island_bytes(self.island_size)
        alarm_bytes, trip_bytes = 4 * alarm_words(world_size), slots_bytes(world_size, ONE_TRIP_BYTES)
        sum_bytes, gather_bytes = self._inbox_bytes(True)
        sizes = alarm_bytes, trip_bytes, *(world_size * (sum_bytes,)), *(world_size * (gather_bytes,))
        sizes += world_size * (self._island_bytes[1],) if has_islands else ()
        places = _places(sizes)
        near = places[2 + meeting.rank :: world_size]  # its own inboxes
        self._window = HostWindow(meeting, sum(map(_aligned, sizes)), near)
        alarm, trips, *inboxes = _cut(self._window.array, sizes)
        self._alarm_words = alarm.view(np.uint32)
        on_host: NDArray[np.uint32] = self._window.host[:alarm_bytes].view(np.uint32)
        self.alarm = Alarm(on_host, meeting.rank, members or range(world_size))
        self.channels = {WINDOW: self._channel(links_of.WINDOW, [trips], trips)}
        self.exchanges = {WINDOW: self._sums(links_of.WINDOW_PIECES, inboxes[:world_size], True)}
        self.gathers = self._exchange(links_of.ROWS, inboxes[world_size : 2 * world_size], True, self._slots, False)
        self.copies = Copies(meeting) if has_copies else None
        self._peer: PeerMemory | None = None
        self.islands: Exchange | None = None
        if self.island_size == world_size:
            self._add_peer(trip_bytes)
        elif has_islands:
            self._add_islands(inboxes[2 * world_size :])

    def _find_islands(self, members: Sequence[int], largest: int) -> int:
        """How many ranks one has."""
        if largest == 1:
            return 1
        problems = problems_of(self.meeting)
        size = island_size(problems, members, largest)
        if size < self.meeting.size:
            why = next((text for row in problems for text in row if text), "as GLINT_ISLAND_SIZE asks for")
            logger.info("GPUs reach each other's memory in islands of %d: %s", size, why)
        return size

    def _inbox_bytes(self, is_window: bool) -> tuple[int, int]:
        """(for sums, for parts of rows)."""
        world_size = self.meeting.size
        sums = self._sum_slots.inbox_bytes(world_size, is_window, self._has_owners)
        return sums, self._slots.inbox_bytes(world_size, is_window, False)

    def _add_peer(self, trip_bytes: int) -> None:
        rank = self.meeting.rank
        sizes = trip_bytes, *self._inbox_bytes(False)
        self._peer = self._share(sum(map(_aligned, sizes)))
        if self._peer is None:
            return
        cut = [_cut(part, sizes) for part in self._peer.parts]
        others = [trips for peer, (trips, _, _) in enumerate(cut) if peer != rank]
        self.channels[PEER] = self._channel(links_of.PEER, others, cut[rank][0])
        self.exchanges[PEER] = self._sums(links_of.PEER_PIECES, [part[1] for part in cut], False)
        self.gathers = self._exchange(links_of.ROWS, [part[2] for part in cut], False, self._slots, False)

    def _add_islands(self, windows: list[Array]) -> None:
        self._peer = self._share(self._island_bytes[0])
        if self._peer is not None:
            self.islands = make_islands(
                self.meeting.rank,
                self.meeting.size,
                inboxes=self._peer.parts,
                windows=windows,
                state=cupy.zeros(STATE_WORDS, np.uint32),
                alarm=self._alarm_words,
                slots=self._island_slots,
                number=link_id(self._number, links_of.ISLANDS),
                patience_s=PATIENCE_S,
            )

    def _share(self, num_bytes: int) -> PeerMemory | None:
        """With this rank's island."""
        first = self.meeting.rank // self.island_size * self.island_size
        try:
            return PeerMemory(self.meeting, num_bytes, range(first, first + self.island_size))
        except ConfigError as error:
            logger.info("GPUs do not reach each other's memory: %s", error)
            return None

    def _channel(self, link: int, outboxes: list[Array], inbox: Array) -> Channel:
        return make_channel(
            self.meeting.rank,
            self.meeting.size,
            outboxes=outboxes,
            inbox=inbox,
            state=cupy.zeros(STATE_WORDS, np.uint32),
            alarm=self._alarm_words,
            number=link_id(self._number, link),
            patience_s=PATIENCE_S,
            max_blocks=self._max_blocks,
        )

    def _sums(self, link: int, inboxes: list[Array], is_window: bool) -> Exchange:
        return self._exchange(link, inboxes, is_window, self._sum_slots, self._has_owners)

    def _exchange(self, link: int, inboxes: list[Array], is_window: bool, slots: Slots, has_owners: bool) -> Exchange:
        return make_exchange(
            self.meeting.rank,
            self.meeting.size,
            inboxes=inboxes,
            is_window=is_window,
            state=cupy.zeros(STATE_WORDS, np.uint32),
            alarm=self._alarm_words,
            slots=slots,
            number=link_id(self._number, link),
            patience_s=PATIENCE_S,
            has_owners=has_owners,
        )

    @property
    def _all(self) -> list[Channel | Exchange]:
        islands = [] if self.islands is None else [self.islands]
        return [*self.channels.values(), *self.exchanges.values(), self.gathers, *islands]

    def set_patience(self, seconds: float) -> None:
        """Of what is launched from now on."""
        for link in self._all:
            link.struct["patience"] = int(seconds * 1e9)

    def forget(self) -> None:
        """After a way has failed, and all ranks have stopped: the alarm is over."""
        cupy.cuda.Device().synchronize()
        self.meeting.allgather(None)
        if self.meeting.rank == 0:
            self.alarm.clear()
        for link in self._all:
            link.state[2:] = 0  # the counts stay, which are the same on all ranks
        self.meeting.allgather(None)

    def close(self) -> None:
        """Nothing may use it any more."""
        cupy.cuda.Device().synchronize()
        self.meeting.allgather(None)
        self._window.close()
        if self.copies is not None:
            self.copies.close()
        if self._peer is not None:
            self._peer.close()


def _aligned(num_bytes: int) -> int:
    return ALIGNMENT * -(-num_bytes // ALIGNMENT)


def _places(sizes: Sequence[int]) -> list[slice]:
    """Of parts of these sizes, each at a multiple of ALIGNMENT."""
    ends = np.cumsum([_aligned(size) for size in sizes]).tolist()
    return [slice(end - _aligned(size), end - _aligned(size) + size) for end, size in zip(ends, sizes, strict=True)]


def _cut(whole: Array, sizes: Sequence[int]) -> list[Array]:
    return [whole[place] for place in _places(sizes)]
