"""Whole blocks of the KV cache to other places on a GPU: cuda/kv_cache_copy.cu. Defined by ref.kv_cache."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.coded_kv import KVArray, parts_of
from engine.errors import KernelError
from engine.kernels.check import ceil_div, require, require_contiguous, type_name, width
from engine.kernels.device import Device, Instance

Array = Any

MAX_THREADS = 256
PIECES = 4  # of 16 bytes that a thread copies


def kv_cache_copy(k_cache: KVArray, v_cache: KVArray, src_blocks: Array, dst_blocks: Array, *, device: Device) -> None:
    """Block src_blocks[i] over block dst_blocks[i] of the same cache; no block is both source and target.

    k_cache, v_cache [num_blocks, block_size, n_kv_heads, head_dim], numbers or codes; src_blocks, dst_blocks
    [num_copies] int32; where either is outside the cache nothing is copied.
    """
    kv_cache_swap(k_cache, v_cache, k_cache, v_cache, src_blocks, dst_blocks, device=device)


def kv_cache_swap(
    k_cache: KVArray,
    v_cache: KVArray,
    k_other: KVArray,
    v_other: KVArray,
    src_blocks: Array,
    dst_blocks: Array,
    *,
    device: Device,
) -> None:
    """The same to another cache, of any number of blocks; either may be pinned memory of the host."""
    parts = zip(parts_of(k_cache), parts_of(v_cache), parts_of(k_other), parts_of(v_other), strict=True)
    (keys, values, other_keys, other_values), scales = parts
    if scales[0] is None:
        _launch(keys, values, other_keys, other_values, src_blocks, dst_blocks, device)
        return
    for four in ([array.view(np.uint8) for array in (keys, values, other_keys, other_values)], _with_an_axis(scales)):
        _launch(four[0], four[1], four[2], four[3], src_blocks, dst_blocks, device)


def _with_an_axis(scales: tuple[Array, ...]) -> list[Array]:
    """Scales as numbers of heads of one element. Raises KernelError where one cache has them and another has not."""
    if any(array is None for array in scales):
        raise KernelError("kv_cache_copy: all caches hold codes with scales, or none does")
    return [array[..., None] for array in scales]


def _launch(
    k_cache: Array,
    v_cache: Array,
    k_other: Array,
    v_other: Array,
    src_blocks: Array,
    dst_blocks: Array,
    device: Device,
) -> None:
    kernel = "kv_cache_copy"
    require(kernel, "k_cache", k_cache, (None, None, None, None))
    require(kernel, "v_cache", v_cache, k_cache.shape, k_cache.dtype)
    require(kernel, "k_other", k_other, (None, *k_cache.shape[1:]), k_cache.dtype)
    require(kernel, "v_other", v_other, k_other.shape, k_cache.dtype)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache), ("k_other", k_other), ("v_other", v_other)):
        require_contiguous(kernel, name, cache)
    require(kernel, "src_blocks", src_blocks, (None,), np.int32)
    require(kernel, "dst_blocks", dst_blocks, src_blocks.shape, np.int32)
    num_blocks, block_size, n_kv_heads, head_dim = k_cache.shape
    size = block_size * n_kv_heads * head_dim
    if not (src_blocks.shape[0] and size):
        return
    pieces = ceil_div(size, PIECES * width(k_cache))
    threads = min(MAX_THREADS, 32 * ceil_div(pieces, 32))
    arguments = (k_cache, v_cache, k_other, v_other, src_blocks, dst_blocks)
    numbers = map(np.int32, (num_blocks, k_other.shape[0], size))
    type_ = "unsigned char" if k_cache.dtype == np.uint8 else type_name(kernel, "k_cache", k_cache)
    instance = Instance(kernel, f"kv_cache_copy<{type_}>")
    device.launch(instance, (ceil_div(pieces, threads), src_blocks.shape[0], 2), (threads,), [*arguments, *numbers])
