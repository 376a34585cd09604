"""Weights in a GPU's memory: several threads read tensors into small pinned buffers, and each sends up what it reads.

No thread waits for another, and the buffers are few enough to stay in a processor's cache until they are copied. There
words of 4 bits are put in the order of our kernels, and other types of numbers become the store's, by kernels, while
the next are read.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import setitem
from typing import Any

import cupy
import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from engine.checkpoint.stored_tensor import Bytes, StoredTensor, open_bytes, read_into
from engine.checkpoint.stored_words import TYPES, StoredWords, pack_words, pick
from engine.kernels.device import Device
from engine.kernels.repack import MAX_PARTS, Part, repack4
from engine.system import usable_cores

Array = Any
Fill = Callable[[Bytes, int], None]  # (part, first): the bytes from `first` on into a part of a buffer

MAX_THREADS = 12
# Pinned memory of a thread: one piece is filled while the other is copied. From a file in memory 16 threads bring up
# 51 GB/s with pieces of 4 MB, 49 with 2, and 23 with 1: then Python is what they wait for. Beside a thread that plans
# and packs, 12 are quicker than 16 or 8.
PIECE_BYTES, NUM_PIECES = 4 << 20, 2
STAGING_BYTES = MAX_THREADS * NUM_PIECES * PIECE_BYTES
JOB_BYTES = 16 << 20  # of a file that is opened once
JOBS_AHEAD = 4  # that wait for each thread
LATER_BYTES = 128 << 20  # that may wait for a kernel beside those of the last tensor
CHUNK_BYTES = 32 << 20  # that is on the GPU in another type, or made at random, at a time
# types of files whose bytes need no conversion
AS_STORED = {"BF16": "bfloat16", "F16": "float16", "I8": "int8", "F8_E4M3": "uint8", "I32": "int32"}
# and those that the GPU converts
FLOATS = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}


class _Buffers(threading.local):
    """Pinned memory of a thread, and what tells that it has been copied."""

    free: deque[tuple[Bytes, int, Any]]  # a piece, its address, and an event


class GpuStore:
    """bfloat16 or float16 on the current GPU; see engine.checkpoint.store.Store.

    All copies go over the stream that is the current one when the store is made, which is also the one that memory from
    the pool is ordered by: an array may be read, or its memory given to another, with no wait for what was copied. But
    what was sent is on the stream only after flush.
    """

    itemsize = 2

    def __init__(self, dtype: Any, device: Device) -> None:
        self._dtype, self._device = np.dtype(dtype), device
        self._stream = cupy.cuda.get_current_stream()
        threads = min(usable_cores(), MAX_THREADS)
        self._pinned: list[Any] = []  # which copies read that are still under way when a thread has ended
        self._buffers = _Buffers()
        self._jobs_ahead = JOBS_AHEAD * threads
        number = cupy.cuda.Device().id
        self._team = ThreadPoolExecutor(threads, initializer=self._begin, initargs=(number,))
        for _ in range(threads):
            self._team.submit(int)  # nothing; so that they have their memory by the time that headers have been read
        self._sent: deque[Future[None]] = deque()  # not known to be on the stream
        self._later: deque[tuple[int, Sequence[Future[None]], Callable[[], None]]] = deque()  # what is done with it

    def empty(self, shape: tuple[int, ...], dtype: Any = None) -> Array:
        try:
            return cupy.empty(shape, self._dtype if dtype is None else dtype)
        except cupy.cuda.memory.OutOfMemoryError as error:
            free, total = cupy.cuda.Device().mem_info
            raise MemoryError(f"{free / 1e6:,.0f} of the GPU's {total / 1e6:,.0f} MB are free") from error

    def read(self, tensor: StoredTensor, target: Array) -> None:
        if target.flags.c_contiguous:
            self._read(tensor, target)
            return
        whole = self.empty(target.shape, target.dtype)
        self._then(whole.nbytes, self._read(tensor, whole), partial(setitem, target, ..., whole))

    def write(self, values: NDArray[np.float32], target: Array) -> None:
        self._copy(self._rounded(values), target)

    def put(self, array: NDArray[Any]) -> Array:
        room = self.empty(array.shape, array.dtype)
        self._copy(np.ascontiguousarray(array), room)
        return room

    def repack(self, stored: StoredWords) -> dict[str, Array]:
        if len(stored.parts) > MAX_PARTS:
            return {name: self.put(array) for name, array in pack_words(stored).items()}
        sent: list[Future[None]] = []

        def as_it_is(tensor: StoredTensor) -> Array:
            room = self.empty(tensor.shape, TYPES[tensor.dtype])
            sent.extend(self._send(lambda: open_bytes(tensor), room))
            return room

        def copied(array: NDArray[Any] | None) -> Array | None:
            if array is None:
                return None
            room = self.empty(array.shape, array.dtype)
            sent.extend(self._copy(array, room))
            return room

        if stored.is_picked:  # of a rank, with act-order
            parts = [
                Part(part.rows, copied(part.words), copied(part.scales), copied(part.zeros)) for part in pick(stored)
            ]
            orders = {}
        else:
            parts = [
                Part(
                    part.rows,
                    as_it_is(part.words),
                    as_it_is(part.scales),
                    None if part.zeros is None else as_it_is(part.zeros),
                )
                for part in stored.parts
            ]
            orders = {"order": copied(stored.order), "row_order": copied(stored.row_order)}
        tensors: dict[str, Array] = {}
        facts: dict[str, Any] = {"zero_offset": stored.zero_offset, "gated": stored.gated, **orders}

        def launch() -> None:
            sizes = stored.in_features, stored.group_size
            tensors.update(repack4(stored.layout, parts, *sizes, device=self._device, **facts))

        self._then(sum(part.words.nbytes for part in parts), sent, launch)
        return tensors

    def random_words(self, shape: tuple[int, ...], seed: tuple[int, int]) -> Array:
        words = self.empty(shape, np.uint32)
        generator = cupy.random.default_rng(seed[0] << 32 | seed[1])
        flat, step = words.reshape(-1), CHUNK_BYTES // 4
        for first in range(0, flat.size, step):
            part = flat[first : first + step]
            part[...] = generator.integers(0, 2**32, part.size, dtype=np.uint32)
        return words

    def fill_normally(self, array: Array, seed: tuple[int, int], std: float) -> None:
        generator = cupy.random.default_rng(seed[0] << 32 | seed[1])
        flat = array.reshape(-1)
        step = CHUNK_BYTES // 4
        for first in range(0, flat.size, step):
            part = flat[first : first + step]
            part[...] = generator.standard_normal(part.size, dtype=np.float32) * np.float32(std)

    def flush(self) -> None:
        self._catch_up(-1)
        while self._sent:
            self._sent.popleft().result()

    def finish(self) -> None:
        """Waits until everything has arrived."""
        self.flush()
        self._stream.synchronize()
        self._team.shutdown()

    # ---- inside

    def _begin(self, device: int) -> None:
        """A thread's."""
        cupy.cuda.runtime.setDevice(device)
        events = [cupy.cuda.Event(disable_timing=True) for _ in range(NUM_PIECES)]
        pinned = cupy.cuda.alloc_pinned_memory(NUM_PIECES * PIECE_BYTES)
        self._pinned.append(pinned)
        whole = np.frombuffer(pinned, np.uint8, NUM_PIECES * PIECE_BYTES)
        pieces = [(piece, int(piece.ctypes.data)) for piece in whole.reshape(NUM_PIECES, PIECE_BYTES)]
        self._buffers.free = deque((*piece, event) for piece, event in zip(pieces, events, strict=True))

    def _then(self, num_bytes: int, sent: Sequence[Future[None]], work: Callable[[], None]) -> None:
        """Does `work` when what it needs is on the stream, and what was to be done before it is done: while more is
        sent, or in flush. What words become takes memory only then, so there are never more at once than the weights
        and what was sent for the last of them; of numbers of another type there are LATER_BYTES too.
        """
        self._later.append((num_bytes, sent, work))
        self._catch_up(LATER_BYTES + num_bytes)

    def _catch_up(self, num_left: int) -> None:
        """Does work until the rest waits for no more than so many bytes."""
        while self._later and sum(num_bytes for num_bytes, _, _ in self._later) > num_left:
            _, sent, work = self._later.popleft()
            for future in sent:
                future.result()
            work()

    def _read(self, tensor: StoredTensor, target: Array) -> list[Future[None]]:
        """Jobs, or none where a work does it."""
        if tensor.n_interleaved_heads or tensor.dtype not in AS_STORED.keys() | FLOATS.keys():
            decoded = np.empty(target.shape, np.float32)
            read_into(tensor, decoded)
            return self._copy(self._rounded(decoded), target)
        if AS_STORED.get(tensor.dtype) == target.dtype.name:
            return self._send(lambda: open_bytes(tensor), target)
        self._convert(tensor, target.reshape(-1))
        return []

    def _rounded(self, values: NDArray[np.float32]) -> NDArray[Any]:
        with np.errstate(over="ignore"):  # past float16's range: infinite, reported by the model's checks
            return values.astype(self._dtype)

    def _convert(self, tensor: StoredTensor, flat: Array) -> None:
        dtype = FLOATS[tensor.dtype]
        step = CHUNK_BYTES // dtype.itemsize
        for first in range(0, flat.size, step):
            part = flat[first : first + step]
            stored = self.empty(part.shape, dtype)
            sent = self._send(lambda: open_bytes(tensor), stored, first * dtype.itemsize)
            self._then(stored.nbytes, sent, partial(setitem, part, ..., stored))

    def _copy(self, array: Array, target: Array) -> list[Future[None]]:
        """Of an array of this process, contiguous."""
        raw = array.reshape(-1).view(np.uint8)

        def fill(part: Bytes, first: int) -> None:
            np.copyto(part, raw[first : first + part.size])

        return self._send(lambda: nullcontext(fill), target)

    def _send(
        self, source: Callable[[], AbstractContextManager[Fill]], target: Array, begin: int = 0
    ) -> list[Future[None]]:
        """The bytes of a source from `begin` on, as many as target has. Raises what went wrong with those before."""
        jobs = []
        for first in range(0, target.nbytes, JOB_BYTES):
            size = min(JOB_BYTES, target.nbytes - first)
            while len(self._sent) >= self._jobs_ahead:
                self._sent.popleft().result()
            jobs.append(self._team.submit(self._do, source, begin, target, first, size))
            self._sent.append(jobs[-1])
        return jobs

    def _do(
        self, source: Callable[[], AbstractContextManager[Fill]], begin: int, target: Array, first: int, size: int
    ) -> None:
        """By a thread of the team: bytes first to first + size of target, which a source has from `begin` on."""
        free = self._buffers.free
        with source() as fill:
            for place in range(first, first + size, PIECE_BYTES):
                piece, address, copied = free[0]
                num_bytes = min(PIECE_BYTES, first + size - place)
                copied.synchronize()
                fill(piece[:num_bytes], begin + place)
                (target.data + place).copy_from_host_async(address, num_bytes, self._stream)
                copied.record(self._stream)
                free.rotate(-1)
