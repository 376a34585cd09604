"""What the candidates of a target run on: an op table, the memory it works in, and what is to be said of it.

The machines with kernels build or compile all of them before the first case runs: a dry run finds which.
"""

from __future__ import annotations

import hashlib
import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from conformance.case import Case
from conformance.check import is_floating, stored_dtype, stored_inputs
from conformance.host import MAX_SHARED_BYTES
from conformance.host_build import CUDA
from conformance.host_device import HostDevice, Notes
from conformance.memory import BorderedDevice, DeviceMemory, Memory, NumpyMemory, host_view
from engine.checkpoint.starter import cache_dir
from engine.kernels.device import Device, Instance
from engine.kernels.sampling import ROW_THREADS, KernelSampling
from engine.kernels.table import kernel_ops
from engine.ops import OpTable, cpu_ops

MAX_ROWS = 64  # of logits
HOST_ROW_THREADS = 64  # of a block that owns a row of logits: fewer are quicker here, and see more rounds
CPU_THREADS = 3  # more than one, so that matrix products are shared out, and odd, so that shares differ in size
INCLUDE = re.compile(r'^#include "(\w+\.cuh)"', re.MULTILINE)


class MachineMissing(Exception):
    """This computer has no such machine; says what was looked for."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Where cases run.

    about: "gpu", "driver", "cuda", "cupy" as far as there are any; kernels: what was launched.
    """

    ops: OpTable
    memory: Memory
    about: Mapping[str, str] = field(default_factory=dict)
    kernels: tuple[Instance, ...] = ()


def cpu_machine(num_threads: int = CPU_THREADS) -> Machine:
    return Machine(cpu_ops(num_threads), NumpyMemory())


def host_machine(cases: Sequence[Case], **options: Any) -> Machine:
    """The kernels on this CPU; options: of HostDevice.

    Raises:
        BuildError: see conformance.host_build.
    """
    host = HostDevice(**options)
    kernels = kernels_of(cases, host)
    host.build(kernels)
    device = BorderedDevice(host)
    memory = DeviceMemory(device, np.copy, np.copy, host_view, host.begin)
    return Machine(_ops(device, HOST_ROW_THREADS), memory, {}, kernels)


def gpu_machine(cases: Sequence[Case], portable: bool = False) -> Machine:
    """The kernels on the GPU that CuPy calls the current one.

    Args:
        portable: those that every supported GPU runs, with the shared memory that every one of them has.
    Raises:
        MachineMissing: no CuPy, or no GPU that it can use.
        KernelError: a kernel does not compile.
    """
    cupy = _cupy()
    compiler = importlib.import_module("engine.kernels.compile")
    gpu = importlib.import_module("engine.kernels.gpu").Gpu(cache_dir() / "kernels")
    if portable:
        gpu.has_wgmma, gpu.max_shared_bytes = False, MAX_SHARED_BYTES
    kernels = kernels_of(cases, gpu)
    compiler.compile_all(list(kernels), gpu.arch, cache_dir() / "kernels")
    device = BorderedDevice(gpu)

    def to_device(array: Any) -> Any:
        return cupy.asarray(array.view(np.uint16)).view(array.dtype) if array.itemsize == 2 else cupy.asarray(array)

    def to_host(array: Any) -> Any:
        halves = array.dtype.itemsize == 2
        return cupy.asnumpy(array.view(np.uint16)).view(array.dtype) if halves else cupy.asnumpy(array)

    def view(whole: Any, shape: tuple[int, ...], dtype: Any, offset: int, strides: tuple[int, ...]) -> Any:
        return cupy.ndarray(shape, dtype, whole.data + offset, strides)

    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
    about = {
        "gpu": properties["name"].decode(),
        "driver": str(cupy.cuda.runtime.driverGetVersion()),
        "cuda": str(cupy.cuda.runtime.runtimeGetVersion()),
        "cupy": cupy.__version__,
    }
    return Machine(_ops(device), DeviceMemory(device, to_device, to_host, view), about, kernels)


def _ops(device: Device, row_threads: int = ROW_THREADS) -> OpTable:
    return kernel_ops(device, KernelSampling(device, MAX_ROWS, row_threads))


def _cupy() -> Any:
    try:
        cupy = importlib.import_module("cupy")
    except ImportError as error:
        raise MachineMissing(f"looked for CuPy, which the extras cuda12 and cuda13 bring: {error}") from error
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise MachineMissing(f"looked for an NVIDIA GPU by CuPy {cupy.__version__}: {error}") from error
    if not count:
        raise MachineMissing(f"looked for an NVIDIA GPU by CuPy {cupy.__version__}, and found none")
    return cupy


def kernels_of(cases: Sequence[Case], like: Device) -> tuple[Instance, ...]:
    """All kernels that the cases launch on a device of this kind, found by a dry run."""
    notes = Notes(like.num_sms, like.max_shared_bytes, like.has_wgmma)
    device = BorderedDevice(notes)
    memory = DeviceMemory(device, np.copy, np.copy, host_view)
    ops = _ops(device)
    for case in cases:
        inputs = stored_inputs(case, 0)
        dtypes = {name: stored_dtype(case, name) for name, value in inputs.items() if is_floating(value)}
        try:
            case.candidate(ops, **memory.place(inputs, dtypes, 0))
        except Exception:  # the case itself will say so when it is run
            continue
    return tuple(notes.instances)


def kernel_hash(stem: str, folder: Path = CUDA) -> str:
    """sha256 of cuda/<stem>.cu and all headers that it includes."""
    source = folder / f"{stem}.cu"
    files, pending = {source.name: source}, [source]
    while pending:
        for name in INCLUDE.findall(pending.pop().read_text("utf-8")):
            if name not in files:
                files[name] = folder / "include" / name
                pending.append(files[name])
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}\0".encode() + files[name].read_bytes() + b"\0")
    return digest.hexdigest()
