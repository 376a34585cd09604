"""Plans through shared memory: what is read is what was written, nothing is overwritten in use, waiting is asleep."""

from __future__ import annotations

import threading
import time
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.batch import StepPlan
from engine.comm.board import RECORD_BYTES, Record
from engine.comm.plan_channel import (
    FIRST_STEP_S,
    HEAD,
    WORD,
    Kind,
    Message,
    Pace,
    Publisher,
    SharedPlaces,
    SharedReceiver,
    largest_message,
    pack,
    unpack,
)
from engine.comm.segment import Segment

MAX_SEQS, MAX_TOKENS, MAX_BLOCKS = 8, 64, 10
CAPACITY = largest_message(MAX_SEQS, MAX_TOKENS, MAX_BLOCKS)


def make_plan(step: int, counts: list[int], width: int, seed: int = 0) -> StepPlan:
    """A plan with arbitrary numbers in it, of sequences with so many tokens."""
    random = np.random.default_rng(seed)

    def numbers(*shape: int) -> np.ndarray:
        return random.integers(-(2**31), 2**31, shape, np.int32)

    num_seqs = len(counts)
    return StepPlan(
        step=step,
        slots=numbers(num_seqs),
        starts=numbers(num_seqs),
        cu_seqlens_q=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        token_ids=numbers(sum(counts)),
        block_table=numbers(num_seqs, width),
        num_logits=numbers(num_seqs),
        samples=random.integers(0, 2, num_seqs).astype(np.bool_),
        rope_lens=numbers(num_seqs),
        two_way_lens=numbers(num_seqs),
        num_decodes=counts.count(1),
    )


def assert_same(found: StepPlan | None, expected: StepPlan) -> None:
    assert found is not None
    for one in fields(StepPlan):
        if one.name.startswith("swaps"):  # no ranks with swapping
            continue
        value, wanted = getattr(found, one.name), getattr(expected, one.name)
        np.testing.assert_array_equal(value, wanted)
        assert getattr(value, "dtype", None) == getattr(wanted, "dtype", None)


@given(
    counts=st.lists(st.integers(1, MAX_TOKENS // MAX_SEQS), min_size=1, max_size=MAX_SEQS),
    width=st.integers(1, MAX_BLOCKS),
    seed=st.integers(0, 99),
)
def test_what_is_unpacked_is_what_was_packed(counts: list[int], width: int, seed: int) -> None:
    plan = make_plan(7, counts, width, seed)
    numbers = np.concatenate(pack(Message(Kind.STEP, plan)), casting="unsafe", dtype=np.int32)
    assert len(numbers) <= CAPACITY
    longer = np.concatenate([numbers, np.full(5, -9, np.int32)])  # as a place is
    message = unpack(longer)
    assert message.kind is Kind.STEP
    assert_same(message.plan, plan)


@pytest.mark.parametrize("kind", [Kind.STOP, Kind.WARM])
def test_messages_without_a_plan(kind: Kind) -> None:
    (numbers,) = pack(Message(kind))
    assert len(numbers) == HEAD
    assert unpack(numbers) == Message(kind)


class Channel:
    """One writer, and readers that are threads."""

    def __init__(self, num_readers: int, num_places: int = 3) -> None:
        sizes = num_readers, num_places, CAPACITY
        segment = Segment.make(SharedPlaces.num_bytes(*sizes))
        self.places = SharedPlaces(segment, *sizes)
        self.record = Record(Segment.make(RECORD_BYTES), 0)
        self.publisher = Publisher(self.places, None, (), self.record, 1)  # type: ignore[arg-type]
        self.receivers = [SharedReceiver(SharedPlaces(segment, *sizes), reader) for reader in range(num_readers)]


def test_readers_of_different_speed_get_every_plan_whole() -> None:
    """Rank 0 waits for the slowest; a plan is whole until its reader asks for the next."""
    channel = Channel(3)
    plans = [make_plan(number, [1, number % 7 + 1], 1 + number % MAX_BLOCKS, number) for number in range(40)]
    wrong: list[object] = []
    seen: list[int] = [0, 0, 0]

    def read(reader: int) -> None:
        receiver = channel.receivers[reader]
        try:
            while (message := receiver.receive()).kind is not Kind.STOP:
                time.sleep(0.0005 * reader)  # while the writer goes on
                assert_same(message.plan, plans[seen[reader]])
                seen[reader] += 1
        except AssertionError as error:
            wrong.append(error)

    threads = [threading.Thread(target=read, args=(reader,)) for reader in range(3)]
    for thread in threads:
        thread.start()
    for plan in plans:
        channel.publisher.publish(plan)
    channel.publisher.stop()
    channel.publisher.stop()  # a second time does nothing
    for thread in threads:
        thread.join(30)
    assert wrong == []
    assert seen == [40, 40, 40]


def test_a_writer_waits_while_a_plan_is_in_use() -> None:
    channel = Channel(1, num_places=2)
    plans = [make_plan(number, [2], 3, number) for number in range(4)]
    channel.publisher.publish(plans[0])
    first = channel.receivers[0].receive()
    channel.publisher.publish(plans[1])
    writer = threading.Thread(target=channel.publisher.publish, args=(plans[2],))
    writer.start()
    writer.join(0.05)
    assert writer.is_alive()  # place 0 is in use
    assert_same(first.plan, plans[0])
    assert_same(channel.receivers[0].receive().plan, plans[1])
    writer.join(10)
    assert not writer.is_alive()
    assert_same(channel.receivers[0].receive().plan, plans[2])


def test_the_sequence_word_may_run_over() -> None:
    """It has 32 bits: a step a millisecond fills them in 50 days."""
    channel = Channel(1)
    channel.places._written = channel.receivers[0]._number = WORD - 1
    channel.places._sequence.value = WORD - 1
    channel.places._words[channel.places._word_of(0)] = WORD - 1
    for number in range(4):
        plan = make_plan(number, [1], 1)
        channel.publisher.publish(plan)
        assert_same(channel.receivers[0].receive().plan, plan)


def test_a_reader_that_waits_sleeps() -> None:
    """It uses next to no time of a core while there is no plan."""
    channel = Channel(1)
    used: list[float] = []

    def read() -> None:
        before = time.thread_time()
        channel.receivers[0].receive()
        used.append(time.thread_time() - before)

    thread = threading.Thread(target=read)
    thread.start()
    thread.join(0.5)
    assert thread.is_alive()
    channel.publisher.stop()
    thread.join(10)
    assert used[0] < 0.1


def test_a_plan_says_on_the_board_which_step_is_computed() -> None:
    channel = Channel(1)
    channel.publisher.publish(replace(make_plan(0, [1], 1), step=42))
    assert channel.record.step == 42
    assert channel.record.collective == 0
    assert channel.record.planned_s == FIRST_STEP_S


def test_the_pace_follows_the_slowest_of_the_last_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten tokens took 2 s: ten are planned to take that again, and so are five; twenty take twice as long."""
    now = [100.0]
    monkeypatch.setattr("engine.comm.plan_channel.time.monotonic", lambda: now[0])
    pace = Pace()
    assert pace.next(10, 0.0) == FIRST_STEP_S
    now[0] = 103.0
    assert pace.next(5, 1.0) == 2.0  # the step ended a second ago
    now[0] = 103.5
    assert pace.next(20, 0.0) == 4.0
