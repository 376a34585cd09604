"""Paged attention on a CPU, batched so that BLAS does the work. Checked against ref.attention by conformance."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from engine.coded_kv import KVArray, parts_of
from engine.cpu.kv_cache import blocks_of

Float32 = NDArray[np.float32]
Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

QUERY_TILE = 128  # rows of scores held at once: bounds memory at QUERY_TILE · n_heads/n_kv_heads · seq_len floats
DECODE_TILE = 32768  # tokens whose keys and values are gathered at once; a sequence that is longer is a tile of its own


def attention_decode(
    q: Float32,
    k_cache: KVArray,
    v_cache: KVArray,
    block_table: Int32,
    seq_lens: Int32,
    sm_scale: float,
    window: int | None = None,
    *,
    out: Float32 | None = None,
) -> Float32:
    """One query a sequence over its paged keys, [num_seqs, n_heads, head_dim] → the same shape.

    Sequences are padded to the longest of a group; groups are formed by powers of two of the length, so padding
    at most doubles the work, and cut into tiles, as many sequences may share the blocks of one long prompt.
    """
    shape = parts_of(v_cache)[0].shape
    out = np.empty((*q.shape[:2], shape[3]), np.float32) if out is None else out
    for rows in decode_groups(seq_lens, shape[1]):
        out[rows] = _decode_group(q[rows], k_cache, v_cache, block_table[rows], seq_lens[rows], sm_scale, window)
    return out


def _decode_group(
    q: Float32,
    k_cache: KVArray,
    v_cache: KVArray,
    block_table: Int32,
    seq_lens: Int32,
    sm_scale: float,
    window: int | None,
) -> Float32:
    """Of one group; what it gathers goes before the next is gathered."""
    k, v = gather(k_cache, block_table, seq_lens), gather(v_cache, block_table, seq_lens)
    return attend_padded(q, k, v, seq_lens, sm_scale, window)


def decode_groups(seq_lens: Int32, block_size: int) -> Iterator[Int64 | slice]:
    """Rows whose sequences are padded to the same length, all rows once; a slice where one group has them all."""
    bucket = np.frexp(seq_lens.astype(np.float64))[1]
    if bucket.min() == bucket.max() and len(seq_lens) * _padded(seq_lens, block_size) <= DECODE_TILE:
        yield slice(None)
        return
    for size in np.unique(bucket):
        group = np.flatnonzero(bucket == size)
        num_rows = max(1, DECODE_TILE // _padded(seq_lens[group], block_size))
        for start in range(0, len(group), num_rows):
            yield group[start : start + num_rows]


def _padded(seq_lens: Int32, block_size: int) -> int:
    """Tokens that are gathered for each sequence of a group: the longest, in whole blocks."""
    return -(-int(seq_lens.max()) // block_size) * block_size


def gather(cache: KVArray, block_table: Int32, seq_lens: Int32) -> Float32:
    """A copy of what a cache [num_blocks, block_size, …] holds of sequences, [num_seqs, longest, …], decoded.

    What lies behind a sequence that is shorter than the longest may be anything.
    """
    longest = int(seq_lens.max())
    shape = parts_of(cache)[0].shape
    blocks = np.maximum(block_table[:, : -(-longest // shape[1])], 0)
    gathered: Float32 = blocks_of(cache, blocks).reshape(len(seq_lens), -1, *shape[2:])[:, :longest]
    return gathered


def attend_padded(
    q: Float32, k: Float32, v: Float32, seq_lens: Int32, sm_scale: float, window: int | None = None
) -> Float32:
    """One query a sequence over its gathered keys, [num_seqs, n_heads, v's head_dim].

    q [num_seqs, n_heads, head_dim]; k [num_seqs, longest, n_kv_heads, head_dim]; v as k, but for its head_dim; what
    v has behind a sequence is overwritten.
    """
    num_seqs, n_heads, head_dim = q.shape
    longest, n_kv_heads = k.shape[1:3]
    place = np.arange(longest, dtype=np.int32)
    hidden = place >= seq_lens[:, None]
    if window is not None:
        hidden |= place < (seq_lens - window)[:, None]
    any_hidden = bool(hidden.any())
    if any_hidden:
        v[hidden] = 0.0  # the gathered copy: what lies behind a sequence may be anything, and 0 · NaN is NaN
    heads: Float32 = (q * np.float32(sm_scale)).reshape(num_seqs, n_kv_heads, n_heads // n_kv_heads, head_dim)
    scores: Float32 = heads @ k.transpose(0, 2, 3, 1)  # [num_seqs, n_kv_heads, n_rep, longest]
    if any_hidden:
        np.copyto(scores, np.float32(-np.inf), where=hidden[:, None, None, :])
    _softmax_in_place(scores)
    out: Float32 = scores @ v.transpose(0, 2, 1, 3)
    return out.reshape(num_seqs, n_heads, v.shape[3])


def attention_prefill(
    q: Float32,
    k_cache: KVArray,
    v_cache: KVArray,
    block_table: Int32,
    cu_seqlens_q: Int32,
    seq_lens: Int32,
    sm_scale: float,
    window: int | None = None,
    *,
    out: Float32 | None = None,
) -> Float32:
    """Causal attention of chunks of prompts over paged keys, [num_tokens, n_heads, head_dim] → the same shape.

    Query i of a sequence stands at position seq_len − q_len + i and sees itself and what lies before it, the last
    `window` of these if given. Rows before and after those of cu_seqlens_q are left as they are.
    """
    out = np.empty_like(q) if out is None else out
    block_size, *of_token = parts_of(k_cache)[0].shape[1:]
    ends = cu_seqlens_q.tolist()
    for row, seq_len in enumerate(seq_lens.tolist()):
        blocks = block_table[row, : -(-seq_len // block_size)]
        k, v = (
            blocks_of(cache, blocks).reshape(-1, *of_token)[:seq_len].transpose(1, 0, 2) for cache in (k_cache, v_cache)
        )
        first = seq_len - (ends[row + 1] - ends[row])  # position of the first query
        for start in range(ends[row], ends[row + 1], QUERY_TILE):
            end = min(start + QUERY_TILE, ends[row + 1])
            position = first + start - ends[row]
            out[start:end] = prefill_tile(q[start:end], k, v, position, sm_scale, window)
    return out


def prefill_tile(
    q: Float32, k: Float32, v: Float32, position: int, sm_scale: float, window: int | None = None
) -> Float32:
    """Queries at position, position + 1, … of one sequence, [num_rows, n_heads, v's head_dim].

    q [num_rows, n_heads, head_dim]; k [n_kv_heads, seq_len, head_dim]; v as k, but for its head_dim.
    """
    num_rows, n_heads, head_dim = q.shape
    n_kv_heads = k.shape[0]
    low = 0 if window is None else max(0, position - window + 1)
    high = position + num_rows  # no query of the tile sees further
    heads: Float32 = (q * np.float32(sm_scale)).reshape(num_rows, n_kv_heads, n_heads // n_kv_heads, head_dim)
    key_place = np.arange(low, high)
    query_place = np.arange(position, high)[:, None]
    hidden = key_place > query_place
    if window is not None:
        hidden |= key_place <= query_place - window
    out = np.empty((*heads.shape[:3], v.shape[2]), np.float32)
    for kv_head in range(n_kv_heads):
        rows = heads[:, kv_head].reshape(-1, head_dim)  # [num_rows · n_rep, head_dim]
        scores: Float32 = (rows @ k[kv_head, low:high].T).reshape(num_rows, -1, high - low)
        np.copyto(scores, np.float32(-np.inf), where=hidden[:, None, :])
        _softmax_in_place(scores)
        out[:, kv_head] = (scores.reshape(len(rows), -1) @ v[kv_head, low:high]).reshape(num_rows, -1, v.shape[2])
    return out.reshape(num_rows, n_heads, v.shape[2])


def _softmax_in_place(scores: Float32) -> None:
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
