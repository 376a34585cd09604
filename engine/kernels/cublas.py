"""Matrix products by cuBLAS, called directly: CuPy's own calls may not be captured into a CUDA graph."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import cupy
from cupy.cuda import device as cupy_device

from engine.errors import KernelError

Array = Any

WORKSPACE_BYTES = 32 << 20  # what NVIDIA recommends on Hopper; given by us, so that cuBLAS allocates nothing
TRANSPOSED, AS_IS = 1, 0  # cublasOperation_t
CUDA_TYPES = {"float32": 0, "float16": 2, "bfloat16": 14}  # cudaDataType_t
COMPUTE_32F = 68  # cublasComputeType_t: float32 sums
DEFAULT_ALGORITHM = -1


class Cublas:
    """cuBLAS on CuPy's current stream."""

    def __init__(self) -> None:
        self._handle = ctypes.c_void_p(cupy_device.get_cublas_handle())
        self._library = _loaded_library()
        self._workspace = cupy.empty(WORKSPACE_BYTES, cupy.uint8)
        self._one, self._zero = ctypes.c_float(1.0), ctypes.c_float(0.0)

    def matmul(self, x: Array, weight: Array, out: Array) -> None:
        """out [m, n] = x [m, k] · weightᵀ of weight [n, k]; rows of x and out may lie apart.

        cuBLAS counts columns first, so it is told to make outᵀ = weight · xᵀ.
        """
        library, handle = self._library, self._handle
        stream = ctypes.c_void_p(cupy.cuda.get_current_stream().ptr)
        _check("cublasSetStream", library.cublasSetStream_v2(handle, stream))
        workspace = ctypes.c_void_p(self._workspace.data.ptr)
        _check("cublasSetWorkspace", library.cublasSetWorkspace_v2(handle, workspace, ctypes.c_size_t(WORKSPACE_BYTES)))
        (m, k), n = x.shape, weight.shape[0]
        rows = [
            ctypes.c_int(array.strides[0] // array.itemsize if array.shape[0] > 1 else array.shape[1])
            for array in (weight, x, out)
        ]
        pointers = [ctypes.c_void_p(array.data.ptr) for array in (weight, x, out)]
        types = [ctypes.c_int(CUDA_TYPES[array.dtype.name]) for array in (weight, x, out)]
        status = library.cublasGemmEx(
            handle,
            TRANSPOSED,
            AS_IS,
            n,
            m,
            k,
            ctypes.byref(self._one),
            pointers[0],
            types[0],
            rows[0],
            pointers[1],
            types[1],
            rows[1],
            ctypes.byref(self._zero),
            pointers[2],
            types[2],
            rows[2],
            COMPUTE_32F,
            DEFAULT_ALGORITHM,
        )
        _check(f"cublasGemmEx of {m} x {k} by {n}", status)


def _loaded_library() -> ctypes.CDLL:
    """The cuBLAS that CuPy has loaded: a second copy would have no handle of ours."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    paths = {line.split(maxsplit=5)[5] for line in maps if "libcublas.so" in line}
    if not paths:
        raise KernelError("cuBLAS is not loaded: install the package nvidia-cublas beside cupy")
    return ctypes.CDLL(min(paths))


def _check(name: str, status: int) -> None:
    if status:
        raise KernelError(f"{name} failed with status {status}")
