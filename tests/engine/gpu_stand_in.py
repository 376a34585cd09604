"""CuPy as NumPy arrays and lazy streams, enough for the forward pass of a GPU and its graphs.

What is launched waits in its stream until somebody waits for it, so what a launch reads must still be there then. What
another stream has to do is done as late as may be: when STREAM comes to where it waits for that. A captured graph keeps
what was launched, and runs it again over the same addresses. Memory goes back to its pool with its last array, and what
a pool gives out is full of NaN.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine.errors import KernelError
from engine.kernels.device import Argument, Dims, Instance

Work = Callable[[], None]


class CUDARuntimeError(RuntimeError):
    """What CuPy raises."""


class Stream:
    """Capturing, STREAM runs nothing, and takes what others are to do into the graph, which must come back to it."""

    ptr = 0

    def __init__(self, non_blocking: bool = True, priority: int = 0) -> None:
        self._queue: deque[Work] = deque()
        self._captured: list[Work] | None = None
        self._forked: dict[Stream, int] = {}  # others with work in what is captured that it does not wait for: how much
        self.num_graphs = 0  # launched
        self._lock = threading.RLock()  # several threads copy, and one after the other is what a stream does

    def launch(self, work: Work) -> None:
        if STREAM._captured is None:
            self._queue.append(work)
            return
        STREAM._captured.append(work)
        if self is not STREAM:
            STREAM._forked[self] = STREAM._forked.get(self, 0) + 1

    def use(self) -> None:
        CURRENT[0] = self

    def wait_event(self, event: Event) -> None:
        number, source = event.num_recorded, event.source
        if event.captured is not STREAM._captured:
            raise CUDARuntimeError("cudaErrorStreamCaptureIsolation")
        if self is STREAM and STREAM._forked.get(source) == event.num_before:
            del STREAM._forked[source]

        def wait() -> None:
            while event.num_come < number:
                source._queue.popleft()()

        self.launch(wait)

    def synchronize(self, until: Callable[[], bool] = lambda: False) -> None:
        if self._captured is not None:
            raise CUDARuntimeError("cudaErrorStreamCaptureUnsupported")
        with self._lock:
            while self._queue and not until():
                self._queue.popleft()()

    def begin_capture(self) -> None:
        self._captured = []

    def end_capture(self) -> Graph:
        if self._captured is None:
            raise CUDARuntimeError("cudaErrorIllegalState")
        captured, self._captured = self._captured, None
        forked, self._forked = self._forked, {}
        if forked:
            raise CUDARuntimeError("cudaErrorStreamCaptureUnjoined")
        return Graph(captured)


class Graph:
    def __init__(self, captured: Sequence[Work]) -> None:
        self._captured = captured

    def upload(self, stream: Stream) -> None:
        """It is there."""

    def launch(self, stream: Stream) -> None:
        stream.num_graphs += 1
        for work in self._captured:
            stream.launch(work)


class Event:
    def __init__(self, disable_timing: bool) -> None:
        self.num_recorded = self.num_come = 0
        self.source = STREAM
        self.captured: list[Work] | None = None  # into what it was, if anything
        self.num_before = 0  # of its stream's work in there, itself included

    def record(self, stream: Stream) -> None:
        self.num_recorded += 1
        self.source = stream
        number = self.num_recorded

        def come() -> None:
            self.num_come = max(self.num_come, number)

        stream.launch(come)
        self.captured, self.num_before = STREAM._captured, STREAM._forked.get(stream, 0)

    def synchronize(self) -> None:
        STREAM.synchronize(until=lambda: self.num_come == self.num_recorded)


class Lease:
    """Memory of a pool, for as long as an array needs it."""

    def __init__(self, pool: MemoryPool, memory: Any) -> None:
        self._pool, self._memory = pool, memory
        address = ctypes.addressof(memory)
        self.__array_interface__ = {"data": (address, False), "shape": (len(memory),), "typestr": "|u1", "version": 3}

    def __del__(self) -> None:
        self._pool.free.setdefault(len(self._memory), []).append(self._memory)


class MemoryPool:
    def __init__(self) -> None:
        self.free: dict[int, list[Any]] = {}
        self.num_bytes = 0  # taken from the system

    def malloc(self, num_bytes: int) -> Lease:
        size = -(-max(num_bytes, 1) // 512) * 512
        found = self.free.get(size)
        if found:
            return Lease(self, found.pop())
        self.num_bytes += size
        return Lease(self, (ctypes.c_char * size)())


MODULES = "engine.kernels.graphs", "engine.kernels.side_stream", "engine.kernels.forward"
STREAM = Stream()
CURRENT = [STREAM]  # which is launched on
POOLS: list[Any] = [MemoryPool()]  # the last one gives


class Pointer:
    """To memory of the stand-in."""

    def __init__(self, address: int) -> None:
        self.ptr = address

    def __add__(self, offset: int) -> Pointer:
        return Pointer(self.ptr + offset)

    def copy_from_device_async(self, source: Pointer, size: int) -> None:
        CURRENT[0].launch(lambda: ctypes.memmove(self.ptr, source.ptr, size))

    def copy_from_host_async(self, host: int, size: int, stream: Stream) -> None:
        stream.launch(lambda: ctypes.memmove(self.ptr, host, size))


class Array(np.ndarray):
    """What is done with it is launched. What it holds is known when the stream has been waited for."""

    @property
    def data(self) -> Any:  # type: ignore[override]
        return Pointer(self.ctypes.data)

    def __setitem__(self, key: Any, value: Any) -> None:
        launch(lambda to, index, given: to.__setitem__(index, given), self, key, value)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, out: Any = None, **kwargs: Any) -> Any:
        assert method == "__call__", f"{ufunc} {method} is not launched by anything yet"
        if out is None:
            like = ufunc(*(np.ones(x.shape, x.dtype) if isinstance(x, np.ndarray) else x for x in inputs), **kwargs)
            out = (empty(like.shape, like.dtype),)
        launch(lambda to, *given: ufunc(*given, out=to, **kwargs), out[0], *inputs)
        return out[0]


def at(address: int, shape: Sequence[int], dtype: Any, strides: Sequence[int]) -> np.ndarray:
    """An array there that keeps nothing alive, as a kernel has it."""
    dtype = np.dtype(dtype)
    size = sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) + dtype.itemsize
    memory = (ctypes.c_char * (size if 0 not in shape else 0)).from_address(address)
    return np.ndarray(tuple(shape), dtype, memory, strides=tuple(strides))


def raw(value: Any) -> Any:
    return at(value.ctypes.data, value.shape, value.dtype, value.strides) if isinstance(value, Array) else value


def launch(work: Callable[..., Any], *arguments: Any) -> None:
    """Arrays of the stand-in are passed by address."""
    given = [raw(argument) for argument in arguments]
    CURRENT[0].launch(lambda: work(*given))


def empty(shape: Any, dtype: Any = np.float32) -> Array:
    shape = (shape,) if isinstance(shape, int) else shape
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    memory = np.asarray(POOLS[-1].malloc(size))[:size]
    found: Array = memory.view(dtype).reshape(shape).view(Array)
    launch(lambda to: to.view(np.uint8).fill(255), found)
    return found


def asarray(array: Any) -> Array:
    found = empty(array.shape, array.dtype)
    found[...] = np.array(array)
    return found


def zeros(shape: Any, dtype: Any = np.float32) -> Array:
    found = empty(shape, dtype)
    found[...] = 0
    return found


class ElementwiseKernel:
    """The one that there is: ids that only the GPU knows."""

    def __init__(self, inputs: str, outputs: str, operation: str) -> None:
        assert operation == "known = token_id < 0 ? last_ids[-1 - token_id] : token_id"

    def __call__(self, token_ids: Array, last_ids: Array, known: Array) -> None:
        launch(_known, token_ids, last_ids, known)


def _known(token_ids: np.ndarray, last_ids: np.ndarray, known: np.ndarray) -> None:
    unknown = token_ids < 0
    known[...] = token_ids
    known[unknown] = last_ids[-1 - token_ids[unknown]]


def to_host(array: Any) -> np.ndarray:
    STREAM.synchronize()
    return np.array(raw(array))


@contextmanager
def using_allocator(malloc: Any) -> Iterator[None]:
    POOLS.append(SimpleNamespace(malloc=malloc))
    try:
        yield
    finally:
        POOLS.pop()


def copy_rows(address: int, to: Array, num_rows: int, row_bytes: int) -> None:
    first, step = to.ctypes.data, to.strides[0]
    for row in range(num_rows):
        STREAM.launch(lambda row=row: ctypes.memmove(first + row * step, address + row * row_bytes, row_bytes))


class Gpu:
    """A device that knows one kernel, the one that the forward pass launches itself."""

    num_sms, max_shared_bytes, has_wgmma, has_fp8 = 4, 99 << 10, False, True

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        return empty(shape, dtype)

    def launch(
        self, instance: Instance, grid: Dims, block: Dims, arguments: Sequence[Argument], shared_bytes: int = 0
    ) -> None:
        assert instance.stem == "embedding"
        launch(lambda ids, table, to: np.copyto(to, table[ids]), *arguments[:3])


@pytest.fixture
def gpu_forward(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """engine.kernels.forward over the stand-in; see graphs for the module beside it."""
    cuda = SimpleNamespace(
        alloc_pinned_memory=bytearray,
        Event=Event,
        get_allocator=lambda: POOLS[-1].malloc,
        get_current_stream=lambda: CURRENT[0],
        MemoryPool=MemoryPool,
        MemoryPointer=lambda memory, offset: memory + offset,
        runtime=SimpleNamespace(CUDARuntimeError=CUDARuntimeError),
        Stream=Stream,
        UnownedMemory=lambda address, size, owner: address,
        using_allocator=using_allocator,
    )
    cupy = ModuleType("cupy")
    cupy.__dict__.update(cuda=cuda, asarray=asarray, empty=empty, zeros=zeros, ElementwiseKernel=ElementwiseKernel)
    cupy.__dict__["ndarray"] = lambda shape, dtype, memptr, strides: at(memptr, shape, dtype, strides).view(Array)
    gpu = ModuleType("engine.kernels.gpu")
    gpu.__dict__.update(Gpu=Gpu, copy_rows=copy_rows, check=lambda result, name: result[1], no_cuda=KernelError)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "engine.kernels.gpu", gpu)
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module("engine.kernels.forward")
    STREAM.__init__()  # type: ignore[misc]  # what a test that failed left in it
    STREAM.use()
    for name in MODULES:
        sys.modules.pop(name, None)
