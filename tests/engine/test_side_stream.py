"""The second stream of a GPU, over the stand-in for CuPy: order, whichever stream is ahead, and memory."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.engine import gpu_stand_in as stand_in
from tests.engine.gpu_stand_in import gpu_forward

__all__ = ["gpu_forward"]  # a fixture

ONES = np.ones(200, np.float32)


@pytest.fixture
def side(gpu_forward: ModuleType) -> Any:
    return importlib.import_module("engine.kernels.side_stream").SideStream()


@pytest.mark.parametrize("is_early", [False, True])
def test_what_the_caller_gave_is_there_and_what_it_takes_too(side: Any, is_early: bool) -> None:
    """The side may run as late as when it is waited for, or as soon as it has work."""
    value = 5.0 if is_early else 1.0  # other than what lies in the pool since the last time
    given = stand_in.asarray(value * ONES)
    take = side.start(lambda: given + given)
    if is_early:
        side._stream.synchronize()
    taken = take()
    after = taken + given
    assert stand_in.to_host(taken).tolist() == [2 * value] * 200
    assert stand_in.to_host(after).tolist() == [3 * value] * 200


def test_works_are_done_in_order(side: Any) -> None:
    place = stand_in.asarray(ONES)

    def double() -> Any:
        place[...] = place + place
        return place

    takes = [side.start(double) for _ in range(20)]  # more than there are events
    takes[-1]()
    assert stand_in.to_host(place)[0] == 2.0**20


def test_memory_that_a_work_let_go_of_is_not_the_callers_yet(side: Any) -> None:
    given = stand_in.asarray(ONES)

    def work() -> Any:
        between = given + given
        return between + given

    take = side.start(work)
    own = [stand_in.asarray(7 * ONES) for _ in range(3)]
    taken = take()
    assert stand_in.to_host(taken).tolist() == [3.0] * 200
    assert [stand_in.to_host(array)[0] for array in own] == [7.0] * 3


def test_what_a_work_reads_lives_until_it_is_taken(side: Any) -> None:
    def started() -> Any:
        given = stand_in.asarray(ONES)
        return side.start(lambda: given + given)

    take = started()
    own = [stand_in.asarray(7 * ONES) for _ in range(3)]
    assert stand_in.to_host(take()).tolist() == [2.0] * 200
    assert [stand_in.to_host(array)[0] for array in own] == [7.0] * 3


def test_memory_is_of_the_callers_pool(side: Any) -> None:
    pool = stand_in.MemoryPool()
    given = stand_in.asarray(ONES)
    with stand_in.using_allocator(pool.malloc):
        taken = side.start(lambda: given + given)()
    assert pool.num_bytes > 0
    assert stand_in.to_host(taken).tolist() == [2.0] * 200


def test_rows_are_joined(side: Any) -> None:
    first, second = (stand_in.asarray(np.full((rows, 3), rows, np.float32)) for rows in (2, 1))
    assert stand_in.to_host(side.join(first, second)).tolist() == [[2.0] * 3, [2.0] * 3, [1.0] * 3]


def test_what_the_caller_has_caught_up_with_is_not_waited_for_again(side: Any) -> None:
    given = stand_in.asarray(ONES)
    first, second = (side.start(lambda: given + given) for _ in range(2))
    side.catch_up()
    assert not side.catch_up(), "nothing is started"
    queued = len(stand_in.STREAM._queue)
    taken = first(), second()
    assert len(stand_in.STREAM._queue) == queued
    assert [stand_in.to_host(one)[0] for one in taken] == [2.0, 2.0]


def test_a_capture_takes_in_what_was_caught_up_with(side: Any) -> None:
    """What is taken behind the end of a capture is of another one: its event cannot be waited for there."""
    given = stand_in.asarray(ONES)
    for catches_up in (True, False):
        stand_in.STREAM.begin_capture()
        take = side.start(lambda: given + given)
        if catches_up:
            side.catch_up()
            stand_in.STREAM.end_capture()
        else:
            with pytest.raises(stand_in.CUDARuntimeError, match="Unjoined"):
                stand_in.STREAM.end_capture()
        stand_in.STREAM.begin_capture()
        if catches_up:
            take()
        else:
            with pytest.raises(stand_in.CUDARuntimeError, match="Isolation"):
                take()
        stand_in.STREAM.end_capture()
