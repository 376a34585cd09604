"""Checks of what a wrapper is given, before anything is launched, and the sizes that most launches are made of."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from engine.coded_kv import CODES, KVArray, parts_of
from engine.errors import KernelError

Array = Any
Parts = tuple[Array, Array | None, str]

TYPES = {  # dtype → its name in CUDA C++
    np.dtype(ml_dtypes.bfloat16): "bf16",
    np.dtype(np.float16): "fp16",
    np.dtype(np.float32): "float",
}
HALVES = ("bf16", "fp16")
CODE_TYPES = {CODES["fp8"]: "e4m3", CODES["int8"]: "signed char"}  # of codes
ALIGNMENT = 16  # bytes


def type_name(kernel: str, name: str, array: Array) -> str:
    """The C++ type of a floating array. Raises KernelError for another dtype."""
    found = TYPES.get(array.dtype)  # by its name it would take ten times as long
    if found is None:
        raise KernelError(f"{kernel}: {name} is {array.dtype}; expected one of {', '.join(map(str, TYPES))}")
    return found


def literal(value: bool) -> str:
    """As an argument of a C++ template."""
    return "true" if value else "false"


def cache_parts(kernel: str, name: str, cache: KVArray, n_kv_heads: int | None, head_dim: int, dtype: Any) -> Parts:
    """A cache of keys or values: its numbers in this dtype, or codes with their scales (else None); and the C++ type.

    Raises:
        KernelError: another shape or dtype, or gaps; scales that do not belong to the codes.
    """
    numbers, scales = parts_of(cache)
    require(kernel, name, numbers, (None, None, n_kv_heads, head_dim), dtype if scales is None else None)
    require_contiguous(kernel, name, numbers)
    if scales is None:
        return numbers, None, type_name(kernel, name, numbers)
    require(kernel, f"{name}'s scales", scales, numbers.shape[:3], np.float32)
    require_contiguous(kernel, f"{name}'s scales", scales)
    found = CODE_TYPES.get(numbers.dtype)
    if found is None:
        raise KernelError(f"{kernel}: {name} is of {numbers.dtype}; codes are uint8 (of e4m3) or int8")
    return numbers, scales, found


def cache_pair(
    kernel: str, k_cache: KVArray, v_cache: KVArray, n_kv_heads: int | None, head_dim: int, dtype: Any
) -> tuple[Parts, Parts]:
    """Both caches as cache_parts has them. Raises KernelError where they are not alike, too."""
    keys = cache_parts(kernel, "k_cache", k_cache, n_kv_heads, head_dim, dtype)
    values = cache_parts(kernel, "v_cache", v_cache, n_kv_heads, head_dim, dtype)
    require(kernel, "v_cache", values[0], keys[0].shape, keys[0].dtype)
    if (keys[1] is None) != (values[1] is None):
        raise KernelError(f"{kernel}: one of k_cache and v_cache has scales; both or neither must")
    return keys, values


def require(kernel: str, name: str, array: Array, shape: tuple[int | None, ...], dtype: Any = None) -> None:
    """Raises KernelError unless the array has this shape (None = any size), this dtype if one is given, and a last axis
    without gaps."""
    found = array.shape
    fits = len(found) == len(shape)
    for axis, wanted in enumerate(shape if fits else ()):  # a third of the time that zip takes; a step has thousands
        if wanted is not None and wanted != found[axis]:
            fits = False
    if not fits:
        expected = ", ".join("any" if size is None else str(size) for size in shape)
        raise KernelError(f"{kernel}: {name} has shape {list(found)}; expected [{expected}]")
    if dtype is not None and array.dtype != dtype:
        raise KernelError(f"{kernel}: {name} is {array.dtype}; expected {dtype}")
    if found and found[-1] > 1 and array.strides[-1] != array.itemsize and array.size:
        raise KernelError(f"{kernel}: the last axis of {name} has gaps (strides {array.strides}); make it contiguous")


def require_half(kernel: str, name: str, array: Array) -> None:
    """Raises KernelError unless the array is of one of the two floating types of 16 bits."""
    if TYPES.get(array.dtype) not in HALVES:
        raise KernelError(f"{kernel}: {name} is {array.dtype}; expected bfloat16 or float16")


def require_contiguous(kernel: str, name: str, array: Array) -> None:
    """Raises KernelError for an array with gaps or in another order."""
    if not array.flags.c_contiguous:
        raise KernelError(f"{kernel}: {name} is not contiguous (strides {array.strides})")


def is_aligned(array: Array) -> bool:
    """Whether the first element of every row is at a multiple of 16 bytes, as loads of 16 bytes want it."""
    host = getattr(array, "__array_interface__", None)  # of a NumPy array
    places = array.data.ptr if host is None else host["data"][0]
    for step, size in zip(array.strides[:-1], array.shape, strict=False):
        if size > 1:
            places |= step
    return bool(places % ALIGNMENT == 0)


def require_aligned(kernel: str, name: str, array: Array) -> None:
    """Raises KernelError for an array with a row that is not at a multiple of 16 bytes, such as a view from an odd
    element on."""
    if not is_aligned(array):
        raise KernelError(
            f"{kernel}: rows of {name} do not all begin at a multiple of {ALIGNMENT} bytes (strides {array.strides}); "
            "copy it"
        )


def stride(array: Array, axis: int = 0) -> np.int64:
    """From one index of an axis to the next, in elements."""
    return np.int64(array.strides[axis] // array.itemsize)


def width(array: Array) -> int:
    """Elements in 16 bytes."""
    return int(16 // array.itemsize)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)
