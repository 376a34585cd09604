"""Paged attention on a GPU: cuda/attention_decode.cu, attention_prefill.cu and, on Hopper, attention_prefill_sm90.cu.

Defined by ref.attention.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.coded_kv import KVArray
from engine.errors import KernelError
from engine.kernels.check import (
    Parts,
    cache_pair,
    ceil_div,
    require,
    require_aligned,
    require_contiguous,
    require_half,
    stride,
    type_name,
)
from engine.kernels.device import Boxes, Device, Instance

Array = Any

HEAD_DIMS = (64, 80, 96, 128, 256)
CHUNK = 16  # tokens that a warp of attention_decode takes at once; of codes twice as many
HEADS = 16  # query heads that a block of it takes; of codes half, where so few share a KV head or heads are large
DECODE_WARPS = 4
LONG = 32768  # tokens that a sequence may have, from which on its splits are long
HOPPER_TILES = {64: 128, 128: 128, 256: 64}  # tokens of a tile of attention_prefill_sm90, by head_dim
HOPPER_BOX = 16  # tokens that it copies at once
BLOCKS_PER_SM = 1  # of attention_decode, that a grid is split for: more splits cost more to combine than they hide


def attention_decode(
    q: Array,
    k_cache: KVArray,
    v_cache: KVArray,
    block_table: Array,
    seq_lens: Array,
    sm_scale: float,
    window: int | None = None,
    *,
    out: Array | None = None,
    device: Device,
) -> Array:
    """One query a sequence: q [num_seqs, n_heads, head_dim], a part of larger rows if need be → the same shape.

    k_cache, v_cache [num_blocks, block_size, n_kv_heads, head_dim], in q's dtype or both as codes (see
    engine.coded_kv); block_table [num_seqs, max_blocks_per_seq] int32;
    seq_lens [num_seqs] int32, 0 gives zeros. window: keys that a query sees, itself included; None: all.

    The tokens of a sequence are split over several blocks where sequences and heads alone would not fill the GPU. The
    kernel launched just before this one may write q and a sequence's newest key and value; all else was there before.
    """
    kernel = "attention_decode"
    require(kernel, "q", q, (None, None, None))
    num_seqs, n_heads, head_dim = q.shape
    require(kernel, "seq_lens", seq_lens, (num_seqs,), np.int32)
    keys, values = _check(kernel, q, k_cache, v_cache, block_table, seq_lens)
    block_size, n_kv_heads = keys[0].shape[1:3]
    out = _output(kernel, q, out, device)
    if not out.size:
        return out
    n_rep, coded = n_heads // n_kv_heads, keys[1] is not None
    heads = HEADS if not coded or (n_rep > HEADS // 2 and head_dim <= 128) else HEADS // 2
    groups = ceil_div(n_rep, heads)
    num_blocks = num_seqs * n_kv_heads * groups
    longest = block_table.shape[1] * block_size
    num_splits = _num_splits(num_blocks, longest, device)
    partial = device.empty((num_seqs, n_heads, num_splits, head_dim), np.float32) if num_splits > 1 else None
    lse = device.empty((num_seqs, n_heads, num_splits), np.float32) if num_splits > 1 else None
    stage_bytes = 4 * CHUNK * head_dim + (16 * CHUNK if coded else 0)
    stages = 3 if head_dim <= 128 else 2
    if coded and 2 * DECODE_WARPS * stages * stage_bytes > device.max_shared_bytes:  # of two blocks an SM
        stages = 2
    warp_bytes = max(stages * stage_bytes, 4 * HEADS * head_dim)
    # A block that has an SM for itself takes twice the warps: quicker where it has all tokens of its sequence (16
    # sequences of 8B 5.18 -> 5.05 ms a step) and where few sequences may be long (one of 128k tokens 141 -> 132 µs).
    # With two splits it is slower (8 sequences 4.63 -> 4.69 ms), and so where none is long: the SM has no room left for
    # the linear layer behind it, which fetches weights meanwhile (one of 1024 tokens, int8 74.4 -> 72.5 µs a layer).
    alone = num_blocks * num_splits <= device.num_sms and (num_splits == 1 or (num_splits > 2 and longest > LONG))
    warps = 2 * DECODE_WARPS if alone else DECODE_WARPS
    while warps * warp_bytes > device.max_shared_bytes:
        warps //= 2
    type_, codes = type_name(kernel, "q", q), f"{_codes(keys)}, {heads // 8}" if coded else ""
    caches = keys[0], values[0], keys[1], values[1]
    arguments = [q, *caches, block_table, seq_lens, out, partial, lse, device.counters]
    arguments += map(np.int32, (stride(q), stride(block_table), block_size, n_heads, n_kv_heads, window or 0))
    device.launch(
        Instance(kernel, f"attention_decode<{type_}, {head_dim}, {warps}, {stages}{codes}>"),
        (num_splits, n_kv_heads * groups, num_seqs),
        (32 * warps,),
        [*arguments, np.float32(sm_scale)],
        shared_bytes=warps * warp_bytes,
    )
    return out


def _num_splits(num_blocks: int, longest: int, device: Device) -> int:
    """As many as fill the GPU, but no split shorter than a chunk a warp. It knows the room of the block table only."""
    return max(1, min(BLOCKS_PER_SM * device.num_sms // num_blocks, longest // (CHUNK * DECODE_WARPS)))


def attention_prefill(
    q: Array,
    k_cache: KVArray,
    v_cache: KVArray,
    block_table: Array,
    cu_seqlens_q: Array,
    seq_lens: Array,
    sm_scale: float,
    window: int | None = None,
    *,
    out: Array | None = None,
    device: Device,
) -> Array:
    """Causal attention of chunks of prompts: q [num_tokens, n_heads, head_dim] → the same shape, contiguous.

    cu_seqlens_q [num_seqs + 1] int32: rows of q by sequence, each the last ones of its seq_lens tokens; rows of out
    before and after all of them are left as they are. The rest as in attention_decode.
    """
    kernel = "attention_prefill"
    require(kernel, "q", q, (None, None, None))
    num_tokens, n_heads, head_dim = q.shape
    keys, values = _check(kernel, q, k_cache, v_cache, block_table, seq_lens)
    block_size, n_kv_heads = keys[0].shape[1:3]
    num_seqs = seq_lens.shape[0]
    require(kernel, "cu_seqlens_q", cu_seqlens_q, (num_seqs + 1,), np.int32)
    out = _output(kernel, q, out, device)
    if not out.size:
        return out
    type_ = type_name(kernel, "q", q)
    sizes = (num_seqs, stride(q), stride(block_table), block_size, n_heads, n_kv_heads, window or 0)
    rest = [block_table, cu_seqlens_q, seq_lens, out, *map(np.int32, sizes), np.float32(sm_scale)]
    shape = head_dim, num_tokens, num_seqs, n_heads, device
    if device.has_wgmma and head_dim in HOPPER_TILES and keys[1] is None:
        boxes = (Boxes(cache, (1, min(HOPPER_BOX, block_size), 1, 64)) for cache in (k_cache, v_cache))
        instance, grid, block, shared_bytes = _hopper(type_, *shape)
        device.launch(instance, grid, (block,), [q, k_cache, v_cache, *rest, *boxes], shared_bytes=shared_bytes)
        return out
    instance, grid, block, shared_bytes = _portable(type_, _codes(keys), *shape)
    caches = keys[0], values[0], keys[1], values[1]
    device.launch(instance, grid, (block,), [q, *caches, *rest], shared_bytes=shared_bytes)
    return out


Launch = tuple[Instance, tuple[int, ...], int, int]  # of prefill: instance, grid, threads and shared memory of a block


def _portable(
    type_: str, codes: str, head_dim: int, num_tokens: int, num_seqs: int, n_heads: int, device: Device
) -> Launch:
    """Two stages where they leave an SM as many blocks as one stage does; it has registers for two. Of codes one, and
    beside it the codes of the next tile."""
    tiles, warps, tokens = (2, 4, 64) if head_dim <= 128 else (1, 4 if codes else 8, 32)  # 16 · tiles queries a warp
    queries = 16 * tiles * warps
    one, two = (2 * head_dim * (queries + 2 * stages * tokens) for stages in (1, 2))
    blocks = device.max_shared_bytes // two
    stages = 2 if blocks and blocks >= min(device.max_shared_bytes // one, 2) and not codes else 1
    shared_bytes = (one, two)[stages - 1] + (tokens * (2 * head_dim + 16) if codes else 0)
    entry = f"attention_prefill<{type_}, {head_dim}, {tiles}, {warps}, {stages}{codes}>"
    grid = (n_heads, ceil_div(num_tokens, queries) + num_seqs)
    return Instance("attention_prefill", entry), grid, 32 * warps, shared_bytes


def _hopper(type_: str, head_dim: int, num_tokens: int, num_seqs: int, n_heads: int, device: Device) -> Launch:
    queries, stages, tokens = 128, 2, HOPPER_TILES[head_dim]
    entry = f"attention_prefill_sm90<{type_}, {head_dim}, {tokens}, {stages}>"
    items = n_heads * (ceil_div(num_tokens, queries) + num_seqs)
    shared_bytes = 2 * head_dim * (queries + 2 * stages * tokens) + 2048
    return Instance("attention_prefill_sm90", entry), (min(items, device.num_sms),), 384, shared_bytes


def _codes(cache: Parts) -> str:
    """The last argument of a template, where a cache holds codes."""
    return "" if cache[1] is None else f", {cache[2]}"


def _output(kernel: str, q: Array, out: Array | None, device: Device) -> Array:
    """A new array like q, or out if it is one. Raises KernelError if it is not."""
    if out is None:
        return device.empty(q.shape, q.dtype)
    require(kernel, "out", out, q.shape, q.dtype)
    require_contiguous(kernel, "out", out)
    return out


def _check(
    kernel: str, q: Array, k_cache: KVArray, v_cache: KVArray, block_table: Array, seq_lens: Array
) -> tuple[Parts, Parts]:
    """What the caches consist of. Raises KernelError for arrays that do not fit each other."""
    _, n_heads, head_dim = q.shape
    if head_dim not in HEAD_DIMS:
        raise KernelError(
            f"{kernel}: head_dim {head_dim} of q has no kernel; there are {', '.join(map(str, HEAD_DIMS))}"
        )
    require_half(kernel, "q", q)
    require(kernel, "q", q, (None, n_heads, head_dim))
    if q.shape[0] and stride(q, 1) != head_dim:
        raise KernelError(f"{kernel}: heads of q lie {stride(q, 1)} elements apart; expected {head_dim}")
    require_aligned(kernel, "q", q)
    keys, values = cache_pair(kernel, k_cache, v_cache, None, head_dim, q.dtype)
    require_aligned(kernel, "k_cache", keys[0])
    require_aligned(kernel, "v_cache", values[0])
    num_seqs = seq_lens.shape[0]
    require(kernel, "seq_lens", seq_lens, (num_seqs,), np.int32)
    require(kernel, "block_table", block_table, (num_seqs, None), np.int32)
    n_kv_heads = keys[0].shape[2]
    if n_heads % n_kv_heads:
        raise KernelError(f"{kernel}: {n_heads} heads of q cannot share {n_kv_heads} KV heads evenly")
    return keys, values
