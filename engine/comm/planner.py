"""Every way in which sums of ranks can go is tried at start: it is checked, and timed in a graph, size by size."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import cupy
import numpy as np

from engine.comm.links import Links
from engine.comm.meeting import Meeting
from engine.comm.ways import Trial, Way

Array = Any

SIZES = tuple(1 << exponent for exponent in range(12, 27, 2))  # bytes: 4 KiB to 64 MiB
REPEATS, LAUNCHES = 16, 3  # of a call in a graph, of the graph
LARGEST_PATTERN = 1 << 20  # numbers
INT8_ERROR = 0.05  # of the largest sum: more than the patterns can be off by


def measure(
    links: Links, ways: Mapping[str, Way], dtype: Any, sizes: Sequence[int] = SIZES, hidden_size: int = 8192
) -> list[Trial]:
    """Tries every way at every size that it takes, on all ranks together; a way that fails once is tried no more."""
    trials: list[Trial] = []
    for way in ways.values():
        for num_bytes in sizes:
            if not way.least_bytes <= num_bytes <= way.most_bytes:
                continue
            try:
                us, problem = _try(links, way, num_bytes, dtype, hidden_size)
            except Exception as error:  # whatever a way does here it would do in a step
                us, problem = float("inf"), f"{type(error).__name__}: {error}"
            found = links.meeting.allgather((us, problem))
            problem = next((text for _, text in found if text), "")
            trials.append(Trial(way.name, num_bytes, max(time for time, _ in found), problem))
            if problem:
                links.forget()
                break
    return trials


def _try(links: Links, way: Way, num_bytes: int, dtype: Any, hidden_size: int) -> tuple[float, str]:
    """(microseconds of a call in a graph, what is wrong). Large arrays repeat what small ones are made of."""
    size = num_bytes // dtype.itemsize
    columns, part = min(hidden_size, size), min(size, LARGEST_PATTERN)
    pattern = _pattern(links.meeting, part)
    x = cupy.empty(size, np.uint16)
    x.reshape(-1, part)[...] = cupy.asarray(pattern[links.meeting.rank].astype(dtype).view(np.uint16))
    x = x.view(dtype).reshape(-1, columns)
    found = way.sum(x.copy(), None).reshape(-1).view(np.uint16).reshape(-1, part)
    expected = np.sum(pattern, axis=0)
    if way.is_exact:
        wrong = int((found != cupy.asarray(expected.astype(dtype).view(np.uint16))).sum())
    else:
        first = cupy.asnumpy(found[0]).view(dtype).astype(np.float32)
        wrong = int((np.abs(first - expected) > INT8_ERROR * np.abs(expected).max()).sum())
    if problem := links.alarm.problem:
        return float("inf"), problem
    if wrong:
        return float("inf"), f"{wrong} numbers of {size} are wrong"
    return _time(links, way, x), ""


def _pattern(meeting: Meeting, size: int) -> list[np.ndarray[Any, Any]]:
    """Small whole numbers of every rank, whose sums are exact in every type."""
    place = np.arange(size, dtype=np.int32)
    return [((place * (rank + 3) + rank) % 13 - 6).astype(np.float32) for rank in range(meeting.size)]


def _time(links: Links, way: Way, x: Array) -> float:
    """Microseconds of a call. Ranks are in step after a first launch, whose time they have waited for each other in."""
    stream = cupy.cuda.get_current_stream()
    residual = x.copy()
    x.view(np.uint16)[...] = 0
    way.sum(x, residual)
    stream.synchronize()
    stream.begin_capture()
    for _ in range(REPEATS):
        way.sum(x, residual)
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
        times.append(cupy.cuda.get_elapsed_time(begin, end) * 1e3 / REPEATS)
    return float(statistics.median(times))
