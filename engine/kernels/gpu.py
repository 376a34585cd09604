"""An NVIDIA GPU as a device: cubins are loaded once, and launched with arguments whose sizes are known.

CuPy has the arrays and streams. Launching is the driver's cuLaunchKernelEx, which CuPy lacks: a kernel that waits for
the one before by itself (dependency_wait in cuda/include/ptx.cuh) is launched while that one still runs, so that the
start of one lies under the end of the other.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cupy
import numpy as np
from cuda.bindings import driver
from numpy.typing import NDArray

from engine.errors import KernelError
from engine.kernels.arches import ARCHES
from engine.kernels.compile import arch_of, compile_all, compile_kernel
from engine.kernels.cublas import WORKSPACE_BYTES, Cublas
from engine.kernels.device import NUM_COUNTERS, Argument, Boxes, Dims, Instance
from engine.kernels.driver_errors import explain
from engine.kernels.tensor_map import tensor_map
from engine.memory_plan import ALWAYS, Buffer
from engine.system import usable_cores

Array = Any

logger = logging.getLogger(__name__)

_INTEGERS = (np.int32, np.int64, np.uint32, np.uint64, np.bool_)
_AS_INTEGERS = {np.float32: np.uint32, np.float64: np.uint64}

FP8_ARCH = 89  # the first whose tensor cores take it
DEFAULT_SHARED_BYTES = 48 << 10  # a kernel gets more only when it has asked


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


class Kernel:
    """One kernel, ready to be launched on CuPy's current stream, from one thread.

    A launch goes to the driver by ctypes, from a record that is kept: cuda-bindings' own call makes a new one each
    time and takes 40 µs, eight times as long, and a prompt's step is hundreds of launches.
    """

    def __init__(
        self, name: str, function: Any, static_shared_bytes: int, max_shared_bytes: int, overlaps: bool
    ) -> None:
        self.name = name
        self._function = function
        self._handle = ctypes.c_void_p(int(function))
        self._max_shared_bytes = max_shared_bytes - static_shared_bytes
        self._shared_bytes = DEFAULT_SHARED_BYTES - static_shared_bytes
        serialization = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        self._attribute = _Attribute(id=int(serialization), value=1)
        self._config = _Config(attributes=ctypes.pointer(self._attribute), num_attributes=int(overlaps))
        self._words = (ctypes.c_uint64 * 0)()
        self._addresses = (ctypes.c_void_p * 0)()
        self._launch = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx

    def launch(self, grid: Dims, block: Dims, arguments: Sequence[Argument], shared_bytes: int = 0) -> None:
        """Starts the kernel.

        Args:
            grid, block: up to three numbers; an empty grid starts nothing.
            arguments: CuPy arrays (the kernel gets the address of the first element), NumPy scalars of the very type
                of the parameter, a numpy.void for a structure, Boxes for a TensorMap, None for a null pointer.
            shared_bytes: of dynamic shared memory a block.
        Raises:
            KernelError: an argument without a size of its own, more shared memory than this GPU has, or the driver's
                refusal.
        """
        if 0 in grid:
            return
        if shared_bytes > self._shared_bytes:
            self._allow(shared_bytes)
        if len(arguments) != len(self._words):
            self._words = (ctypes.c_uint64 * len(arguments))()
            first = ctypes.addressof(self._words)
            self._addresses = (ctypes.c_void_p * len(arguments))(*range(first, first + 8 * len(arguments), 8))
        config, words = self._config, self._words
        config.grid[:] = (*grid, 1, 1)[:3]
        config.block[:] = (*block, 1, 1)[:3]
        config.shared_bytes = shared_bytes
        config.stream = cupy.cuda.get_current_stream().ptr
        maps: list[Any] = []  # until they have been copied
        for number, argument in enumerate(arguments):
            if type(argument) is Boxes:
                maps.append(tensor_map(argument))
                self._addresses[number] = ctypes.addressof(maps[-1])
            elif type(argument) is np.void:
                maps.append(ctypes.create_string_buffer(argument.tobytes()))
                self._addresses[number] = ctypes.addressof(maps[-1])
            else:
                words[number] = self._word(number, argument)
        status = self._launch(ctypes.byref(config), self._handle, self._addresses, None)
        if status:
            check((driver.CUresult(status),), self.name)

    def _word(self, number: int, argument: Array | np.generic | None) -> int:
        """The bits of an argument, in the low bytes of eight, as little-endian machines pass them."""
        if argument is None:
            return 0
        kind = type(argument)
        if isinstance(argument, cupy.ndarray):
            return int(argument.data.ptr)
        if kind in _INTEGERS:
            return int(argument)
        if kind in _AS_INTEGERS:
            return int(argument.view(_AS_INTEGERS[kind]))
        raise KernelError(
            f"{self.name}: argument {number} is {argument!r}, a {kind.__name__}; expected a CuPy array, a NumPy scalar "
            "such as np.int32(…), Boxes, or None"
        )

    def _allow(self, shared_bytes: int) -> None:
        if shared_bytes > self._max_shared_bytes:
            raise KernelError(
                f"{self.name}: {shared_bytes} bytes of shared memory; a block of this GPU has {self._max_shared_bytes}"
            )
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(driver.cuFuncSetAttribute(self._function, attribute, shared_bytes), self.name)
        self._shared_bytes = shared_bytes


class Gpu:
    """The current GPU as a Device (see engine.kernels.device): memory, kernels, cuBLAS.

    Kernels are compiled, or found in the cache, by prepare, or else when they are first launched. By seal() the engine
    has run every kind of step once: one that is new after that makes requests wait for a compiler, and is reported.

    Args:
        cache: folder of compiled kernels.
        arch: an older one of ARCHES, to run what its GPUs run: code compiled for it, no more shared memory than they
            have, and no wgmma. None: the GPU's own.
    Raises:
        KernelError: no GPU that can be used, one that is too old, or older than arch.
    """

    def __init__(self, cache: Path, arch: str | None = None) -> None:
        attributes, own = _current_gpu()
        self.arch = own if arch is None else arch
        self.num_sms: int = attributes["MultiProcessorCount"]
        self.max_shared_bytes: int = attributes["MaxSharedMemoryPerBlockOptin"]
        self._target = self.arch
        if self.arch != own:
            self._target = _virtual(self.arch, own)
            self.max_shared_bytes = min(self.max_shared_bytes, ARCHES[self.arch].block_shared_bytes)
        self.has_wgmma = self._target == "sm_90"
        self.has_fp8 = int(self.arch.removeprefix("sm_")) >= FP8_ARCH
        self.counters = cupy.zeros(NUM_COUNTERS, np.uint32)
        self._cache = cache
        self._kernels: dict[Instance, Kernel] = {}
        self._modules: list[Any] = []  # that hold the code
        self._sealed = False
        self._cublas = Cublas()

    def prepare(self, instances: Iterable[Instance], progress: bool = True) -> None:
        """Compiles what is not in the cache, several at a time, with a bar; then loads all."""
        wanted = [instance for instance in dict.fromkeys(instances) if instance not in self._kernels]
        compile_all(wanted, self._target, self._cache, progress)
        in_context = cupy.cuda.runtime.setDevice
        with ThreadPoolExecutor(usable_cores(), initializer=in_context, initargs=(cupy.cuda.Device().id,)) as pool:
            list(pool.map(self._load, wanted))  # of PTX it is the driver that compiles here

    def buffers(self) -> tuple[Buffer, ...]:
        """What it holds beside the code of kernels."""
        counters = Buffer("counters of kernels", int(self.counters.nbytes), ALWAYS)
        return counters, Buffer("cuBLAS workspace", WORKSPACE_BYTES, ALWAYS)

    def seal(self) -> None:
        self._sealed = True

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        return cupy.empty(shape, dtype)

    def to_device(self, array: NDArray[Any], out: Array) -> None:
        out[...] = cupy.asarray(array)  # by way of pinned memory, so that nobody waits

    def start_copy(self, array: Array) -> Callable[[], NDArray[Any]]:
        pinned = cupy.cuda.alloc_pinned_memory(max(array.nbytes, 1))
        copy: NDArray[Any] = np.frombuffer(pinned, array.dtype, array.size).reshape(array.shape)
        stream = cupy.cuda.get_current_stream()
        array.get(stream=stream, out=copy, blocking=False)
        done = cupy.cuda.Event(disable_timing=True)
        done.record(stream)

        def wait() -> NDArray[Any]:
            done.synchronize()
            return copy

        return wait

    def to_host(self, array: Array) -> NDArray[Any]:
        found: NDArray[Any] = cupy.asnumpy(array)
        return found

    def launch(
        self, instance: Instance, grid: Dims, block: Dims, arguments: Sequence[Argument], shared_bytes: int = 0
    ) -> None:
        """Raises KernelError for a kernel that does not compile, or that the driver refuses."""
        kernel = self._kernels.get(instance) or self._load(instance)
        kernel.launch(grid, block, arguments, shared_bytes)

    def matmul(self, x: Array, weight: Array, out: Array) -> None:
        self._cublas.matmul(x, weight, out)

    def _load(self, instance: Instance) -> Kernel:
        if self._sealed:
            logger.warning(
                "%s of cuda/%s.cu was not needed at start: a step waits for it", instance.entry, instance.stem
            )
        compiled = compile_kernel(instance, self._target, self._cache)
        module = check(driver.cuModuleLoadData(compiled.path.read_bytes()), instance.entry)
        self._modules.append(module)
        function = check(driver.cuModuleGetFunction(module, compiled.symbol.encode()), instance.entry)
        shared = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
        static_shared_bytes = check(driver.cuFuncGetAttribute(shared, function), instance.entry)
        overlaps = _number(self.arch) >= 90
        kernel = Kernel(instance.entry, function, static_shared_bytes, self.max_shared_bytes, overlaps)
        self._kernels[instance] = kernel
        return kernel


def _current_gpu() -> tuple[dict[str, int], str]:
    """Attributes and arch of CuPy's current GPU."""
    try:
        device = cupy.cuda.Device()
        return device.attributes, arch_of(device.compute_capability)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise no_cuda(error) from error


