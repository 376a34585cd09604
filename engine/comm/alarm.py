"""The alarm of ranks whose kernels wait for each other: who waits for whom, who gave up, and how all waiting is ended.

Kernels write it where every GPU of the group, and the host, can read it (cuda/include/channel.cuh).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.comm.board import GpuWait
from engine.errors import EngineDeadError
from engine.kernels.channel import Report, last_wait, reports

FRESH_S = 0.3  # kernels that wait say so again sooner
WINDOW, PEER, WINDOW_PIECES, PEER_PIECES, ISLANDS, ROWS = range(6)  # what kernels of a group wait on
NUM_LINKS = 8
COPIES = NUM_LINKS - 1  # what streams wait on: engine.comm.copy_watch
_SUMS = (
    "the sum {} through the window",
    "the sum {} through peer memory",
    "the sum {} in pieces through the window",
    "the sum {} in pieces through peer memory",
    "the sum {} over islands",
)


def link_id(group: int, link: int) -> int:
    """What kernels call a link of a group in the alarm; group 0 shares layers, others are neighbours in a pipeline."""
    return group * NUM_LINKS + link


def name_of(link: int, number: int) -> str:
    """The collective of this number, counted from the start, on a link by its link_id."""
    group, kind = divmod(link, NUM_LINKS)
    if kind == COPIES:
        return "copies through the window"
    if kind < len(_SUMS):
        return _SUMS[kind].format(number)
    return f"the hand-over {number} between stages" if group else f"the gathering {number} of rows"


class Alarm:
    """One group's, as this rank sees it."""

    def __init__(self, words: NDArray[np.uint32], rank: int, members: Sequence[int]) -> None:
        """
        Args:
            words: [alarm_words(number of members)] uint32, memory of the host.
            rank: this one's in the group.
            members: the ranks of the group, among all of the job.
        """
        self._words, self._rank, self._members = words, rank, members
        self._seen, self._seen_at = last_wait(words, rank), 0.0

    def give(self) -> None:
        """Ends all waiting: what kernels of the group give from now on is wrong."""
        self._words[0] = 1

    def clear(self) -> None:
        """Nobody waits, and waiting is possible again."""
        self._words[...] = 0

    @property
    def reports(self) -> list[Report]:
        """Of ranks that gave up waiting, by their numbers in the group."""
        return reports(self._words) if self._words[0] else []

    @property
    def problem(self) -> str:
        """Who gave up waiting for whom; "" where nobody has."""
        for report in self.reports:
            rank, peer = self._members[report.rank], self._members[report.peer]
            return (
                f"the GPU of rank {rank} waited {report.milliseconds / 1e3:.1f} s in vain for that of rank {peer} in "
                f"{name_of(report.channel, report.number)}"
            )
        return "the kernels of ranks have stopped waiting" if self._words[0] else ""

    @property
    def wait(self) -> GpuWait | None:
        """For whom this rank's GPU waits now, if it has done so for some tenths of a second."""
        found, now = last_wait(self._words, self._rank), time.monotonic()
        if found != self._seen:
            self._seen, self._seen_at = found, now
        if found is None or now - self._seen_at > FRESH_S:
            return None
        return GpuWait(self._members[found.peer], found.channel, found.number, found.milliseconds / 1e3)


class Watched(Protocol):
    """What a rank's GPU waits on. See Alarm."""

    @property
    def problem(self) -> str: ...

    @property
    def wait(self) -> GpuWait | None: ...

    def give(self) -> None: ...


class Alarms:
    """All that a rank's GPU waits on."""

    def __init__(self, alarms: Sequence[Watched] = ()) -> None:
        self._alarms = alarms

    def check(self) -> None:
        """Raises EngineDeadError where a rank has given up waiting for another: numbers since then are wrong."""
        if problem := self.problem:
            raise EngineDeadError(problem)

    @property
    def problem(self) -> str:
        return next((alarm.problem for alarm in self._alarms if alarm.problem), "")

    @property
    def wait(self) -> GpuWait | None:
        """The longest."""
        waits = [wait for alarm in self._alarms if (wait := alarm.wait) is not None]
        return max(waits, key=lambda wait: wait.seconds, default=None)

    def give(self) -> None:
        """Ends all waiting."""
        for alarm in self._alarms:
            alarm.give()
