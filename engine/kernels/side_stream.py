"""A second stream of the GPU, for sums over ranks while the first computes. Events on the device order the two; the
host waits for neither, and a graph that is captured over both has the same order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import cupy

Array = Any
T = TypeVar("T")

PRIORITY = -1  # before the default, 0: a sum's few blocks are not kept waiting by the thousands of a product
NUM_EVENTS = 8  # of which those of two works are in use at a time: each half has one


class SideStream:
    """See engine.comm.side.Side. The caller's stream is the one that is current when start is called.

    Memory comes from where the caller's comes from. A pool gives what the host has let go of to whoever asks next on
    the caller's stream, so all that a work asked for is kept until the caller's stream has waited for it.
    """

    def __init__(self) -> None:
        self._stream = cupy.cuda.Stream(non_blocking=True, priority=PRIORITY)
        self._events = [cupy.cuda.Event(disable_timing=True) for _ in range(NUM_EVENTS)]
        self._turn = 0
        self._num_started = self._num_done = 0  # done: as the caller's stream has it

    def start(self, work: Callable[[], T]) -> Callable[[], T]:
        caller = cupy.cuda.get_current_stream()
        allocate = cupy.cuda.get_allocator()
        kept: list[Any] = [work]

        def malloc(num_bytes: int) -> Any:
            with _current(caller):
                memory = allocate(num_bytes)
            kept.append(memory)
            return memory

        self._order(caller, self._stream)
        with _current(self._stream), cupy.cuda.using_allocator(malloc):
            result = work()
        done = self._event()
        done.record(self._stream)
        self._num_started += 1
        number = self._num_started

        def take() -> T:
            if number > self._num_done:
                caller.wait_event(done)
                self._num_done = number
            kept.clear()
            return result

        return take

    def catch_up(self) -> None:
        """The caller's stream waits for all that was started: a capture ends with what it began."""
        if self._num_done < self._num_started:
            self._order(self._stream, cupy.cuda.get_current_stream())
            self._num_done = self._num_started

    def join(self, first: Array, second: Array) -> Array:
        whole = cupy.empty((first.shape[0] + second.shape[0], *first.shape[1:]), first.dtype)
        for rows, part in ((whole[: first.shape[0]], first), (whole[first.shape[0] :], second)):
            rows.data.copy_from_device_async(part.data, part.nbytes)
        return whole

    def _order(self, before: Any, after: Any) -> None:
        """What is launched on after from now on waits for what was launched on before."""
        event = self._event()
        event.record(before)
        after.wait_event(event)

    def _event(self) -> Any:
        self._turn = (self._turn + 1) % NUM_EVENTS
        return self._events[self._turn]


@contextmanager
def _current(stream: Any) -> Iterator[None]:
    """For a while; then the stream before, which `with stream` forgets where that one was made current by use()."""
    before = cupy.cuda.get_current_stream()
    stream.use()
    try:
        yield
    finally:
        before.use()
