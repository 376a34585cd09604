"""Where ranks tell each other things before there is anything quicker."""

from __future__ import annotations

from typing import Any, Protocol


class Meeting(Protocol):
    """What is used of mpi4py.MPI.Intracomm. Every rank calls the same methods in the same order."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def allgather(self, sendobj: Any, /) -> list[Any]: ...
