"""Memory of other ranks' GPUs, which this one can write to: CUDA's handles between processes of a host."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np

from engine.comm.meeting import Meeting
from engine.errors import ConfigError

Array = Any

LEAST_BYTES = 4096  # that are lent to see who reaches them


def problems_of(meeting: Meeting) -> list[list[str]]:
    """[rank, peer], on all ranks: what keeps the GPU of a rank off memory of that of a peer; "" = nothing."""
    runtime = cupy.cuda.runtime
    own = int(runtime.malloc(LEAST_BYTES))
    row = []
    for peer, (handle, problem) in enumerate(meeting.allgather(_lend(own, meeting.rank))):
        try:
            if peer != meeting.rank and not problem:
                runtime.ipcCloseMemHandle(runtime.ipcOpenMemHandle(handle))
        except runtime.CUDARuntimeError as error:
            problem = f"the GPU of rank {meeting.rank} cannot reach that of rank {peer}: {error}"
        row.append("" if peer == meeting.rank else problem)
    found = meeting.allgather(row)
    runtime.free(own)
    return found


def _lend(own: int, rank: int) -> tuple[bytes, str]:
    """(handle, problem)"""
    try:
        return cupy.cuda.runtime.ipcGetMemHandle(own), ""
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return b"", f"rank {rank} cannot lend memory of its GPU: {error}"


class PeerMemory:
    """An array of zeros of every member's GPU, in the order of ranks; parts: [num_bytes] uint8 each, this rank's among
    them. All ranks of a meeting call it, each with those that it shares memory with as members.

    Raises:
        ConfigError: on all ranks, where one GPU cannot reach another.
    """

    def __init__(self, meeting: Meeting, num_bytes: int, members: range) -> None:
        runtime = cupy.cuda.runtime
        self._own = int(runtime.malloc(num_bytes))
        runtime.memset(self._own, 0, num_bytes)
        runtime.deviceSynchronize()
        self._opened: list[int] = []
        handle, problem = _lend(self._own, meeting.rank)
        self.parts: list[Array] = []
        others = meeting.allgather(handle)
        for rank in members:
            try:
                address = self._own if rank == meeting.rank else self._open(others[rank])
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
