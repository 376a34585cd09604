"""Rotary embedding fused with the KV write on a GPU: cuda/rope.cu. Defined by ref.rope and ref.kv_cache, and by
ref.quant.kv where the caches hold codes."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.coded_kv import KVArray
from engine.errors import KernelError
from engine.kernels.check import (
    Parts,
    cache_pair,
    ceil_div,
    literal,
    require,
    require_contiguous,
    stride,
    type_name,
    width,
)
from engine.kernels.device import Device, Instance

Array = Any

MAX_THREADS = 256
MAX_LANES = 32


def rope_kv_write(
    q: Array,
    k: Array,
    v: Array,
    cos_sin: Array,
    slot_mapping: Array,
    k_cache: KVArray,
    v_cache: KVArray,
    *,
    interleaved: bool = False,
    device: Device,
) -> Array:
    """Rotates q and k, stores k and v at their slots, and gives the rotated q.

    q [num_tokens, n_heads, head_dim]; k, v [num_tokens, n_kv_heads, head_dim], all parts of larger rows if need be;
    cos_sin [num_tokens, rotary_dim] float32; slot_mapping [num_tokens] int32, negative = store nothing; caches
    [num_blocks, block_size, n_kv_heads, head_dim] in q's dtype, or both as codes.
    """
    return _launch("rope_kv_write", (q, k, v), (), 0.0, cos_sin, slot_mapping, k_cache, v_cache, interleaved, device)


def qk_norm_rope_kv_write(
    q: Array,
    k: Array,
    v: Array,
    q_weight: Array,
    k_weight: Array,
    eps: float,
    cos_sin: Array,
    slot_mapping: Array,
    k_cache: KVArray,
    v_cache: KVArray,
    *,
    interleaved: bool = False,
    device: Device,
) -> Array:
    """The same after an RMSNorm of each head by q_weight and k_weight: [head_dim], or a row a head."""
    weights = (q_weight, k_weight)
    place = (cos_sin, slot_mapping, k_cache, v_cache)
    return _launch("qk_norm_rope_kv_write", (q, k, v), weights, eps, *place, interleaved, device)


def kv_cache_write(
    k: Array, v: Array, slot_mapping: Array, k_cache: KVArray, v_cache: KVArray, *, device: Device
) -> None:
    """Stores k and v as they are: a rotation of no element."""
    require("kv_cache_write", "k", k, (None, None, None))
    cos_sin = device.empty((k.shape[0], 0), np.float32)
    nothing = k[:, :0]
    _launch("rope_kv_write", (nothing, k, v), (), 0.0, cos_sin, slot_mapping, k_cache, v_cache, False, device)


def _launch(
    kernel: str,
    qkv: tuple[Array, Array, Array],
    weights: tuple[Array, ...],
    eps: float,
    cos_sin: Array,
    slot_mapping: Array,
    k_cache: KVArray,
    v_cache: KVArray,
    interleaved: bool,
    device: Device,
) -> Array:
    (keys, k_scales, cached), (values, v_scales, _) = _check(
        kernel, qkv, weights, cos_sin, slot_mapping, k_cache, v_cache
    )
    q = qkv[0]
    num_tokens, n_heads, head_dim = q.shape
    n_kv_heads, rotary_dim = keys.shape[2], cos_sin.shape[1]
    q_out = device.empty(q.shape, q.dtype)
    if not num_tokens:
        return q_out
    lanes = _lanes(kernel, head_dim, rotary_dim, width(q))
    grid = (num_tokens, ceil_div((n_heads + 2 * n_kv_heads) * lanes, MAX_THREADS))
    arguments = [*qkv, *weights, cos_sin, slot_mapping, keys, values, k_scales, v_scales, q_out]
    arguments += map(np.int32, (n_heads, n_kv_heads, head_dim, rotary_dim))
    arguments += [stride(array, axis) for array in (*qkv, q_out) for axis in (0, 1)]
    if weights:
        arguments += [np.int64(head_dim * (weight.ndim - 1)) for weight in weights]
        arguments.append(np.float32(eps))
    type_ = type_name(kernel, "q", q)
    codes = "" if k_scales is None else f", {cached}"
    entry = f"{kernel}<{type_}, {literal(interleaved)}, {lanes}{codes}>"
    device.launch(Instance("rope", entry), grid, (MAX_THREADS,), arguments)
    return q_out


def _check(
    kernel: str,
    qkv: tuple[Array, Array, Array],
    weights: tuple[Array, ...],
    cos_sin: Array,
    slot_mapping: Array,
    k_cache: KVArray,
    v_cache: KVArray,
) -> tuple[Parts, Parts]:
    """What the caches consist of. Raises KernelError for arrays that do not fit each other."""
    q, k, v = qkv
    require(kernel, "q", q, (None, None, None))
    num_tokens, n_heads, head_dim = q.shape
    require(kernel, "k", k, (num_tokens, None, head_dim), q.dtype)
    n_kv_heads = k.shape[1]
    require(kernel, "v", v, (num_tokens, n_kv_heads, head_dim), q.dtype)
    for name, weight, heads in zip(("q_weight", "k_weight"), weights, (n_heads, n_kv_heads), strict=False):
        require(kernel, name, weight, (head_dim,) if weight.ndim == 1 else (heads, head_dim), q.dtype)
        require_contiguous(kernel, name, weight)
    require(kernel, "cos_sin", cos_sin, (num_tokens, None), np.float32)
    require_contiguous(kernel, "cos_sin", cos_sin)
    if cos_sin.shape[1] % 2 or cos_sin.shape[1] > head_dim:
        raise KernelError(f"{kernel}: cos_sin has {cos_sin.shape[1]} columns; expected an even number up to {head_dim}")
    require(kernel, "slot_mapping", slot_mapping, (num_tokens,), np.int32)
    return cache_pair(kernel, k_cache, v_cache, n_kv_heads, head_dim, q.dtype)


def _lanes(kernel: str, head_dim: int, rotary_dim: int, piece: int) -> int:
    """Lanes that share a head, a power of two: each has two pieces of 16 bytes, both parts of the pairs in them."""
    needed = ceil_div(rotary_dim // 2, piece) + ceil_div(head_dim - rotary_dim, 2 * piece)
    lanes = 1
    while lanes < needed:
        lanes *= 2
    if lanes > MAX_LANES:
        raise KernelError(f"{kernel}: head_dim {head_dim} is too large; a warp covers {MAX_LANES * 2 * piece}")
    return lanes
