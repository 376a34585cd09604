"""What each rank of a host says of itself in shared memory, so that others can tell who is late, ill or gone.

Every rank writes its own record alone, in whole words; who reads one sees a little of the past.
"""

from __future__ import annotations

import os
import time
from collections import deque
from dataclasses import dataclass
from enum import IntEnum

from engine.comm.segment import Segment

RECORD_BYTES = 4096
_PID, _STATE, _DOING, _STEP, _COLLECTIVE, _SINCE, _HEART, _PLANNED, _TEXT_LENGTH = range(9)
_PEER, _LINK, _NUMBER, _PEER_SINCE = range(9, 13)
_TEXT = 128  # byte of a record where its text begins
TEXT_BYTES = RECORD_BYTES - _TEXT


class State(IntEnum):
    """How far a rank is."""

    ALIVE = 0
    DONE = 1  # it ends as it should
    FAILED = 2  # it ends with an error, which its text says
    LEAVING = 3  # it ends because of another


class Doing(IntEnum):
    """What it does now."""

    COMPUTING = 0
    WAITING = 1  # for other ranks, in a collective
    IDLE = 2  # there is no step for it
    MEETING = 3  # with all others, before there are steps
    FINISHING = 4  # it has launched a step, and waits for its own GPU


@dataclass(frozen=True, slots=True)
class GpuWait:
    """The GPU of a rank waits for that of another."""

    peer: int  # rank
    link: int  # see engine.comm.alarm.name_of
    number: int  # of the collective on this link, from the start
    seconds: float


class Record:
    """One rank's words."""

    def __init__(self, segment: Segment, number: int) -> None:
        first = number * RECORD_BYTES
        self._words = segment.words[first // 8 : (first + _TEXT) // 8]
        self._text = memoryview(segment.memory)[first + _TEXT : first + _TEXT + TEXT_BYTES]
        self._collective = 0
        self._announced: deque[int] = deque()

    # ---- by the rank itself

    def come(self) -> None:
        self._words[_PID] = os.getpid()
        self.beat()
        self.idle()

    def beat(self) -> None:
        """It is not stopped; said many times a second, whatever it does."""
        self._words[_HEART] = time.monotonic_ns()

    def announce(self, step: int) -> None:
        """A step that is to be computed after those before it."""
        self._announced.append(step)

    def begin(self) -> None:
        """The next step that was announced, if there is one."""
        if not self._announced:
            return
        self._collective = 0
        self._words[_COLLECTIVE] = 0
        self._words[_STEP] = self._announced.popleft()
        self._change(Doing.COMPUTING)

    def wait(self) -> None:
        """The next collective of the step."""
        self._collective += 1
        self._words[_COLLECTIVE] = self._collective
        self._change(Doing.WAITING)

    def finish(self) -> None:
        """What the step gives is waited for."""
        self._change(Doing.FINISHING)

    def go_on(self) -> None:
        self._change(Doing.COMPUTING)

    def idle(self) -> None:
        self._change(Doing.IDLE)

    def meet(self) -> None:
        self._change(Doing.MEETING)

    def _change(self, doing: Doing) -> None:
        self._words[_SINCE] = time.monotonic_ns()
        self._words[_DOING] = doing

    def plan(self, seconds: float) -> None:
        """How long the step is expected to take; rank 0 says it."""
        self._words[_PLANNED] = int(seconds * 1e9)

    def show(self, wait: GpuWait | None) -> None:
        """What its GPU waits for now."""
        if wait is None:
            self._words[_PEER] = 0
            return
        self._words[_LINK], self._words[_NUMBER] = wait.link, wait.number
        self._words[_PEER_SINCE] = time.monotonic_ns() - int(wait.seconds * 1e9)
        self._words[_PEER] = 1 + wait.peer

    def end(self, state: State, text: str = "") -> None:
        """Once: the first end is the one that counts."""
        if self.state is not State.ALIVE:
            return
        data = text.encode()[:TEXT_BYTES]
        self._text[: len(data)] = data
        self._words[_TEXT_LENGTH] = len(data)
        self._words[_STATE] = state

    # ---- by anybody

    @property
    def pid(self) -> int:
        return int(self._words[_PID])

    @property
    def state(self) -> State:
        return State(self._words[_STATE])

    @property
    def doing(self) -> Doing:
        return Doing(self._words[_DOING])

    @property
    def step(self) -> int:
        return int(self._words[_STEP])

    @property
    def collective(self) -> int:
        """1, 2, … within a step; 0 before the first."""
        return int(self._words[_COLLECTIVE])

    @property
    def seconds_since_change(self) -> float:
        return (time.monotonic_ns() - self._words[_SINCE]) / 1e9

    @property
    def seconds_since_beat(self) -> float:
        return (time.monotonic_ns() - self._words[_HEART]) / 1e9

    @property
    def planned_s(self) -> float:
        return float(self._words[_PLANNED]) / 1e9

    @property
    def gpu_wait(self) -> GpuWait | None:
        peer = int(self._words[_PEER])
        if not peer:
            return None
        seconds = (time.monotonic_ns() - self._words[_PEER_SINCE]) / 1e9
        return GpuWait(peer - 1, int(self._words[_LINK]), int(self._words[_NUMBER]), seconds)

    @property
    def text(self) -> str:
        """Why it has failed."""
        return bytes(self._text[: self._words[_TEXT_LENGTH]]).decode(errors="replace")
