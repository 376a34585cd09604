"""How rank 0's plans reach the ranks that follow: integers in shared memory on its own host, MPI to other hosts.

On a host: places for some messages, and a sequence word that counts messages and on which followers sleep. Of p places
message n lies in place n mod p, and is written once all are done with message n − p: plans are read where they lie, and
nothing is overwritten in use.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from engine.batch import Int32, StepPlan
from engine.comm import futex
from engine.comm.board import Record
from engine.comm.ranks import Ranks, World
from engine.comm.segment import LINE, Segment
from engine.system import usable_cores

# A follower that waits longer sleeps; to wake it takes tens of microseconds, or hundreds on a virtual machine. Where
# there are cores for all, it spins for as long as rank 0 takes from one step to the next.
SPIN_S, LONG_SPIN_S = 20e-6, 5e-3
CORES_PER_RANK = 2  # from so many on there are
SLEEP_S = 1.0  # then it looks again
FIRST_NAP_S, LONGEST_NAP_S = 50e-6, 2e-3  # of who polls MPI, or waits for readers: long enough to burn no core
TAG = 11
HEAD = 6  # numbers before the arrays
PLACES = 3  # with one stage: the plan in use, the next, and one that is written; each stage more has one in use
FIRST_STEP_S = 60.0  # a step is planned to take, while none has been seen
WORD = 0xFFFFFFFF  # the sequence word has 32 bits, as futex asks; counts of messages go on
SCALARS = ("slots", "starts", "num_logits", "samples", "rope_lens", "two_way_lens")  # one number a sequence


class Kind(IntEnum):
    """What a message asks of a follower."""

    STOP = 0  # end
    STEP = 1  # its share of this step
    WARM = 2  # all kinds of step have been seen: nothing more may be compiled or allocated


@dataclass(frozen=True, slots=True)
class Message:
    kind: Kind
    plan: StepPlan | None = None


def largest_message(max_num_seqs: int, max_num_batched_tokens: int, max_blocks_per_seq: int) -> int:
    """Numbers in the largest message that these limits allow."""
    per_seq = len(SCALARS) + max_blocks_per_seq
    return HEAD + max_num_seqs * per_seq + max_num_seqs + 1 + max_num_batched_tokens


def pack(message: Message) -> list[Int32]:
    """The arrays of a message; one after another they are what is sent."""
    plan = message.plan
    if plan is None:
        return [np.array([message.kind, 0, 0, 0, 0, 0], np.int32)]
    width = plan.block_table.shape[1]
    head = np.array([message.kind, plan.step, plan.num_seqs, plan.num_tokens, width, plan.num_decodes], np.int32)
    scalars = [getattr(plan, name) for name in SCALARS]
    return [head, *scalars, plan.cu_seqlens_q, plan.token_ids, plan.block_table.reshape(-1)]


def unpack(numbers: Int32) -> Message:
    """The message in these numbers, which may be longer; arrays of the plan are views of them."""
    kind, step, num_seqs, num_tokens, width, num_decodes = numbers[:HEAD].tolist()
    if kind != Kind.STEP:
        return Message(Kind(kind))
    scalars = numbers[HEAD : HEAD + len(SCALARS) * num_seqs].reshape(len(SCALARS), num_seqs)
    slots, starts, num_logits, samples, rope_lens, two_way_lens = scalars
    lens = HEAD + len(SCALARS) * num_seqs
    ids = lens + num_seqs + 1
    blocks = ids + num_tokens
    plan = StepPlan(
        step=step,
        slots=slots,
        starts=starts,
        cu_seqlens_q=numbers[lens:ids],
        token_ids=numbers[ids:blocks],
        block_table=numbers[blocks : blocks + num_seqs * width].reshape(num_seqs, width),
        num_logits=num_logits,
        samples=samples != 0,
        rope_lens=rope_lens,
        two_way_lens=two_way_lens,
        num_decodes=num_decodes,
    )
    return Message(Kind.STEP, plan)


class SharedPlaces:
    """The places of one host in shared memory: their layout, and both ends.

    A line for the sequence word, a line a reader with the number of messages it is done with, then the places.
    """

    def __init__(self, segment: Segment, num_readers: int, num_places: int, capacity: int) -> None:
        """capacity: numbers in the largest message."""
        self._spin_s = LONG_SPIN_S if usable_cores() >= CORES_PER_RANK * (1 + num_readers) else SPIN_S
        self._words = segment.words
        self._sequence = segment.word32(0)
        self._readers = range(num_readers)
        self._written = 0
        first, size = (1 + num_readers) * LINE, _place_bytes(capacity)
        self._places = [
            np.frombuffer(segment.memory, np.int32, capacity, first + place * size) for place in range(num_places)
        ]

    @staticmethod
    def num_bytes(num_readers: int, num_places: int, capacity: int) -> int:
        return (1 + num_readers) * LINE + num_places * _place_bytes(capacity)

    @property
    def has_room(self) -> bool:
        """Whether all readers are done with what is overwritten next."""
        return all(self._words[self._word_of(reader)] > self._written - len(self._places) for reader in self._readers)

    def wait(self) -> None:
        """Until there is room."""
        nap = FIRST_NAP_S
        while not self.has_room:
            time.sleep(nap)
            nap = min(2 * nap, LONGEST_NAP_S)

    def write(self, parts: Sequence[NDArray[np.int32 | np.bool_]]) -> None:
        """Where there is room: the next message."""
        number = self._written + 1
        place = self._places[number % len(self._places)]
        np.concatenate(parts, out=place[: sum(map(len, parts))], casting="unsafe")
        self._written = number
        self._sequence.value = number & WORD
        futex.wake(self._sequence)

    def read(self, reader: int, number: int) -> Int32:
        """Message `number`, counted from 1, where it lies, in a longer array. The one before may be overwritten now."""
        seen = number - 1
        self._words[self._word_of(reader)] = seen
        spin_until = time.perf_counter() + self._spin_s
        while self._sequence.value == seen & WORD:
            if time.perf_counter() > spin_until:
                futex.wait(self._sequence, seen & WORD, SLEEP_S)
        return self._places[number % len(self._places)]

    @staticmethod
    def _word_of(reader: int) -> int:
        return (1 + reader) * (LINE // 8)


def _place_bytes(capacity: int) -> int:
    return -(-4 * capacity // LINE) * LINE


class SharedReceiver:
    """The end of a follower on rank 0's host."""

    def __init__(self, places: SharedPlaces, reader: int) -> None:
        self._places, self._reader, self._number = places, reader, 0

    def receive(self) -> Message:
        """Waits for the next one; its arrays are good until the next call."""
        self._number += 1
        return unpack(self._places.read(self._reader, self._number))


