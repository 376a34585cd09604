"""Weights in a GPU's memory: tensors come up through two pinned buffers, one filled while the other is copied.

Words of 4 bits are put in the order of our kernels there, a layer at a time, by a kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import cupy
import numpy as np
from numpy.typing import NDArray

from engine.checkpoint.stored_tensor import Bytes, StoredTensor, open_bytes, read_into
from engine.checkpoint.stored_words import TYPES, StoredWords, pack_words
from engine.kernels.device import Device
from engine.kernels.repack import MAX_PARTS, Part, repack4
from engine.system import usable_cores

Array = Any

STAGING_BYTES, NUM_STAGING = 64 << 20, 2
PART_BYTES = 4 << 20  # that a thread reads at a time
# types of files whose bytes need no conversion
AS_STORED = {"BF16": "bfloat16", "F16": "float16", "I8": "int8", "F8_E4M3": "uint8", "I32": "int32"}


class GpuStore:
    """bfloat16 or float16 on the current GPU; see engine.checkpoint.store.Store.

    All copies go over the stream that is the current one when the store is made, which is also the one that memory from
    the pool is ordered by: an array may be read, or its memory given to another, with no wait for what was copied.
    """

    itemsize = 2

    def __init__(self, dtype: Any, device: Device) -> None:
        self._dtype, self._device = np.dtype(dtype), device
        self._team = ThreadPoolExecutor(usable_cores())
        self._stream = cupy.cuda.get_current_stream()
        self._staging: list[Any] = []
        self._free = [cupy.cuda.Event(disable_timing=True) for _ in range(NUM_STAGING)]
        self._turn = 0

    def empty(self, shape: tuple[int, ...], dtype: Any = None) -> Array:
        try:
            return cupy.empty(shape, self._dtype if dtype is None else dtype)
        except cupy.cuda.memory.OutOfMemoryError as error:
            free, total = cupy.cuda.Device().mem_info
            raise MemoryError(f"{free / 1e6:,.0f} of the GPU's {total / 1e6:,.0f} MB are free") from error

    def read(self, tensor: StoredTensor, target: Array) -> None:
        if not target.flags.c_contiguous:
            whole = self.empty(target.shape, target.dtype)
            self.read(tensor, whole)
            target[...] = whole
            return
        if AS_STORED.get(tensor.dtype) == target.dtype.name and not tensor.n_interleaved_heads:
            self._read(tensor, target)
            return
        decoded = np.empty(target.shape, np.float32)
        read_into(tensor, decoded)
        self.write(decoded, target)

    def write(self, values: NDArray[np.float32], target: Array) -> None:
        with np.errstate(over="ignore"):  # past float16's range: infinite, reported by the model's checks
            self._copy(values.astype(self._dtype).reshape(-1).view(np.uint8), target)

    def put(self, array: NDArray[Any]) -> Array:
        room = self.empty(array.shape, array.dtype)
        self._copy(np.ascontiguousarray(array).reshape(-1).view(np.uint8), room)
        return room

    def repack(self, stored: StoredWords) -> dict[str, Array]:
        if len(stored.parts) > MAX_PARTS:
            return {name: self.put(array) for name, array in pack_words(stored).items()}
        parts = [
            Part(
                part.rows,
                self._as_it_is(part.words),
                self._as_it_is(part.scales),
                None if part.zeros is None else self._as_it_is(part.zeros),
            )
            for part in stored.parts
        ]
        return repack4(
            *(stored.layout, parts, stored.in_features, stored.group_size),
            device=self._device,
            zero_offset=stored.zero_offset,
            gated=stored.gated,
            order=None if stored.order is None else self.put(stored.order),
            row_order=None if stored.row_order is None else self.put(stored.row_order),
        )

    def _as_it_is(self, tensor: StoredTensor) -> Array:
        room = self.empty(tensor.shape, TYPES[tensor.dtype])
        self._read(tensor, room)
        return room

    def random_words(self, shape: tuple[int, ...], seed: tuple[int, int]) -> Array:
        words = self.empty(shape, np.uint32)
        generator = cupy.random.default_rng(seed[0] << 32 | seed[1])
        flat, step = words.reshape(-1), STAGING_BYTES // 4
        for first in range(0, flat.size, step):
            part = flat[first : first + step]
            part[...] = generator.integers(0, 2**32, part.size, dtype=np.uint32)
        return words

    def fill_normally(self, array: Array, seed: tuple[int, int], std: float) -> None:
        generator = cupy.random.default_rng(seed[0] << 32 | seed[1])
        flat = array.reshape(-1)
        step = STAGING_BYTES // 4
        for first in range(0, flat.size, step):
            part = flat[first : first + step]
            part[...] = generator.standard_normal(part.size, dtype=np.float32) * np.float32(std)

    def _read(self, tensor: StoredTensor, target: Array) -> None:
        with open_bytes(tensor) as fill:
            self._send(fill, tensor.num_bytes, target)

    def _copy(self, raw: Bytes, target: Array) -> None:
        self._send(lambda part, first: np.copyto(part, raw[first : first + part.size]), raw.size, target)

    def _send(self, fill: Callable[[Bytes, int], None], num_bytes: int, target: Array) -> None:
        """fill(part, first): the bytes from `first` on into a part of a buffer, by several threads at once."""
        if not self._staging:
            self._staging = [
                np.frombuffer(cupy.cuda.alloc_pinned_memory(STAGING_BYTES), np.uint8, STAGING_BYTES)
                for _ in range(NUM_STAGING)
            ]
        for first in range(0, num_bytes, STAGING_BYTES):
            size = min(STAGING_BYTES, num_bytes - first)
            staging, free = self._staging[self._turn], self._free[self._turn]
            self._turn = (self._turn + 1) % NUM_STAGING
            free.synchronize()
            places = range(0, size, PART_BYTES)
            parts = [staging[place : min(place + PART_BYTES, size)] for place in places]
            list(self._team.map(fill, parts, [first + place for place in places]))
            (target.data + first).copy_from_host_async(staging.ctypes.data, size, self._stream)
            free.record(self._stream)

    def finish(self) -> None:
        """Waits until everything has arrived."""
        self._team.shutdown()
        self._stream.synchronize()
        self._staging = []
