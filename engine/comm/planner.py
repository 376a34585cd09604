"""Every way in which sums of ranks can go is tried at start: it is checked, and timed in a graph, size by size."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import cupy
import numpy as np

from engine.comm.links import PATIENCE_S, Links
from engine.comm.meeting import Meeting
from engine.comm.ways import Plan, Trial, Way
from engine.kernels.carried import CARRIED, Carried

Array = Any

SIZES = tuple(1 << exponent for exponent in range(12, 27, 2))  # bytes: 4 KiB to 64 MiB
LAUNCHES = 3  # of a graph
REPEATS, FEW_REPEATS, FEW_FROM = 16, 4, 4 << 20  # of a call in a graph; of one with so many bytes
TRIAL_PATIENCE_S = 0.3  # of a way that hangs
LARGEST_PATTERN = 1 << 20  # numbers
INT8_ERROR = 0.05  # of the largest sum: more than the patterns can be off by


def measure(
    links: Links, ways: Mapping[str, Way], dtype: Any, sizes: Sequence[int] = SIZES, hidden_size: int = 8192
) -> list[Trial]:
    """Tries every way at every size that it takes, on all ranks together; a way that fails once is tried no more.

    The kernels are loaded on all ranks: none waits here for another's compiler.
    """
    trials: list[Trial] = []
    links.meeting.allgather(None)
    links.set_patience(TRIAL_PATIENCE_S)
    for way in ways.values():
        for num_bytes in sizes:
            if not way.least_bytes <= num_bytes <= way.most_bytes:
                continue
            trials.append(_try(links, way, num_bytes, dtype, hidden_size, _time))
            if trials[-1].problem:
                break
    links.set_patience(PATIENCE_S)
    return trials


def wrong(
    links: Links, ways: Mapping[str, Way], plans: Sequence[Plan], dtype: Any, hidden_size: int = 8192
) -> list[Trial]:
    """What plans say that were made of other times, and is not right today: ways are tried, and not timed; one that is
    not there any more is wrong too."""
    choices = dict.fromkeys((name, size) for plan in plans for size, name in zip(plan.sizes, plan.names, strict=True))
    if lost := [Trial(name, size, float("inf"), "it is not there") for name, size in choices if name not in ways]:
        return lost
    links.meeting.allgather(None)
    links.set_patience(TRIAL_PATIENCE_S)
    trials = [_try(links, ways[name], size, dtype, hidden_size, lambda links, way, x: 0.0) for name, size in choices]
    links.set_patience(PATIENCE_S)
    return [trial for trial in trials if trial.problem]


def _try(
    links: Links, way: Way, num_bytes: int, dtype: Any, hidden_size: int, time: Callable[[Links, Way, Array], float]
) -> Trial:
    """The same on all ranks."""

    def agreed(work: Callable[[], str]) -> str:
        try:
            problem = work()
        except Exception as error:  # whatever a way does here it would do in a step
            problem = f"{type(error).__name__}: {error}"
        return next(filter(None, links.meeting.allgather(problem)), "")

    us = [float("inf")]
    x = _pattern_of(links.meeting, num_bytes, dtype, hidden_size)

    def timed() -> str:
        us[0] = time(links, way, x)
        return links.alarm.problem

    problem = agreed(partial(_check, links, way, x)) or agreed(timed)
    if problem:
        links.forget()
    return Trial(way.name, num_bytes, max(links.meeting.allgather(us[0])), problem)


def _pattern_of(meeting: Meeting, num_bytes: int, dtype: Any, hidden_size: int) -> Array:
    """[num_rows, at most hidden_size]. Large arrays repeat what small ones are made of."""
    size = num_bytes // dtype.itemsize
    pattern = _pattern(meeting, min(size, LARGEST_PATTERN))[meeting.rank].astype(dtype).view(np.uint16)
    x = cupy.empty(size, np.uint16)
    x.reshape(-1, pattern.size)[...] = cupy.asarray(pattern)
    return x.view(dtype).reshape(-1, min(hidden_size, size))


def _check(links: Links, way: Way, x: Array) -> str:
    """What is wrong with the sum."""
    part = min(x.size, LARGEST_PATTERN)
    found = way.sum(x.copy(), None, _carried(x, is_new=True)).reshape(-1).view(np.uint16).reshape(-1, part)
    expected = np.sum(_pattern(links.meeting, part), axis=0)
    if way.is_exact:
        num_wrong = int((found != cupy.asarray(expected.astype(x.dtype).view(np.uint16))).sum())
    else:
        first = cupy.asnumpy(found[0]).view(x.dtype).astype(np.float32)
        num_wrong = int((np.abs(first - expected) > INT8_ERROR * np.abs(expected).max()).sum())
    return links.alarm.problem or (f"{num_wrong} numbers of {x.size} are wrong" if num_wrong else "")


def _carried(x: Array, is_new: bool) -> Carried:
    """Nothing, in memory of its own."""
    return Carried(cupy.zeros(x.size, np.uint16).view(CARRIED).reshape(x.shape), is_new)


def _pattern(meeting: Meeting, size: int) -> list[np.ndarray[Any, Any]]:
    """Small whole numbers of every rank, whose sums are exact in every type."""
    place = np.arange(size, dtype=np.int32)
    return [((place * (rank + 3) + rank) % 13 - 6).astype(np.float32) for rank in range(meeting.size)]


def _time(links: Links, way: Way, x: Array) -> float:
    """Microseconds of a call. Ranks are in step after a first launch, whose time they have waited for each other in."""
    stream = cupy.cuda.get_current_stream()
    residual, carried = x.copy(), _carried(x, is_new=False)
    x.view(np.uint16)[...] = 0
    way.sum(x, residual, carried)
    stream.synchronize()
    stream.begin_capture()
    repeats = REPEATS if x.nbytes < FEW_FROM else FEW_REPEATS
    for _ in range(repeats):
        way.sum(x, residual, carried)
    graph = stream.end_capture()
    graph.upload(stream)
    times = []
    for _ in range(LAUNCHES):
        links.meeting.allgather(None)
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        graph.launch(stream)
        begin.record(stream)
        graph.launch(stream)
        end.record(stream)
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(begin, end) * 1e3 / repeats)
    return float(statistics.median(times))