def no_cuda(error: cupy.cuda.runtime.CUDARuntimeError) -> KernelError:
    """What to raise where CUDA does not start."""
    return KernelError(explain(error.status, str(error), _versions()))


def _versions() -> str:
    """Of the driver, as far as it can be asked, and of the packages."""
    runtime = cupy.cuda.runtime
    try:
        asked = runtime.driverGetVersion()
    except runtime.CUDARuntimeError:
        asked = 0
    packages = runtime.runtimeGetVersion()
    found = f"driver CUDA {asked // 1000}.{asked % 1000 // 10}" if asked else "no driver"
    return f"{found}, packages CUDA {packages // 1000}.{packages % 1000 // 10}"


def _number(arch: str) -> int:
    return int(arch.removeprefix("sm_"))


def _virtual(arch: str, own: str) -> str:
    """What is compiled so that a GPU of arch own runs the code of an older arch: PTX of that arch."""
    if arch not in ARCHES or _number(arch) > _number(own):
        older = ", ".join(name for name in ARCHES if _number(name) <= _number(own))
        raise KernelError(f"this GPU is {own} and cannot run code for {arch}; it can for {older}")
    return f"compute_{_number(arch)}"


def copy_rows(address: int, to: Array, num_rows: int, row_bytes: int) -> None:
    """Begins a copy of num_rows rows without gaps from pinned memory to the beginnings of the rows of an array."""
    if not (num_rows and row_bytes):
        return
    copy = driver.CUDA_MEMCPY2D()
    copy.srcMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_HOST
    copy.srcHost, copy.srcPitch = address, row_bytes
    copy.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
    copy.dstDevice, copy.dstPitch = to.data.ptr, to.strides[0]
    copy.WidthInBytes, copy.Height = row_bytes, num_rows
    check(driver.cuMemcpy2DAsync(copy, cupy.cuda.get_current_stream().ptr), "copy of the block table")


def check(result: tuple[Any, ...], name: str) -> Any:
    """The value of a call of the driver. Raises KernelError with the driver's own words if it failed."""
    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        _, text = driver.cuGetErrorString(status)
        raise KernelError(f"{name}: {explain(int(status), text.decode() if text else str(status), _versions())}")
    return values[0] if values else None
