"""Who hangs where GPUs wait for each other: told from an alarm and a board that a test writes."""

from __future__ import annotations

import time

import numpy as np
import pytest

from engine.comm import alarm as alarms_of
from engine.comm.alarm import FRESH_S, Alarm, Alarms, link_id, name_of
from engine.comm.board import RECORD_BYTES, GpuWait, Record
from engine.comm.naming import RESULTS_S, late
from engine.comm.segment import Segment
from engine.errors import EngineDeadError
from engine.kernels.channel import ALARM_WORDS, alarm_words

SUM = link_id(0, alarms_of.PEER)


def board(size: int, step: int = 4) -> dict[int, Record]:
    """Ranks that compute a step which is planned to take 0.1 s."""
    segment = Segment.make(size * RECORD_BYTES)
    records = {number: Record(segment, number) for number in range(size)}
    for record in records.values():
        record.come()
        record.announce(step)
        record.begin()
    records[0].plan(0.1)
    return records


def ago(record: Record, seconds: float) -> None:
    record._words[5] -= int(seconds * 1e9)


def test_a_rank_whose_part_is_not_launched_is_named_with_what_the_gpu_waits_for() -> None:
    ranks = board(3)
    ranks[0].finish()
    for number in (0, 2):
        ranks[number].show(GpuWait(1, SUM, 77, 2.5 - number / 10))
    named = late(ranks, set())
    assert named.startswith("rank 1 (pid ")
    assert "hangs in step 4, collective 0: rank 0 has waited for 2.5 s in step 4, collective 0, for the sum 77" in named
    assert "through peer memory (limit 2.0 s)" in named


def test_nobody_is_late_while_gpus_wait_as_long_as_is_planned() -> None:
    ranks = board(2)
    ranks[0].show(GpuWait(1, SUM, 77, 1.9))
    assert late(ranks, set()) == ""
    ranks[0].show(GpuWait(1, SUM, 77, 2.1))
    assert "rank 1" in late(ranks, set())
    ranks[0].plan(1.0)
    assert late(ranks, set()) == ""
    ranks[0].show(None)
    ranks[0].plan(0.1)
    assert late(ranks, set()) == ""


def test_before_there_are_steps_gpus_wait_longer() -> None:
    """Another rank compiles kernels."""
    ranks = board(2)
    ranks[0].plan(0.0)
    ranks[0].show(GpuWait(1, SUM, 1, RESULTS_S - 1))
    assert late(ranks, set()) == ""
    ranks[0].show(GpuWait(1, SUM, 1, RESULTS_S + 1))
    assert "rank 1" in late(ranks, set())


def test_the_end_of_a_chain_is_named() -> None:
    """Stage 2 waits for stage 1, which waits for stage 0."""
    ranks = board(3)
    for number, seconds in ((0, 2.6), (1, 2.8)):
        ranks[number].show(GpuWait(number + 1, link_id(number + 1, alarms_of.ROWS), 5, seconds))
    named = late(ranks, set())
    assert named.startswith("rank 2 (pid ")
    assert "rank 1 has waited for 2.8 s in step 4, collective 0, for the hand-over 5 between stages" in named


def test_of_a_ring_the_one_that_is_behind_is_named() -> None:
    ranks = board(2)
    ranks[0].show(GpuWait(1, SUM, 78, 2.5))
    ranks[1].show(GpuWait(0, SUM, 77, 2.6))
    assert "waits for rank 0, which waits for it in step 4" in late(ranks, set())
    assert late(ranks, set()).startswith("rank 1 ")


def test_a_gpu_that_gives_no_result_is_named_after_long() -> None:
    """No kernel says that it waits, as those of NCCL do not: the rank that has not launched its part, or the GPU."""
    ranks = board(2)
    ranks[0].finish()
    ago(ranks[0], 3.0)
    ranks[1].idle()
    ago(ranks[1], 3.0)
    assert late(ranks, set()) == ""  # its part is launched
    ago(ranks[0], RESULTS_S)
    assert late(ranks, set()).startswith("rank 0 ")
    assert "has a GPU that hangs in step 4" in late(ranks, set())
    ranks[1].go_on()
    assert late(ranks, set()).startswith("rank 0 ")
    ago(ranks[1], 3.0)
    assert "rank 1 " in late(ranks, set())[:7]


def test_a_rank_that_has_not_taken_its_plan_is_named_where_no_kernel_says_that_it_waits() -> None:
    ranks = board(2)
    ranks[1].idle()
    ago(ranks[1], 3.0)
    for record in ranks.values():
        record.announce(5)
    ranks[0].begin()
    ranks[0].finish()
    ago(ranks[0], 3.0)
    assert "hangs, idle after step 4: rank 0 has waited for 3.0 s in step 5" in late(ranks, set())
    assert late(ranks, set()).startswith("rank 1 ")


def test_a_record_keeps_what_its_gpu_waits_for() -> None:
    record = board(1)[0]
    assert record.gpu_wait is None
    record.show(GpuWait(0, SUM, 2**32 - 1, 1.0))
    wait = record.gpu_wait
    assert wait is not None
    assert (wait.peer, wait.link, wait.number) == (0, SUM, 2**32 - 1)
    assert 1.0 <= wait.seconds < 1.5
    record.end(record.state.FAILED, "text")
    assert record.text == "text"
    assert record.gpu_wait is not None


def test_a_wait_counts_for_as_long_as_kernels_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    words = np.zeros(alarm_words(2), np.uint32)
    alarm, now = Alarm(words, 1, (4, 6)), 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    assert alarm.wait is None
    row = words[-ALARM_WORDS:]
    row[:] = 1, SUM, 9, 250
    assert alarm.wait == GpuWait(4, SUM, 9, 0.25)
    now += 0.9 * FRESH_S
    row[3] = 520
    assert Alarms([Alarm(words[:-ALARM_WORDS], 0, (4,)), alarm]).wait == GpuWait(4, SUM, 9, 0.52)
    now += 1.1 * FRESH_S
    assert alarm.wait is None
    row[3] = 300  # of another collective
    assert alarm.wait == GpuWait(4, SUM, 9, 0.3)


def test_who_gave_up_is_told_by_ranks_of_the_job() -> None:
    words = np.zeros(alarm_words(2), np.uint32)
    alarms = Alarms([Alarm(words, 0, (4, 6))])
    alarms.check()
    words[ALARM_WORDS : 2 * ALARM_WORDS] = 2, link_id(0, alarms_of.ROWS), 9, 30_000
    alarms.check()  # it is the alarm that counts
    words[0] = 1
    with pytest.raises(
        EngineDeadError, match=r"GPU of rank 4 waited 30\.0 s in vain for that of rank 6 in the gathering 9"
    ):
        alarms.check()


def test_an_alarm_that_is_given_ends_what_is_computed() -> None:
    words = [np.zeros(alarm_words(2), np.uint32) for _ in range(2)]
    alarms = Alarms([Alarm(each, 0, (0, 1)) for each in words])
    alarms.give()
    assert [each[0] for each in words] == [1, 1]
    with pytest.raises(EngineDeadError, match="have stopped waiting"):
        alarms.check()


def test_links_have_names_of_their_own() -> None:
    names = {name_of(link_id(group, kind), 1) for group in (0, 1) for kind in range(6)}
    assert len(names) == 7  # sums are never between stages, and each group has but one hand-over
