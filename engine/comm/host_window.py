"""Memory of the host that all ranks of it and their GPUs see: the way between GPUs that cannot reach each other."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np
from cuda.bindings import driver
from numpy.typing import NDArray

from engine.comm.meeting import Meeting
from engine.comm.segment import Segment
from engine.errors import ConfigError
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

    def __init__(self, meeting: Meeting, num_bytes: int) -> None:
        num_bytes = PAGE * -(-num_bytes // PAGE)
        made = Segment.make(num_bytes) if meeting.rank == 0 else None
        found = meeting.allgather(made and made.address)[0]
        problem = ""
        try:
            self._segment = made or Segment.open(found)
            self.host: NDArray[np.uint8] = np.frombuffer(self._segment.memory, np.uint8)
            self._address = self.host.ctypes.data
            cupy.cuda.runtime.hostRegister(self._address, num_bytes, PORTABLE | MAPPED)
            mapped = int(check(driver.cuMemHostGetDevicePointer(self._address, 0), "mapping memory of the host"))
            memory = cupy.cuda.UnownedMemory(mapped, num_bytes, self)
            self.array: Array = cupy.ndarray((num_bytes,), np.uint8, cupy.cuda.MemoryPointer(memory, 0))
        except (OSError, cupy.cuda.runtime.CUDARuntimeError) as error:
            problem = f"rank {meeting.rank} has no window of the host of {num_bytes / 1e6:.0f} MB: {error}"
        problems = [text for text in meeting.allgather(problem) if text]
        if problems:
            raise ConfigError("; ".join(problems))
        self._segment.close_file()

    def close(self) -> None:
        """Nothing may use it any more."""
        cupy.cuda.runtime.hostUnregister(self._address)
