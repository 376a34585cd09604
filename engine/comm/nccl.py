"""NCCL's all-reduce, for links on which it is the quickest. Its order of sums is its own for more than two ranks."""

from __future__ import annotations

import importlib
from typing import Any

import cupy
import ml_dtypes
import numpy as np

from engine.comm.meeting import Meeting
from engine.errors import ConfigError

Array = Any

SUM = 0
TYPES = {np.dtype(np.float16): 6, np.dtype(np.float32): 7, np.dtype(ml_dtypes.bfloat16): 9}  # of ncclDataType_t


class Nccl:
    """A communicator of NCCL over a group of ranks, on CuPy's current stream; in graphs too.

    Raises:
        ConfigError: on all ranks, where one has no NCCL, or it does not start.
    """

    def __init__(self, meeting: Meeting) -> None:
        problem, first = "", None
        try:
            library = importlib.import_module("cupy.cuda.nccl")
            if not library.available:
                problem = "NCCL is not installed"
            elif meeting.rank == 0:
                first = library.get_unique_id()
        except Exception as error:  # of a library that cannot be loaded, by whatever name
            problem = f"NCCL: {error}"
        found = meeting.allgather((problem, first))
        self._agree([text for text, _ in found])
        try:
            self._comm = library.NcclCommunicator(meeting.size, found[0][1], meeting.rank)
        except library.NcclError as error:
            problem = f"NCCL: {error}"
        self._agree(meeting.allgather(problem))

    @staticmethod
    def _agree(problems: list[str]) -> None:
        if any(problems):
            raise ConfigError(next(filter(None, problems)))

    def all_reduce(self, x: Array) -> Array:
        """The sum of the ranks' x, written over it."""
        stream = cupy.cuda.get_current_stream().ptr
        self._comm.allReduce(x.data.ptr, x.data.ptr, x.size, TYPES[x.dtype], SUM, stream)
        return x

    def close(self) -> None:
        """Gives its memory back at once. The library's own way at the end of an object waits for the other ranks'."""
        cupy.cuda.Device().synchronize()
        self._comm.abort()
