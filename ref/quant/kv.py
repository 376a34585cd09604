"""Keys and values in 8 bits: half the memory of the cache, half the bytes a decode step reads.

Each head of each token has a scale of its own, max |k| / 127 (int8) or max |k| / 448 (fp8), kept beside the cache in
pages of the same numbering: codes [num_blocks, block_size, n_kv_heads, head_dim], scales [num_blocks, block_size,
n_kv_heads] float32. A head of 128 numbers so takes 132 bytes instead of 256. A token is rounded once, when it is
written, alone: what is in the cache does not depend on the chunk that brought it.

A checkpoint may bring static scales instead, k_scale and v_scale, one a layer (`kv_quantize_static`).

Source: composed of ref.quant.int8 and ref.quant.fp8, a head of a token being the row; k_scale and v_scale are the
names of compressed-tensors and of vLLM's checkpoints.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ref.kv_cache import kv_cache_gather, kv_cache_write
from ref.quant.fp8 import check_scale, fp8_dequantize, fp8_quantize, fp8_quantize_static
from ref.quant.int8 import int8_dequantize, int8_quantize, int8_quantize_static

Array = NDArray[Any]
Ints = NDArray[np.integer[Any]]

STORED = {"int8": np.int8, "fp8": np.uint8}  # codes of e4m3 are kept as uint8


def kv_quantize(x: Array, kind: str) -> tuple[Array, NDArray[np.float32]]:
    """Codes and scales of keys or values, per token and head.

    Args:
        x: [num_tokens, n_kv_heads, head_dim], floating.
        kind: "int8" or "fp8".
    Returns:
        (codes, shape as x, int8 or uint8; scales [num_tokens, n_kv_heads] float32).
    Raises:
        ValueError: another kind.

    Numerics: in float32, as kernels do it.
    Edge cases: a head of zeros has scale 0; inf or NaN spoils its own head of its own token only.
    """
    check_kind(kind)
    single = x.astype(np.float32)
    return int8_quantize(single) if kind == "int8" else fp8_quantize(single)


def kv_quantize_static(x: Array, scale: Array, kind: str, name: str = "k_scale") -> Array:
    """Codes under a fixed scale, saturating: x [...], scale [] or [1] → [...], int8 or uint8.

    Raises:
        ValueError: another kind; a scale that is not finite and positive, by name. It is never replaced by 1.
    """
    check_kind(kind)
    scale = check_scale(name, scale).astype(np.float32)
    single = x.astype(np.float32)
    return int8_quantize_static(single, scale) if kind == "int8" else fp8_quantize_static(single, scale)


def kv_dequantize(codes: Array, scales: Array) -> Array:
    """codes · scale: [..., head_dim], [...] → [..., head_dim] in the dtype of scales."""
    return int8_dequantize(codes, scales) if codes.dtype == np.int8 else fp8_dequantize(codes, scales)


def kv_quantized_write(
    k: Array, v: Array, slot_mapping: Ints, k_cache: Array, v_cache: Array, k_scales: Array, v_scales: Array
) -> None:
    """Quantizes token t's key and value and stores them and their scales at slot_mapping[t].

    Args:
        k, v: [num_tokens, n_kv_heads, head_dim], floating.
        slot_mapping: [num_tokens]; −1 = padding, store nothing.
        k_cache, v_cache: [num_blocks, block_size, n_kv_heads, head_dim], int8, or uint8 for fp8; changed in place.
        k_scales, v_scales: [num_blocks, block_size, n_kv_heads] float32, changed in place.
    Raises:
        IndexError: see ref.kv_cache.kv_cache_write.
    """
    kind = "int8" if k_cache.dtype == np.int8 else "fp8"
    (k_codes, k_found), (v_codes, v_found) = kv_quantize(k, kind), kv_quantize(v, kind)
    kv_cache_write(k_codes, v_codes, slot_mapping, k_cache, v_cache)
    kv_cache_write(k_found, v_found, slot_mapping, k_scales, v_scales)


def kv_quantized_gather(cache: Array, scales: Array, block_table_row: Ints, seq_len: int) -> Array:
    """The first seq_len keys or values of one sequence in order, decoded.

    Args:
        cache: [num_blocks, block_size, n_kv_heads, head_dim], codes.
        scales: [num_blocks, block_size, n_kv_heads].
        block_table_row: [max_blocks_per_seq]; only the first ceil(seq_len / block_size) entries are read.
    Returns:
        [seq_len, n_kv_heads, head_dim], dtype of scales.
    """
    codes = kv_cache_gather(cache, block_table_row, seq_len)
    return kv_dequantize(codes, kv_cache_gather(scales, block_table_row, seq_len))


def check_kind(kind: str) -> None:
    """Raises ValueError for a kind of cache that is neither "int8" nor "fp8"."""
    if kind not in STORED:
        raise ValueError(f"a quantized KV cache is of kind {', '.join(STORED)}; found {kind!r}")
