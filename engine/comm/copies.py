"""Sums of ranks by the GPUs' copy engines: through the host's window, without a multiprocessor until all is there.

A kernel that waits takes multiprocessors from the products beside it, and finds none while a large product has them
all; a copy needs none. Streams wait for words in the window by operations of the GPU's front end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cupy
import numpy as np
from cuda.bindings import driver

from engine.comm.copy_order import NUM_LANES, NUM_PLACES, PLACE_BYTES, Piece, cut, exchange
from engine.comm.copy_watch import CopyWatch
from engine.comm.host_window import HostWindow
from engine.comm.meeting import Meeting
from engine.kernels.device import Device
from engine.kernels.gpu import check

Array = Any

TO_HOST, FROM_HOST = 2, 1  # cudaMemcpyKind
EQUAL = int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ)


class Copies:
    """What ranks of a host copy to each other through, one array at a time.

    Raises:
        ConfigError: on all ranks, where there is no window of the host.
    """

    def __init__(self, meeting: Meeting) -> None:
        self.rank, self.size = meeting.rank, meeting.size
        self._words_bytes = 4096 * -(-4 * self.size * self.size * NUM_PLACES // 4096)
        self._window = HostWindow(meeting, self._words_bytes + self.size * NUM_PLACES * PLACE_BYTES)
        self._words = int(self._window.array.data.ptr)
        self._places = self._window.host.ctypes.data + self._words_bytes
        self._streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2 * NUM_LANES)]
        self._begun = cupy.cuda.Event(disable_timing=True)
        self._ended = [cupy.cuda.Event(disable_timing=True) for _ in self._streams]

    def gather(self, x: Array, device: Device) -> Array:
        """x of the other ranks, [size − 1, …], where all bring a contiguous array of one shape and type."""
        others = device.empty((self.size - 1, *x.shape), x.dtype)
        caller = cupy.cuda.get_current_stream()
        self._begun.record(caller)
        for stream in self._streams:
            stream.wait_event(self._begun)
        lanes = [_CopyLane(self, stream, int(x.data.ptr), int(others.data.ptr), x.nbytes) for stream in self._streams]
        exchange(cut(x.nbytes), lanes[:NUM_LANES], lanes[NUM_LANES:], self.rank, self.size)
        for stream, ended in zip(self._streams, self._ended, strict=True):
            ended.record(stream)
            caller.wait_event(ended)
        return others

    def watch(self, members: Sequence[int]) -> CopyWatch:
        """members: the ranks of the group, among all of the job."""
        words = self._window.host[: 4 * self.size * self.size * NUM_PLACES].view(np.uint32)
        return CopyWatch(words.reshape(self.size, self.size, NUM_PLACES), self.rank, members)

    def word(self, sender: int, receiver: int, place: int) -> int:
        """Its address for the GPU."""
        return self._words + 4 * ((sender * self.size + receiver) * NUM_PLACES + place)

    def place(self, sender: int, place: int) -> int:
        """Its address on the host."""
        return self._places + (sender * NUM_PLACES + place) * PLACE_BYTES

    def close(self) -> None:
        """Nothing may use it any more, on any rank."""
        self._window.close()


class _CopyLane:
    """See Lane. A stream; x, others: addresses on the GPU; num_bytes: of x."""

    def __init__(self, copies: Copies, stream: Any, x: int, others: int, num_bytes: int) -> None:
        self._copies, self._stream = copies, stream.ptr
        self._x, self._others, self._num_bytes = x, others, num_bytes

    def wait(self, sender: int, receiver: int, place: int, value: int) -> None:
        word = self._copies.word(sender, receiver, place)
        check(driver.cuStreamWaitValue32(self._stream, word, value, EQUAL), "waiting for a word of the window")

    def write(self, sender: int, receiver: int, place: int, value: int) -> None:
        word = self._copies.word(sender, receiver, place)
        check(driver.cuStreamWriteValue32(self._stream, word, value, 0), "writing a word of the window")

    def put(self, piece: Piece) -> None:
        to = self._copies.place(self._copies.rank, piece.place)
        cupy.cuda.runtime.memcpyAsync(to, self._x + piece.begin, piece.size, TO_HOST, self._stream)

    def take(self, sender: int, piece: Piece) -> None:
        nth = sender - (sender > self._copies.rank)
        to = self._others + nth * self._num_bytes + piece.begin
        cupy.cuda.runtime.memcpyAsync(to, self._copies.place(sender, piece.place), piece.size, FROM_HOST, self._stream)
