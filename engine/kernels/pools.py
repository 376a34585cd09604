"""CuPy's pools of GPU memory and of pinned memory, over the driver, with a count of what they take of it.

While the engine starts, the pools grow as arrays are made. Then they are settled: what lasts stays where it is, and all
that is free goes back to the driver. In its place comes one piece that every step works in (a pool cuts its pieces, and
joins them again), and pieces of pinned memory for small copies. From then on nothing is allocated; if it is after all,
it is counted and reported.
"""

from __future__ import annotations

import logging
from typing import Any

import cupy

from engine.memory_plan import STEP, Buffer

logger = logging.getLogger(__name__)

SMALLEST_PINNED, LARGEST_PINNED = (
    64 << 10,
    4 << 20,
)  # bytes; pieces between are powers of two: they fit again
NUM_SMALLEST, NUM_LARGER = 16, 2  # pieces of each size that are kept


class Driver:
    """What the pools take memory of."""

    def __init__(self) -> None:
        self.num_late = 0  # allocations since is_settled
        self.is_settled = False

    def take(self, num_bytes: int) -> Any:
        self._count("GPU memory", num_bytes)
        return cupy.cuda.MemoryPointer(cupy.cuda.Memory(num_bytes), 0)

    def take_pinned(self, num_bytes: int) -> Any:
        self._count("pinned memory", num_bytes)
        return cupy.cuda.PinnedMemoryPointer(cupy.cuda.PinnedMemory(num_bytes), 0)

    def _count(self, what: str, num_bytes: int) -> None:
        if self.is_settled:
            self.num_late += 1
            logger.warning("%.1f MB of %s are allocated while serving: a step waits for it", num_bytes / 1e6, what)


class Pools:
    """Takes the place of CuPy's default pools, for arrays that are made from now on."""

    def __init__(self) -> None:
        self._driver = Driver()
        self._device = cupy.cuda.MemoryPool(self._driver.take)
        self._pinned = cupy.cuda.PinnedMemoryPool(self._driver.take_pinned)
        cupy.cuda.set_allocator(self._device.malloc)
        cupy.cuda.set_pinned_memory_allocator(self._lend_pinned)

    @property
    def num_late(self) -> int:
        """How often memory was taken of the driver since settle."""
        return self._driver.num_late

    @property
    def num_bytes(self) -> int:
        """Of GPU memory, lent or not."""
        return int(self._device.total_bytes())

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
        self._driver.is_settled = True

    def _lend_pinned(self, num_bytes: int) -> Any:
        if num_bytes <= LARGEST_PINNED:
            num_bytes = max(SMALLEST_PINNED, 1 << (num_bytes - 1).bit_length())
        return self._pinned.malloc(num_bytes)


def _pinned_pieces() -> list[tuple[int, int]]:
    """(bytes, how many) of pinned memory that is kept for copies."""
    sizes, size = [(SMALLEST_PINNED, NUM_SMALLEST)], 2 * SMALLEST_PINNED
    while size <= LARGEST_PINNED:
        sizes.append((size, NUM_LARGER))
        size *= 2
    return sizes
