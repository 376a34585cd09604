"""Whom ranks have waited for too long, and where it is: told from the board of a host."""

from __future__ import annotations

from collections.abc import Mapping, Set

from engine.comm.alarm import name_of
from engine.comm.board import Doing, Record

HANG_S, HANG_FACTOR = 2.0, 5.0  # a rank is waited for so long, or so many times the planned time of the step
RESULTS_S = 30.0  # a rank waits for its own GPU, where no other rank is late

Records = Mapping[int, Record]  # by rank


def where(record: Record) -> str:
    """Where in the steps a rank was last."""
    if record.doing is Doing.IDLE:
        return f", idle after step {record.step}" if record.step else ", before the first step"
    return f" in step {record.step}, collective {record.collective}"


def late(everybody: Records, stopped: Set[int]) -> str:
    """Who hangs, and who has waited for it; "" where nobody does. Who is stopped need not be waited for."""
    for number in stopped:
        record = everybody[number]
        if record.seconds_since_beat > HANG_S:
            seconds = f"{record.seconds_since_beat:.1f} s"
            return f"rank {number} (pid {record.pid}) has been stopped for {seconds}{where(record)}"
    planned = max(record.planned_s for record in everybody.values())
    limit = max(HANG_S, HANG_FACTOR * planned)
    return _late_kernels(everybody, limit if planned else RESULTS_S) or _late_calls(everybody, limit)


def _late_kernels(everybody: Records, limit: float) -> str:
    """By what GPUs wait for: the end of a chain of them, or who is the furthest behind in a ring."""
    waits = {number: wait for number, record in everybody.items() if (wait := record.gpu_wait) is not None}
    first = max(waits, key=lambda number: waits[number].seconds, default=None)
    if first is None or waits[first].seconds <= limit:
        return ""
    chain = [first]
    while chain[-1] in waits and chain[-1] not in chain[:-1]:
        chain.append(waits[chain[-1]].peer)
    ring = chain[chain.index(chain[-1]) : -1]
    last = min(ring, key=lambda number: waits[number].number, default=chain[-1])
    how = f"waits for rank {waits[last].peer}, which waits for it" if ring else "hangs"
    return _named(everybody, last, how, first, waits[first].seconds, limit)


def _late_calls(everybody: Records, limit: float) -> str:
    """By what ranks say that they wait for."""
    waiting = [number for number, record in everybody.items() if record.doing in (Doing.WAITING, Doing.FINISHING)]
    longest = max(waiting, key=lambda number: everybody[number].seconds_since_change, default=None)
    if longest is None:
        return ""
    waiter = everybody[longest]
    waited = waiter.seconds_since_change
    if waited <= limit:
        return ""
    others = [number for number in everybody if number not in waiting and everybody[number].step <= waiter.step]
    if waiter.doing is Doing.FINISHING:  # its own GPU is at it, unless a rank has not launched its part
        others = [number for number in others if _is_late(everybody[number], waiter, limit)]
        if not others and waited <= max(limit, RESULTS_S):
            return ""
        if not others:
            return _named(everybody, longest, "has a GPU that hangs", longest, waited, limit)
    behind = sorted(waiting, key=lambda number: (everybody[number].step, everybody[number].collective))[:1]
    last = max(others or behind, key=lambda number: everybody[number].seconds_since_change)
    return _named(everybody, last, "hangs" if others else "waits for what no other rank does", longest, waited, limit)


def _is_late(record: Record, waiter: Record, limit: float) -> bool:
    """Whether it has not launched its part of the step, or not even taken its plan."""
    is_behind = record.doing is Doing.COMPUTING or record.step < waiter.step
    return is_behind and record.seconds_since_change > limit


def _named(everybody: Records, last: int, how: str, waiter: int, waited: float, limit: float) -> str:
    record, other = everybody[last], everybody[waiter]
    wait = other.gpu_wait
    what = "" if wait is None else f", for {name_of(wait.link, wait.number)}"
    return (
        f"rank {last} (pid {record.pid}) {how}{where(record)}: rank {waiter} has waited for {waited:.1f} s in step "
        f"{other.step}, collective {other.collective}{what} (limit {limit:.1f} s)"
    )
