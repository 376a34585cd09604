"""Memory of the host that all ranks of it and their GPUs see: the way between GPUs that cannot reach each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cupy
import numpy as np
from cuda.bindings import driver
from numpy.typing import NDArray

from engine.comm.meeting import Meeting
from engine.comm.segment import Segment
from engine.errors import ConfigError, KernelError
from engine.kernels.gpu import check

Array = Any

PORTABLE, MAPPED = 1, 2  # of cudaHostRegister
PAGE = 4096


class HostWindow:
    """Pinned memory of zeros that every rank of a meeting has mapped into its GPU.

    array: [num_bytes] uint8 of the GPU; host: the same bytes on this side.

    Raises:
        ConfigError: on all ranks, where one cannot open, pin or map it.
    """

    def __init__(self, meeting: Meeting, num_bytes: int, near: Sequence[slice] = ()) -> None:
        """near: what this rank reads most often; it lies near its cores, where a host has several NUMA nodes."""
        num_bytes = PAGE * -(-num_bytes // PAGE)
        made = Segment.make(num_bytes) if meeting.rank == 0 else None
        found = meeting.allgather(made and made.address)[0]
        problem = ""
        try:
            self._segment = made or Segment.open(found)
            self.host: NDArray[np.uint8] = np.frombuffer(self._segment.memory, np.uint8)
            for part in near:
                self.host[part][::PAGE] = 0  # who is the first to write gets the page; it was 0
        except OSError as error:
            problem = f"rank {meeting.rank} does not see the window of the host: {error}"
        self._agree(meeting.allgather(problem))
        try:
            self._address = self.host.ctypes.data
            cupy.cuda.runtime.hostRegister(self._address, num_bytes, PORTABLE | MAPPED)
            mapped = int(check(driver.cuMemHostGetDevicePointer(self._address, 0), "mapping memory of the host"))
            memory = cupy.cuda.UnownedMemory(mapped, num_bytes, self)
            self.array: Array = cupy.ndarray((num_bytes,), np.uint8, cupy.cuda.MemoryPointer(memory, 0))
        except (KernelError, cupy.cuda.runtime.CUDARuntimeError) as error:
            problem = f"rank {meeting.rank} has no window of the host of {num_bytes / 1e6:.0f} MB: {error}"
        self._agree(meeting.allgather(problem))
        self._segment.close_file()

    @staticmethod
    def _agree(problems: Sequence[str]) -> None:
        if any(problems):
            raise ConfigError("; ".join(filter(None, problems)))

    def close(self) -> None:
        """Nothing may use it any more."""
        cupy.cuda.runtime.hostUnregister(self._address)
