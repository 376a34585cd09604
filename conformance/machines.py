"""What the candidates of a target run on: an op table, the memory it works in, and what is to be said of it.

The machines with kernels build or compile all of them before the first case runs: a dry run finds which.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from conformance.case import Case
from conformance.check import is_floating, stored_dtype, stored_inputs
from conformance.host_build import CUDA
from conformance.host_device import HostDevice
from conformance.memory import BorderedDevice, DeviceMemory, Memory, host_view
from conformance.ranked import RankedOps, one_after_another, with_ranks
from engine.checkpoint.starter import cache_dir
from engine.kernels.device import Device, Instance
from engine.kernels.notes import Notes
from engine.kernels.sampling import ROW_THREADS, KernelSampling
from engine.kernels.table import kernel_ops
from engine.ops import OpTable

Swap = Callable[[Instance], Instance]

MAX_ROWS = 64  # of logits
HOST_ROW_THREADS = 64  # of a block that owns a row of logits: fewer are quicker here, and see more rounds
DRIVER_FILE = Path("/proc/driver/nvidia/version")
INCLUDE = re.compile(r'^#include "(\w+\.cuh)"', re.MULTILINE)


class MachineMissing(Exception):
    """This computer has no such machine; says what was looked for."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Where cases run.

    about: "gpu", "arch", "driver", "cuda", "cupy" as far as there are any; kernels: what was launched.
    """

    ops: OpTable
    memory: Memory
    about: Mapping[str, str] = field(default_factory=dict)
    kernels: tuple[Instance, ...] = ()


class SwappedDevice:
    """A device like the one given that launches other kernels in place of some."""

    def __init__(self, device: Any, swap: Swap) -> None:
        self._device, self._swap = device, swap

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def launch(self, instance: Instance, *args: Any, **kwargs: Any) -> None:
        self._device.launch(self._swap(instance), *args, **kwargs)


def host_machine(
    cases: Sequence[Case], swap: Swap | None = None, team: Executor | None = None, **options: Any
) -> Machine:
    """The kernels on this CPU.

    Args:
        swap: which kernel is launched in place of which.
        team: builds while the first cases run; None: all is built before.
        options: of HostDevice.
    Raises:
        BuildError: see conformance.host_build.
    """
    host = HostDevice(**options)
    kernels = kernels_of(cases, host, swap)
    if team is None:
        host.build(kernels)
    else:
        host.begin_build(kernels, team)
    device = BorderedDevice(host if swap is None else SwappedDevice(host, swap))
    memory = DeviceMemory(device, np.copy, np.copy, host_view, host.begin)
    return Machine(_ops(device, host.together, _host_window, HOST_ROW_THREADS), memory, {}, kernels)


def gpu_machine(
    cases: Sequence[Case], arch: str | None = None, swap: Swap | None = None, pooled: bool = True
) -> Machine:
    """The kernels on the GPU that CuPy calls the current one.

    Args:
        arch: of an older GPU whose kernels are to be run; see engine.kernels.gpu.Gpu.
        swap: as of host_machine.
        pooled: False: every array is an allocation of the driver's, so that compute-sanitizer sees where it ends.
    Raises:
        MachineMissing: no CuPy, or no GPU that it can use.
        KernelError: a kernel does not compile, or the GPU is older than arch.
    """
    cupy = find_cupy()
    if not pooled:
        cupy.cuda.set_allocator(None)
    compiler = importlib.import_module("engine.kernels.compile")
    gpu = importlib.import_module("engine.kernels.gpu").Gpu(cache_dir() / "kernels", arch)
    kernels = kernels_of(cases, gpu, swap)
    gpu.prepare(kernels)
    device = BorderedDevice(gpu if swap is None else SwappedDevice(gpu, swap))

    def to_device(array: Any) -> Any:
        return cupy.asarray(array.view(np.uint16)).view(array.dtype) if array.itemsize == 2 else cupy.asarray(array)

    def to_host(array: Any) -> Any:
        halves = array.dtype.itemsize == 2
        return cupy.asnumpy(array.view(np.uint16)).view(array.dtype) if halves else cupy.asnumpy(array)

    def view(whole: Any, shape: tuple[int, ...], dtype: Any, offset: int, strides: tuple[int, ...]) -> Any:
        return cupy.ndarray(shape, dtype, whole.data + offset, strides)

    about = {**about_gpu(cupy, compiler), "arch": gpu.arch}

    def window(num_bytes: int) -> Any:
        pinned = cupy.cuda.alloc_pinned_memory(num_bytes)
        memory = cupy.cuda.UnownedMemory(pinned.ptr, num_bytes, pinned)
        array = cupy.ndarray((num_bytes,), np.uint8, cupy.cuda.MemoryPointer(memory, 0))
        array[...] = 0
        return array

    def together(ranks: Sequence[Callable[[], Any]]) -> list[Any]:
        streams = [cupy.cuda.Stream(non_blocking=True) for _ in ranks]
        cupy.cuda.get_current_stream().synchronize()
        given = []
        for rank, stream in zip(ranks, streams, strict=True):
            with stream:
                given.append(rank())
        for stream in streams:
            stream.synchronize()
        return given

    return Machine(_ops(device, together, window), DeviceMemory(device, to_device, to_host, view), about, kernels)


def about_gpu(cupy: Any, compiler: Any) -> dict[str, str]:
    """What ran there; compiler: engine.kernels.compile."""
    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
    return {
        "gpu": properties["name"].decode(),
        "driver": _driver_version() or f"CUDA {cupy.cuda.runtime.driverGetVersion()}",
        "cuda": f"runtime {cupy.cuda.runtime.runtimeGetVersion()}, NVRTC {compiler.nvrtc_version()}",
        "cupy": cupy.__version__,
    }


def _ops(
    device: Device,
    together: Callable[[Sequence[Callable[[], Any]]], list[Any]],
    window: Callable[[int], Any],
    row_threads: int = ROW_THREADS,
) -> RankedOps:
    ops = kernel_ops(device, KernelSampling(device, MAX_ROWS, row_threads))
    return with_ranks(ops, device, together, window)


def _host_window(num_bytes: int) -> Any:
    """At a multiple of 256 bytes, as a GPU's is."""
    memory = np.zeros(num_bytes + 256, np.uint8)
    return memory[-memory.ctypes.data % 256 :][:num_bytes]


