"""For whom a rank's copies wait: read from the words that say which places are full (engine/comm/copy_order.py)."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.comm.alarm import COPIES, FRESH_S
from engine.comm.board import GpuWait
from engine.comm.copy_order import FULL


class CopyWatch:
    """Of one rank. What it has put and a rank has not taken shows that this one is behind: the GPUs' front ends, which
    wait for such words, say nothing themselves, and nothing but the end of a process ends their waiting."""

    def __init__(self, words: NDArray[np.uint32], rank: int, members: Sequence[int]) -> None:
        """
        Args:
            words: [sender, receiver, place], memory of the host.
            rank: this one's in the group.
            members: the ranks of the group, among all of the job.
        """
        self._words, self._rank, self._members = words, rank, members
        self._seen, self._since = b"", time.monotonic()

    @property
    def wait(self) -> GpuWait | None:
        """For whom, once nothing has moved for some tenths of a second."""
        mine, others = self._words[self._rank], self._words[:, self._rank]
        now, seen = time.monotonic(), mine.tobytes() + others.tobytes()
        if seen != self._seen:
            self._seen, self._since = seen, now
        left = (mine == FULL).sum(axis=1)
        if not left.any() or now - self._since < FRESH_S:
            return None
        return GpuWait(self._members[int(left.argmax())], COPIES, 0, now - self._since)

    @property
    def problem(self) -> str:
        """None: copies never give up."""
        return ""

    def give(self) -> None:
        """Ends nothing."""
