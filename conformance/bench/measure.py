"""One row: is its answer right, and how long does it take."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from conformance.bench.place import Place
from conformance.bench.row import Call, Rates, Row, Sample, limit_of
from conformance.bench.table import Figure
from conformance.bench.timing import COLD_BYTES, Timer
from conformance.compare import Comparison, compare
from engine.kernels.device import Instance
from ref.numerics import round_to

Rivals = Callable[[str, Mapping[str, Any]], Mapping[str, Callable[[], Any]]]

FEWEST, MOST = 3, 128  # calls with buffers of their own
LONG_ENOUGH = 2000.0  # µs that the launches between two events should take
MOST_PASSES = 16
TOO_GOOD = 1.5  # times as quick as the limit, which is a measurement itself


def num_calls(num_bytes: int) -> int:
    """Calls whose buffers are more than any cache holds."""
    return min(max(math.ceil(COLD_BYTES / num_bytes), FEWEST), MOST)


def num_passes(num_bytes: int, limit: float) -> int:
    """How often these calls follow each other: once, unless they push each other out of the caches."""
    count = num_calls(num_bytes)
    if count * num_bytes < COLD_BYTES:
        return 1
    return min(max(math.ceil(LONG_ENOUGH / (limit * count)), 1), MOST_PASSES)


def measure(row: Row, place: Place, timer: Timer, rates: Rates, rivals: Rivals | None = None) -> Figure:
    """Runs each call once, looks at the answer of the first, and times all.

    rivals: gives more of them to run for comparison, by op and inputs.
    """
    place.device.launches.clear()
    calls, answers = [], []
    comparison = Comparison(math.inf, 0.0)
    for number in range(num_calls(row.work.num_bytes)):
        call = row.make(place)
        look = call.watch() if number == 0 else None
        answers.append(call.run())
        if look is not None:
            comparison = worst([compared(sample) for sample in look(answers[0])])
        calls.append(call)
    limit = limit_of(row.work, rates)
    passes = num_passes(row.work.num_bytes, limit)
    launches = list(place.device.launches)
    time = timer.microseconds([launch.again for launch in launches] * passes) / (passes * len(calls))
    kernels = tuple(dict.fromkeys(launch.kernel for launch in launches))
    others = _times(calls, passes, timer, rivals and (lambda call: rivals(row.op, call.inputs)))
    if None in kernels and row.peer in others:
        others[row.peer] = time  # the same launches: two runs of them would differ by chance alone
    return Figure(
        op=row.op,
        name=row.name,
        microseconds=time,
        work=row.work,
        limit=limit,
        goal=row.goal,
        peer=row.peer,
        peer_tflops=row.peer_tflops,
        others=others,
        kernels=kernels,
        error=comparison.error,
        tolerance=comparison.limit,
        problem=comparison.problem or _impossible(time, limit, row.work.num_bytes),
    )


def _impossible(time: float, limit: float, num_bytes: int) -> str:
    """What is wrong with a time that no GPU can have: whatever was timed was not the kernel."""
    if num_calls(num_bytes) * num_bytes < COLD_BYTES or time > limit / TOO_GOOD:  # from a cache it may be quicker
        return ""
    return f"took {time:.3g} µs, where memory and tensor cores need {limit:.3g}: it was not the kernel that was timed"


def _times(
    calls: Sequence[Call], passes: int, timer: Timer, more: Callable[[Call], Mapping[str, Any]] | None
) -> dict[str, float]:
    """Of the rivals, by name."""
    found = [{**call.rivals, **(more(call) if more else {})} for call in calls]
    times = {}
    for name in found[0]:
        launches = [rival[name] for rival in found]
        launches[0]()
        times[name] = timer.microseconds(launches * passes) / (passes * len(calls))
    return times


def compared(sample: Sample) -> Comparison:
    """As the cases are compared; integers must be equal."""
    truth = sample.reference(np.float64, None)
    if not np.issubdtype(truth.dtype, np.floating):
        result = compare(sample.actual, truth, truth, sample.tolerance, sample.storage)
    else:
        yardstick = round_to(sample.reference(np.float32, sample.storage), sample.storage)
        result = compare(sample.actual.astype(np.float32), truth, yardstick, sample.tolerance, sample.storage)
    return Comparison(result.error, result.limit, f"{sample.name} {result.problem}" if result.problem else "")


def worst(comparisons: Sequence[Comparison]) -> Comparison:
    return max(comparisons, key=lambda comparison: comparison.share)


def kernels_of_rows(rows: Sequence[Row], places: Mapping[bool, Place]) -> list[Instance]:
    """What the rows launch, found on a device that launches nothing. places: of it, by Row.portable."""
    found: dict[Instance, None] = {}
    for row in rows:
        place = places[row.portable]
        place.device.launches.clear()
        with np.errstate(all="ignore"):  # answers are zeros
            row.make(place).run()
        found |= dict.fromkeys(launch.kernel for launch in place.device.launches if launch.kernel is not None)
    return list(found)