def find_cupy() -> Any:
    """The module, where it finds a GPU. Raises MachineMissing."""
    try:
        cupy = importlib.import_module("cupy")
    except ImportError as error:
        raise MachineMissing(
            f"looked for CuPy, which the extras cuda12 and cuda13 bring: {error}; "
            "where there is an NVIDIA GPU, make serve and make test install one; where there is none, use --target host"
        ) from error
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise MachineMissing(f"looked for an NVIDIA GPU by CuPy {cupy.__version__}: {error}") from error
    if not count:
        raise MachineMissing(f"looked for an NVIDIA GPU by CuPy {cupy.__version__}, and found none")
    return cupy


def _driver_version() -> str:
    """As the kernel module says it, such as 580.95.05; "" where it cannot be asked."""
    try:
        found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", DRIVER_FILE.read_text("utf-8"))
    except OSError:
        return ""
    return found[0] if found else ""


def kernels_of(cases: Sequence[Case], like: Device, swap: Swap | None = None) -> tuple[Instance, ...]:
    """All kernels that the cases launch on a device of this kind, found by a dry run."""
    notes = Notes(like.num_sms, like.max_shared_bytes, like.has_wgmma, like.has_fp8)
    for case in cases:
        dry_run(case, notes)
    return tuple(dict.fromkeys(notes.instances if swap is None else map(swap, notes.instances)))


def dry_run(case: Case, notes: Notes, **ops: Any) -> None:
    """Runs a candidate on a device that launches nothing. ops: functions in place of some of the op table."""
    device = BorderedDevice(notes)
    memory = DeviceMemory(device, np.copy, np.copy, host_view)
    inputs = stored_inputs(case, 0)
    dtypes = {name: stored_dtype(case, name) for name, value in inputs.items() if is_floating(value)}
    with contextlib.suppress(Exception):  # the case itself will say so when it is run
        table = _ops(device, one_after_another, _host_window)
        case.candidate(replace(table, **ops), **memory.place(inputs, dtypes, 0))


def kernel_hash(stem: str, folder: Path = CUDA) -> str:
    """sha256 of cuda/<stem>.cu, or of the .cu at a whole path, and all headers of ours that it includes."""
    source = folder / f"{stem}.cu"
    files, pending = {source.name: source}, [source]
    while pending:
        for name in INCLUDE.findall(pending.pop().read_text("utf-8")):
            if name not in files and (folder / "include" / name).is_file():
                files[name] = folder / "include" / name
                pending.append(files[name])
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}\0".encode() + files[name].read_bytes() + b"\0")
    return digest.hexdigest()
