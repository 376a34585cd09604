"""A communicator that says on the board when its rank waits for others, and in which collective of the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from engine.comm.board import Record
from engine.comm.communicator import Communicator, StepSum
from engine.weights import Norm

Array = Any
T = TypeVar("T")


class Numbered:
    """See engine.comm.communicator.Communicator."""

    def __init__(self, comm: Communicator, record: Record) -> None:
        self.is_first, self.is_last, self.shares_ids = comm.is_first, comm.is_last, comm.shares_ids
        self.alarms = comm.alarms
        self._comm, self._record = comm, record

    def norm(self, x: Array, norm: Norm) -> Array:
        return self._comm.norm(x, norm)

    def reduce(self, partial: Array) -> Array:
        self._record.wait()
        total = self._comm.reduce(partial)
        self._record.go_on()
        return total

    def reduce_add_norm(self, partial: Array, residual: Array, norm: Norm, which: StepSum) -> tuple[Array, Array]:
        self._record.wait()
        both = self._comm.reduce_add_norm(partial, residual, norm, which)
        self._record.go_on()
        return both

    def reduce_add(self, partial: Array, residual: Array, which: StepSum) -> Array:
        self._record.wait()
        total = self._comm.reduce_add(partial, residual, which)
        self._record.go_on()
        return total

    def send(self, residual: Array) -> None:
        self._record.wait()
        self._comm.send(residual)
        self._record.go_on()

    def receive(self, num_tokens: int) -> Array:
        self._record.begin()  # rank 0 hands on several plans before it comes to its stage of the first
        self._record.wait()
        residual = self._comm.receive(num_tokens)
        self._record.go_on()
        return residual

    def gather_logits(self, part: Array) -> Array | None:
        self._record.wait()
        logits = self._comm.gather_logits(part)
        self._record.go_on()
        return logits

    def share_ids(self, ids: Array | None, num_ids: int) -> Array:
        self._record.wait()
        shared = self._comm.share_ids(ids, num_ids)
        self._record.go_on()
        return shared

    def settle(self, get: Callable[[], T]) -> T:
        self._record.finish()
        result = self._comm.settle(get)
        self._record.go_on()
        return result

    def close(self) -> None:
        self._comm.close()