class MpiReceiver:
    """The end of a follower on another host."""

    def __init__(self, world: World) -> None:
        self._world = world

    def receive(self) -> Message:
        nap = FIRST_NAP_S
        while not self._world.Iprobe(0, TAG):
            time.sleep(nap)
            nap = min(2 * nap, LONGEST_NAP_S)
        numbers: Int32 = self._world.recv(source=0, tag=TAG)
        return unpack(numbers)


Receiver = SharedReceiver | MpiReceiver


class Pace:
    """How long a step is expected to take: as the slowest of the last ones, or longer by as much as it is larger."""

    def __init__(self) -> None:
        self._last: deque[tuple[int, float]] = deque(maxlen=8)  # tokens, seconds
        self._began = 0.0
        self._num_tokens = 0

    def next(self, num_tokens: int, seconds_since_last: float) -> float:
        """Seconds that a step will take which begins now.

        Args:
            seconds_since_last: since the last sign of life of the step before, which ended about then.
        """
        now = time.monotonic()
        if self._num_tokens:
            self._last.append((self._num_tokens, max(0.0, now - seconds_since_last - self._began)))
        self._began, self._num_tokens = now, num_tokens
        times = (seconds * max(1.0, num_tokens / tokens) for tokens, seconds in self._last)
        return max(times, default=FIRST_STEP_S)


class Publisher:
    """Rank 0's end."""

    def __init__(
        self,
        places: SharedPlaces | None,
        world: World,
        far_ranks: Sequence[int],
        record: Record,
        num_stages: int,
    ) -> None:
        """
        Args:
            places: of this host, if a follower reads there.
            far_ranks: those that MPI reaches.
            record: of rank 0.
        """
        self._places, self._world, self._far_ranks = places, world, far_ranks
        self._record, self._num_stages = record, num_stages
        self._pace = Pace()
        self._stopped = False

    def publish(self, plan: StepPlan) -> None:
        idle_s = self._record.seconds_since_change
        self._send(Message(Kind.STEP, plan))
        self._record.plan(self._num_stages * self._pace.next(plan.num_tokens, idle_s))
        self._record.announce(plan.step)
        if self._num_stages == 1:  # or it begins once the stage before has sent what it needs
            self._record.begin()

    def warm(self) -> None:
        self._send(Message(Kind.WARM))

    def stop(self) -> None:
        """The last message; once is enough."""
        if not self._stopped:
            self._stopped = True
            self._send(Message(Kind.STOP))

    def _send(self, message: Message) -> None:
        parts = pack(message)
        if self._places is not None:
            if not self._places.has_room:
                self._record.wait()
                self._places.wait()
                self._record.go_on()
            self._places.write(parts)
        if self._far_ranks:
            numbers = np.concatenate(parts, casting="unsafe", dtype=np.int32)
            for request in [self._world.isend(numbers, rank, TAG) for rank in self._far_ranks]:
                request.wait()


def open_channel(ranks: Ranks, capacity: int, num_stages: int = 1) -> Publisher | Receiver | None:
    """This rank's end of a channel for messages of so many numbers at most; None where there is but one rank."""
    if ranks.control is None or ranks.watch is None:
        return None
    near = ranks.host_ranks if futex.AVAILABLE and 0 in ranks.host_ranks else (ranks.rank,)
    sizes = len(near) - 1, PLACES + num_stages - 1, capacity
    places = SharedPlaces(ranks.share(SharedPlaces.num_bytes(*sizes), "opening the channel of plans"), *sizes)
    if ranks.rank == 0:
        far = [rank for rank in range(ranks.size) if rank not in near]
        return Publisher(places if len(near) > 1 else None, ranks.control, far, ranks.watch.mine, num_stages)
    return SharedReceiver(places, near.index(ranks.rank) - 1) if 0 in near else MpiReceiver(ranks.control)
