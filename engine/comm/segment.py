"""Memory that all ranks of a host see: an anonymous file that one rank makes and the others open through /proc.

It has no name in any folder, so nothing stays of it however the ranks end.
"""

from __future__ import annotations

import ctypes
import mmap
import os

LINE = 64  # bytes of a cache line: what two ranks write is never in one


class Segment:
    """An anonymous file, mapped. The one who makes it keeps it open until all have opened it."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        self._descriptor = descriptor
        self.memory = mmap.mmap(descriptor, num_bytes)
        self.words = memoryview(self.memory).cast("q")  # int64

    @classmethod
    def make(cls, num_bytes: int) -> Segment:
        """A new one, of zeros. Pages take memory once they are written."""
        descriptor = os.memfd_create("glint-ranks", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, num_bytes)
        return cls(descriptor, num_bytes)

    @classmethod
    def open(cls, address: tuple[int, int, int]) -> Segment:
        """That of another process of this user. Raises OSError where there is no way to it."""
        pid, descriptor, num_bytes = address
        return cls(os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC), num_bytes)

    @property
    def address(self) -> tuple[int, int, int]:
        """What `open` takes."""
        return os.getpid(), self._descriptor, len(self.memory)

    def close_file(self) -> None:
        """The mapping stays."""
        os.close(self._descriptor)

    def word32(self, offset: int) -> ctypes.c_uint32:
        """The 32-bit word at a byte offset, for futex."""
        return ctypes.c_uint32.from_buffer(self.memory, offset)
