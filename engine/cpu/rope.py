"""Rotary embedding fused with the KV write, on a CPU. Checked against ref.rope by conformance."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.coded_kv import KVArray
from engine.cpu.kv_cache import kv_cache_write

Float32 = NDArray[np.float32]
Int32 = NDArray[np.int32]


def rope_kv_write(
    q: Float32,
    k: Float32,
    v: Float32,
    cos_sin: Float32,
    slot_mapping: Int32,
    k_cache: KVArray,
    v_cache: KVArray,
    *,
    interleaved: bool = False,
) -> Float32:
    """Rotates q and k, stores k and v at their slots, and returns the rotated q.

    q [num_tokens, n_heads, head_dim]; k, v [num_tokens, n_kv_heads, head_dim]; cos_sin [num_tokens, head_dim];
    slot_mapping [num_tokens], all ≥ 0 here; caches [num_blocks, block_size, n_kv_heads, head_dim]. float32.
    interleaved: pairs are neighbours, not elements of the two halves.
    """
    kv_cache_write(rotate(k, cos_sin, interleaved), v, slot_mapping, k_cache, v_cache)
    return rotate(q, cos_sin, interleaved)


def qk_norm_rope_kv_write(
    q: Float32,
    k: Float32,
    v: Float32,
    q_weight: Float32,
    k_weight: Float32,
    eps: float,
    cos_sin: Float32,
    slot_mapping: Int32,
    k_cache: KVArray,
    v_cache: KVArray,
) -> Float32:
    """RMSNorm of each head of q and k by weights [head_dim], then rope_kv_write, whose shapes hold here too."""
    q, k = _head_norm(q, q_weight, eps), _head_norm(k, k_weight, eps)
    return rope_kv_write(q, k, v, cos_sin, slot_mapping, k_cache, v_cache)


def _head_norm(x: Float32, weight: Float32, eps: float) -> Float32:
    mean_square = np.einsum("thd,thd->th", x, x) / np.float32(x.shape[2])
    out: Float32 = x * (1.0 / np.sqrt(mean_square + np.float32(eps)))[:, :, None]
    out *= weight
    return out


def rotate(x: Float32, cos_sin: Float32, interleaved: bool) -> Float32:
    """Defined by ref.rope.rope: x [num_tokens, n_heads, rotary_dim], cos_sin [num_tokens, rotary_dim]."""
    half = x.shape[2] // 2
    cos, sin = cos_sin[:, None, :half], cos_sin[:, None, half:]
    firsts, seconds = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(0, half), slice(half, None))
    first, second = x[:, :, firsts], x[:, :, seconds]
    out = np.empty_like(x)
    np.multiply(first, cos, out=out[:, :, firsts])
    out[:, :, firsts] -= second * sin
    np.multiply(second, cos, out=out[:, :, seconds])
    out[:, :, seconds] += first * sin
    return out
