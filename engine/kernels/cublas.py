"""Matrix products by cuBLAS, called directly: CuPy's own calls may not be captured into a CUDA graph."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import cupy
import ml_dtypes
import numpy as np
from cupy.cuda import device as cupy_device

from engine.errors import KernelError

Array = Any

WORKSPACE_BYTES = 32 << 20  # what NVIDIA recommends on Hopper; given by us, so that cuBLAS allocates nothing
TRANSPOSED, AS_IS = 1, 0  # cublasOperation_t
CUDA_TYPES = {  # cudaDataType_t
    np.dtype(np.float32): 0,
    np.dtype(np.float16): 2,
    np.dtype(np.int8): 3,
    np.dtype(np.int32): 10,
    np.dtype(ml_dtypes.bfloat16): 14,
}
COMPUTE_32F, COMPUTE_32I = 68, 72  # cublasComputeType_t: float32 sums, int32 sums
DEFAULT_ALGORITHM = -1


class Cublas:
    """cuBLAS on CuPy's current stream."""

    def __init__(self) -> None:
        self._handle = ctypes.c_void_p(cupy_device.get_cublas_handle())
        self._library = _loaded_library()
        self._workspace = cupy.empty(WORKSPACE_BYTES, cupy.uint8)
        self._floats = ctypes.byref(ctypes.c_float(1.0)), ctypes.byref(ctypes.c_float(0.0)), COMPUTE_32F
        self._integers = ctypes.byref(ctypes.c_int32(1)), ctypes.byref(ctypes.c_int32(0)), COMPUTE_32I
        pointer, integer = ctypes.c_void_p, ctypes.c_int
        matrix = (pointer, integer, integer)  # with its type and leading dimension
        self._gemm = self._library.cublasGemmEx  # once told the types, ctypes is twice as quick
        self._gemm.argtypes = (pointer, *5 * (integer,), pointer, *matrix, *matrix, pointer, *matrix, integer, integer)

    def matmul(self, x: Array, weight: Array, out: Array) -> None:
        """out [m, n] = x [m, k] · weightᵀ of weight [n, k]; rows of x and out may lie apart.

        int8 gives int32; n, k and the distances of rows are multiples of 4 then.
        cuBLAS counts columns first, so it is told to make outᵀ = weight · xᵀ.
        """
        library, handle = self._library, self._handle
        stream = ctypes.c_void_p(cupy.cuda.get_current_stream().ptr)
        _check("cublasSetStream", library.cublasSetStream_v2(handle, stream))
        workspace = ctypes.c_void_p(self._workspace.data.ptr)
        _check("cublasSetWorkspace", library.cublasSetWorkspace_v2(handle, workspace, ctypes.c_size_t(WORKSPACE_BYTES)))
        (m, k), n = x.shape, weight.shape[0]
        w, a, y = map(_matrix, (weight, x, out))
        one, zero, sums = self._integers if out.dtype == np.int32 else self._floats
        status = self._gemm(handle, TRANSPOSED, AS_IS, n, m, k, one, *w, *a, zero, *y, sums, DEFAULT_ALGORITHM)
        if status:
            _check(f"cublasGemmEx of {m} x {k} by {n}", status)


def _matrix(array: Array) -> tuple[int, int, int]:
    """Address, type and distance of rows, as cuBLAS wants them."""
    num_rows, num_columns = array.shape
    distance = array.strides[0] // array.itemsize if num_rows > 1 else num_columns
    return array.data.ptr, CUDA_TYPES[array.dtype], distance


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
