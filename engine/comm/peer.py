"""Memory of other ranks' GPUs, which this one can write to: CUDA's handles between processes of a host."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np

from engine.comm.meeting import Meeting
from engine.errors import ConfigError

Array = Any


class PeerMemory:
    """An array of zeros of every rank's GPU, by rank; parts: [num_bytes] uint8 each, this rank's among them.

    Raises:
        ConfigError: on all ranks, where one GPU cannot reach another.
    """

    def __init__(self, meeting: Meeting, num_bytes: int) -> None:
        runtime = cupy.cuda.runtime
        self._own = int(runtime.malloc(num_bytes))
        runtime.memset(self._own, 0, num_bytes)
        runtime.deviceSynchronize()
        self._opened: list[int] = []
        problem = ""
        try:
            handle = runtime.ipcGetMemHandle(self._own)
        except runtime.CUDARuntimeError as error:
            handle, problem = b"", f"rank {meeting.rank} cannot lend memory of its GPU: {error}"
        self.parts: list[Array] = []
        for rank, other in enumerate(meeting.allgather(handle)):
            try:
                address = self._own if rank == meeting.rank else self._open(other)
            except runtime.CUDARuntimeError as error:
                problem = problem or f"the GPU of rank {meeting.rank} cannot reach that of rank {rank}: {error}"
                break
            memory = cupy.cuda.UnownedMemory(address, num_bytes, self)
            self.parts.append(cupy.ndarray((num_bytes,), np.uint8, cupy.cuda.MemoryPointer(memory, 0)))
        problems = [text for text in meeting.allgather(problem) if text]
        if problems:
            self.close()
            raise ConfigError("; ".join(problems))

    def _open(self, handle: bytes) -> int:
        address = int(cupy.cuda.runtime.ipcOpenMemHandle(handle))
        self._opened.append(address)
        return address

    def close(self) -> None:
        """Nothing may use it any more."""
        for address in self._opened:
            cupy.cuda.runtime.ipcCloseMemHandle(address)
        cupy.cuda.runtime.free(self._own)
        self._opened.clear()
