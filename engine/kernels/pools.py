"""CuPy's pools of GPU memory and of pinned memory, and what they take of the driver.

While the engine starts, the pools grow as arrays are made. Then they are settled: what lasts stays where it is, and all
that is free goes back to the driver. In its place comes one piece that every step works in (a pool cuts its pieces, and
joins them again), and pieces of pinned memory for small copies. From then on nothing is allocated; if it is after all,
it is counted and reported.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cupy
import numpy as np

from engine.errors import ConfigError
from engine.memory_plan import STEP, Buffer

logger = logging.getLogger(__name__)

SMALLEST_PINNED, LARGEST_PINNED = 64 << 10, 4 << 20  # bytes; pieces between are powers of two: they fit again
NUM_SMALLEST, NUM_LARGER = 16, 2  # pieces of each size that are kept


class PinnedPool:
    """In place of CuPy's pool of pinned memory, which keeps pieces of the very size that was asked for."""

    def __init__(self) -> None:
        self.num_taken = 0  # allocations of the driver
        self._pool = cupy.cuda.PinnedMemoryPool(self._take)

    def malloc(self, num_bytes: int) -> Any:
        if num_bytes <= LARGEST_PINNED:
            num_bytes = max(SMALLEST_PINNED, 1 << (num_bytes - 1).bit_length())
        return self._pool.malloc(num_bytes)

    def _take(self, num_bytes: int) -> Any:
        self.num_taken += 1
        return cupy.cuda.PinnedMemoryPointer(cupy.cuda.PinnedMemory(num_bytes), 0)


class Pools:
    """Of the arrays that are made from now on; that of GPU memory is CuPy's own, which all of a process share."""

    def __init__(self) -> None:
        self._device = cupy.get_default_memory_pool()
        self._pinned = PinnedPool()
        self.trim()
        self._of_others = int(self._device.total_bytes())
        self._settled: tuple[int, int] | None = None  # bytes of GPU memory, allocations of pinned memory
        self._num_late = 0
        cupy.cuda.set_allocator(self._device.malloc)
        cupy.cuda.set_pinned_memory_allocator(self._pinned.malloc)

    @property
    def num_bytes(self) -> int:
        """Of GPU memory that was taken since, lent or not."""
        return int(self._device.total_bytes()) - self._of_others

    def buffers(self) -> tuple[Buffer, ...]:
        """Of pinned memory, when settled."""
        num_bytes = sum(size * count for size, count in _pinned_pieces())
        return (Buffer("small copies", num_bytes, STEP, "host"),)

    def trim(self) -> None:
        """Gives back to the driver what nobody uses."""
        self._device.free_all_blocks()

    def settle(self, num_bytes: int) -> None:
        """num_bytes: of the piece that steps work in. Raises CuPy's OutOfMemoryError if there is no room for it."""
        self.trim()
        piece = self._device.malloc(num_bytes)
        pinned = [self._pinned.malloc(size) for size, count in _pinned_pieces() for _ in range(count)]
        del piece, pinned
        self._settled = self.num_bytes, self._pinned.num_taken

    def count_late(self) -> int:
        """How often memory was found to have been allocated since settle, with a warning when it is."""
        if self._settled is not None:
            found = self.num_bytes, self._pinned.num_taken
            if found[0] > self._settled[0] or found[1] > self._settled[1]:
                self._num_late += 1
                logger.warning(
                    "memory was allocated while serving, and a step waited for it: %.1f MB of the GPU's, and pinned "
                    "memory %d times",
                    (found[0] - self._settled[0]) / 1e6,
                    found[1] - self._settled[1],
                )
            self._settled = found
        return self._num_late


def _pinned_pieces() -> list[tuple[int, int]]:
    """(bytes, how many) of pinned memory that is kept for copies."""
    sizes, size = [(SMALLEST_PINNED, NUM_SMALLEST)], 2 * SMALLEST_PINNED
    while size <= LARGEST_PINNED:
        sizes.append((size, NUM_LARGER))
        size *= 2
    return sizes


def pinned_array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> cupy.ndarray:
    """In pinned memory of the host, at an address that is the GPU's too."""
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    pinned = cupy.cuda.allocpinned_memory(max(num_bytes, 1))
    memory = cupy.cuda.UnownedMemory(pinned.ptr, num_bytes, pinned)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))


@contextmanager
def room_for(what: str, advice: str) -> Iterator[None]:
    """Says what the GPU had no room for."""
    free, total = cupy.cuda.Device().mem_info
    try:
        yield
    except cupy.cuda.memory.OutOfMemoryError as error:
        raise ConfigError(
            f"the GPU has no room for {what}: {free / 1e6:,.0f} of its {total / 1e6:,.0f} MB were free; {advice}"
        ) from error
