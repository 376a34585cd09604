"""For whom copies wait, by the words of their places."""

from __future__ import annotations

import numpy as np
import pytest

from engine.comm.alarm import Alarms, name_of
from engine.comm.board import GpuWait
from engine.comm.copy_order import FREE, FULL, NUM_PLACES
from engine.comm.copy_watch import CopyWatch


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr("time.monotonic", found)
    return found


def test_a_rank_that_takes_nothing_is_waited_for(clock: Clock) -> None:
    """Rank 1 of the group, rank 5 of the job, has put two pieces; rank 6 has taken both, rank 4 none."""
    words = np.zeros((3, 3, NUM_PLACES), np.uint32)
    watch = CopyWatch(words, 1, (4, 5, 6))
    alarms = Alarms([watch])
    assert alarms.wait is None
    words[1, 0, :2] = FULL
    assert watch.wait is None, "it may be on its way"
    clock.now += 0.2
    assert watch.wait is None
    clock.now += 2.0
    assert alarms.wait == GpuWait(4, name_link(alarms), 0, pytest.approx(2.2))
    words[1, 0, 0] = FREE  # it moves
    assert alarms.wait is None
    clock.now += 1.0
    assert alarms.wait == GpuWait(4, name_link(alarms), 0, pytest.approx(1.0))
    words[1, 0] = FREE
    clock.now += 9.0
    assert alarms.wait is None
    clock.now += 9.0
    assert alarms.wait is None, "nobody copies"
    alarms.check()


def test_what_another_has_put_is_no_wait_of_this_rank(clock: Clock) -> None:
    """Rank 0 waits for rank 1, which has not begun: that is seen on rank 0, and not on rank 1."""
    words = np.zeros((2, 2, NUM_PLACES), np.uint32)
    watches = [CopyWatch(words, rank, (0, 1)) for rank in (0, 1)]
    words[0, 1, 0] = FULL
    assert [watch.wait for watch in watches] == [None, None]
    clock.now += 3.0
    found = [watch.wait for watch in watches]
    assert found[0] is not None
    assert found[0].peer == 1
    assert found[1] is None


def name_link(alarms: Alarms) -> int:
    wait = alarms.wait
    assert wait is not None
    assert name_of(wait.link, wait.number) == "copies through the window"
    return wait.link
