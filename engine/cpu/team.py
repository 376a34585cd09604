"""Threads for the matrix products of a CPU.

BLAS has threads of its own, but they wait by spinning and yielding: with anything else running on the machine a
product of a few rows then takes several times as long as on one thread (measured on 2 cores with a load of 6:
121 products of one row 849 ms on BLAS's two threads, 159 ms on one, 167 ms here). These threads sleep while they
wait, so BLAS is kept to one thread, and each member multiplies its share of the columns.
"""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]

# Multiplications of a share below which waking its thread costs more than the share saves: on 2 cores with one row, 121
# products take 60 ms on one thread, 70 ms if all are shared, 51 ms if those from 2²⁰ up are.
MIN_SHARE = 1 << 19


class _Member:
    """A thread that multiplies when told to. Locks hand the turn over: each is released by the other side."""

    def __init__(self) -> None:
        self._go = threading.Lock()
        self._done = threading.Lock()
        self._go.acquire()
        self._done.acquire()
        self._job: tuple[Float32, Float32, Float32] | None = None
        self._error: Exception | None = None
        threading.Thread(target=self._work, name="matmul", daemon=True).start()

    def start(self, x: Float32, columns: Float32, out: Float32) -> None:
        """Begins out = x @ columns."""
        self._job = (x, columns, out)
        self._go.release()

    def finish(self) -> None:
        """Waits for it; raises what it raised."""
        self._done.acquire()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _work(self) -> None:
        while True:
            self._go.acquire()
            assert self._job is not None
            x, columns, out = self._job
            try:
                np.matmul(x, columns, out=out)
            except Exception as error:  # it belongs to the caller
                self._error = error
            self._job = None
            self._done.release()


class Team:
    """The calling thread and num_threads − 1 others. Used by one thread at a time."""

    def __init__(self, num_threads: int) -> None:
        self._members = [_Member() for _ in range(num_threads - 1)]

    def matmul(self, x: Float32, columns: Float32) -> Float32:
        """x [num_tokens, in_features] @ columns [in_features, out_features] → [num_tokens, out_features] float32."""
        num_tokens, out_features = x.shape[0], columns.shape[1]
        num_shares = min(len(self._members) + 1, x.size * out_features // MIN_SHARE)
        if num_shares < 2:
            product: Float32 = np.matmul(x, columns)
            return product
        out = np.empty((num_tokens, out_features), np.float32)
        bounds = [out_features * share // num_shares for share in range(num_shares + 1)]
        helpers = self._members[: num_shares - 1]
        for member, low, high in zip(helpers, bounds[1:], bounds[2:], strict=False):
            member.start(x, columns[:, low:high], out[:, low:high])
        try:
            np.matmul(x, columns[:, : bounds[1]], out=out[:, : bounds[1]])
        finally:
            for member in helpers:
                member.finish()
        return out
