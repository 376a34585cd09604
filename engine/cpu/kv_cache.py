"""The write of keys and values into the paged cache, on a CPU. Checked against ref.kv_cache by conformance."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.coded_kv import KVArray, parts_of
from ref import kv_cache
from ref.quant.kv import kv_dequantize, kv_quantize

Float32 = NDArray[np.float32]
Int32 = NDArray[np.int32]


def kv_cache_write(k: Float32, v: Float32, slot_mapping: Int32, k_cache: KVArray, v_cache: KVArray) -> None:
    """Stores k and v [num_tokens, n_kv_heads, head_dim] at slot_mapping [num_tokens], all ≥ 0 here.

    Caches [num_blocks, block_size, n_kv_heads, head_dim], float32, or codes for it.
    """
    for x, cache in ((k, k_cache), (v, v_cache)):
        numbers, scales = parts_of(cache)
        stored: NDArray[Any] = x
        if scales is not None:
            stored, found = kv_quantize(x, "int8" if numbers.dtype == np.int8 else "fp8")
            scales.reshape(-1, x.shape[1])[slot_mapping] = found
        numbers.reshape(-1, *x.shape[1:])[slot_mapping] = stored


def blocks_of(cache: KVArray, blocks: Int32) -> Float32:
    """A copy of these blocks of a cache, of any shape, [*blocks.shape, block_size, …], decoded where it holds codes."""
    numbers, scales = parts_of(cache)
    found: Float32 = numbers[blocks] if scales is None else kv_dequantize(numbers[blocks], scales[blocks])
    return found


def kv_cache_copy(k_cache: KVArray, v_cache: KVArray, src_blocks: Int32, dst_blocks: Int32) -> None:
    """Defined by ref.kv_cache, for codes and scales alike."""
    kv_cache_swap(k_cache, v_cache, k_cache, v_cache, src_blocks, dst_blocks)


def kv_cache_swap(
    k_cache: KVArray, v_cache: KVArray, k_other: KVArray, v_other: KVArray, src_blocks: Int32, dst_blocks: Int32
) -> None:
    """Defined by ref.kv_cache, for codes and scales alike."""
    parts = zip(parts_of(k_cache), parts_of(v_cache), parts_of(k_other), parts_of(v_other), strict=True)
    for keys, values, other_keys, other_values in parts:
        if keys is not None:
            kv_cache.kv_cache_swap(keys, values, other_keys, other_values, src_blocks, dst_blocks)
