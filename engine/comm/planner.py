"""Which way sums of which size go on this machine: each is tried at start, timed, and struck out where it is wrong.

Sizes between those that are tried go as the larger of their neighbours.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cupy
import numpy as np

from engine.comm.links import ONE_TRIP_BYTES, Links
from engine.comm.meeting import Meeting
from engine.comm.nccl import Nccl
from engine.errors import ConfigError
from engine.kernels.all_reduce import all_reduce
from engine.kernels.all_reduce_pieces import GROUP, all_reduce_pieces, int8_all_reduce
from engine.kernels.device import Device

Array = Any
Sum = Callable[[Array, Array | None], Array]  # (partial, residual or None); the answer may be written over either

SIZES = tuple(1 << exponent for exponent in range(12, 27, 2))  # bytes: 4 KiB to 64 MiB
REPEATS, LAUNCHES = 8, 3  # of a call in a graph, of the graph
LARGEST_PATTERN = 1 << 20  # numbers
INT8 = "int8"
INT8_ERROR = 0.05  # of the largest sum: more than the patterns can be off by


@dataclass(frozen=True, slots=True)
class Way:
    """One way to add up; most_bytes: of an array that it takes."""

    name: str
    sum: Sum
    most_bytes: int = 1 << 40
    is_exact: bool = True


@dataclass(frozen=True, slots=True)
class Plan:
    """names[i] is the way of arrays of up to sizes[i] bytes, the last one of all larger ones too."""

    sizes: tuple[int, ...]
    names: tuple[str, ...]

    def way(self, num_bytes: int) -> str:
        return next(
            (name for size, name in zip(self.sizes, self.names, strict=True) if num_bytes <= size), self.names[-1]
        )

    def text(self) -> str:
        """ "window to 64 KiB, window-pieces beyond" """
        borders = [
            f"{name} to {size >> 10} KiB"
            for size, name, following in zip(self.sizes, self.names, self.names[1:], strict=False)
            if name != following
        ]
        return ", ".join([*borders, f"{self.names[-1]} beyond" if borders else f"{self.names[-1]} for all sizes"])


def ways_of(links: Links, nccl: Nccl | None, device: Device, rotate: bool = True) -> dict[str, Way]:
    """All ways of a group, by name."""
    found = []
    for name, channel in links.channels.items():
        found.append(Way(name, _one_trip(channel, device), ONE_TRIP_BYTES))
    for name, exchange in links.exchanges.items():
        found.append(Way(f"{name}-pieces", _pieces(exchange, device)))
        found.append(Way(f"{name}-int8", _int8(exchange, rotate, device), is_exact=False))
    if nccl is not None:
        found.append(Way("nccl", _nccl(nccl)))
    return {way.name: way for way in found}


def _one_trip(channel: Any, device: Device) -> Sum:
    return lambda x, residual: all_reduce(x, channel, residual, device=device)


def _pieces(exchange: Any, device: Device) -> Sum:
    return lambda x, residual: all_reduce_pieces(x, exchange, residual, device=device)


def _int8(exchange: Any, rotate: bool, device: Device) -> Sum:
    return lambda x, residual: int8_all_reduce(x, exchange, residual, rotate=rotate, device=device)


def _nccl(nccl: Nccl) -> Sum:
    def add(x: Array, residual: Array | None) -> Array:
        total = nccl.all_reduce(x)
        if residual is None:
            return total
        residual += total
        return residual

    return add


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of one way at one size: microseconds of the slowest rank, or a problem."""

    way: str
    num_bytes: int
    us: float
    problem: str = ""


def measure(
    links: Links, ways: Mapping[str, Way], dtype: Any, sizes: Sequence[int] = SIZES, hidden_size: int = 8192
) -> list[Trial]:
    """Tries every way at every size that it takes, on all ranks together; a way that fails once is tried no more."""
    trials: list[Trial] = []
    for way in ways.values():
        for num_bytes in sizes:
            if num_bytes > way.most_bytes:
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
    if links.reports():
        return float("inf"), f"a rank waited in vain: {links.reports()[0]}"
    if wrong:
        return float("inf"), f"{wrong} numbers of {size} are wrong"
    return _time(links, way, x), ""


def _pattern(meeting: Meeting, size: int) -> list[np.ndarray[Any, Any]]:
    """Small whole numbers of every rank, whose sums are exact in every type."""
    place = np.arange(size, dtype=np.int32)
    return [((place * (rank + 3) + rank) % 13 - 6).astype(np.float32) for rank in range(meeting.size)]


def _time(links: Links, way: Way, x: Array) -> float:
    stream = cupy.cuda.get_current_stream()
    residual = x.copy()
    x.view(np.uint16)[...] = 0
    way.sum(x, residual)
    stream.synchronize()
    stream.begin_capture()
    for _ in range(REPEATS):
        way.sum(x, residual)
    graph = stream.end_capture()
    times = []
    for _ in range(LAUNCHES):
        links.meeting.allgather(None)
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record(stream)
        graph.launch(stream)
        end.record(stream)
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(begin, end) * 1e3 / REPEATS)
    return float(min(times))


def choose(trials: Sequence[Trial], allowed: Callable[[str], bool], hidden_size: int) -> Plan:
    """The quickest allowed way of each size.

    Raises:
        ConfigError: none is left; says what became of each.
    """
    broken = {trial.way for trial in trials if trial.problem}
    sizes = sorted({trial.num_bytes for trial in trials})
    names = []
    for num_bytes in sizes:
        fitting = [
            trial
            for trial in trials
            if trial.num_bytes == num_bytes
            and trial.way not in broken
            and allowed(trial.way)
            and not (trial.way.endswith(INT8) and hidden_size % GROUP)
        ]
        if fitting:
            names.append((num_bytes, min(fitting, key=lambda trial: trial.us).way))
    if not names:
        problems = "; ".join(f"{trial.way}: {trial.problem}" for trial in trials if trial.problem)
        raise ConfigError(f"there is no way for ranks to add up: {problems or 'none that --allreduce allows'}")
    return Plan(tuple(size for size, _ in names), tuple(name for _, name in names))


def as_json(trials: Sequence[Trial]) -> str:
    return json.dumps([[trial.way, trial.num_bytes, round(trial.us, 2), trial.problem] for trial in trials])


def table(trials: Sequence[Trial]) -> str:
    """A line a way: microseconds by size."""
    lines = []
    for name in dict.fromkeys(trial.way for trial in trials):
        of_way = [trial for trial in trials if trial.way == name]
        times = [f"{trial.num_bytes >> 10} KiB {trial.us:.1f}" for trial in of_way if not trial.problem]
        problem = next((f"struck out: {trial.problem}" for trial in of_way if trial.problem), "")
        lines.append(f"  {name}: {', '.join([*times, *([problem] if problem else [])])}")
    return "\n".join(lines)
