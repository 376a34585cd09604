"""How the driver describes an array to the unit of a GPU that copies boxes (TensorMap in cuda/include/ptx_sm90.cuh)."""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache

from engine.errors import KernelError
from engine.kernels.device import Boxes

TYPES = {"uint8": 0, "int8": 0, "float16": 6, "bfloat16": 9}  # CUtensorMapDataType
SWIZZLES = {64: 2, 128: 3}  # bytes of a box's row → CUtensorMapSwizzle
FETCH_128_BYTES = 2  # CUtensorMapL2promotion: what L2 fetches at least
MAP_BYTES = 128
ALIGNMENT = 64

Map = ctypes.Array[ctypes.c_char]


def tensor_map(boxes: Boxes) -> Map:
    """The 128 bytes that a kernel takes as a parameter.

    Raises:
        KernelError: the driver refuses: an axis but the last, or the address, is not at multiples of 16 bytes.
    """
    array = boxes.array
    swizzle = SWIZZLES[boxes.box[-1] * array.itemsize]
    return _encoded(array.data.ptr, array.dtype.name, array.shape, array.strides, boxes.box, swizzle)


@lru_cache(maxsize=4096)  # the caches of every layer come again in every step
def _encoded(
    address: int, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], swizzle: int
) -> Map:
    """The driver counts the last axis first, and wants no stride of it."""
    room = ctypes.create_string_buffer(MAP_BYTES + ALIGNMENT)
    at = -ctypes.addressof(room) % ALIGNMENT
    rank = len(shape)
    status = _library().cuTensorMapEncodeTiled(
        ctypes.c_void_p(ctypes.addressof(room) + at),
        TYPES[dtype],
        ctypes.c_uint32(rank),
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*reversed(shape)),
        (ctypes.c_uint64 * rank)(*reversed(strides[:-1])),
        (ctypes.c_uint32 * rank)(*reversed(box)),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        0,  # numbers lie as they do in the array
        swizzle,
        FETCH_128_BYTES,
        0,  # what lies outside is 0
    )
    if status:
        raise KernelError(
            f"cuTensorMapEncodeTiled refuses an array {list(shape)} of {dtype} with strides {list(strides)} at "
            f"{address:#x} in boxes {list(box)}: CUresult {status}"
        )
    return ctypes.create_string_buffer(room.raw[at : at + MAP_BYTES], MAP_BYTES)


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
