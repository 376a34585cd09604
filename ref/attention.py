"""Causal attention: dense, then over the paged cache for prefill and decode, then cut into splits and joined again.

Formula, for the query at position p of one head:  out = Σ_j softmax_j(sm_scale · q·k_j) v_j  over the visible keys
j ≤ p and, with a window, j > p − window (so a query sees `window` keys, itself included).
Grouped queries: n_heads is a multiple of n_kv_heads, and query head h reads KV head
h // (n_heads / n_kv_heads). lse = log Σ_j exp(sm_scale · q·k_j), natural log, is what it takes to join parts later.
Values may be of another width than keys, as in ref/mla.py; the answer has theirs.

Source: Vaswani et al. 2017, "Attention Is All You Need"; Ainslie et al. 2023, "GQA".
Numerics: scores, softmax and sums in q's dtype, one rounding at the end. A kernel that feeds the probabilities to
tensor cores rounds them to `storage` first; the row's sum keeps the unrounded ones.
Edge cases: a query that sees no key gives zeros and lse = −inf. No key that is not visible is ever read, so NaN in
slots that belong to nobody does no harm.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ref.kv_cache import kv_cache_gather
from ref.numerics import logsumexp, round_to, softmax

Array = NDArray[Any]
Ints = NDArray[np.integer[Any]]


def attend(q: Array, k: Array, v: Array, sm_scale: float, storage: str | None = None) -> tuple[Array, Array]:
    """One query over the keys that it sees; the heart of this file.

    Args:
        q: [n_heads, head_dim].
        k, v: [num_keys, n_kv_heads, head_dim].
    Returns:
        out [n_heads, head_dim] and lse [n_heads], dtype of q.
    """
    n_heads, group = q.shape[0], q.shape[0] // k.shape[1]
    out, lse = np.empty((n_heads, v.shape[-1]), q.dtype), np.empty(n_heads, q.dtype)
    for head in range(n_heads):
        keys, values = k[:, head // group].astype(q.dtype), v[:, head // group].astype(q.dtype)
        scores = (keys @ q[head]) * q.dtype.type(sm_scale)  # [num_keys]
        out[head] = round_to(softmax(scores), storage) @ values
        lse[head] = logsumexp(scores)
    return out, lse


def logn_scale(positions: Ints, length: int) -> NDArray[np.float64]:
    """What Qwen 1 multiplies the query at each position by: log(p + 1) / log(length) from p = length on, 1 before.

    Over more keys than in training a softmax spreads more thinly; this keeps its entropy. Source: Su 2021,
    "Entropy invariance of attention"; Bai et al. 2023, "Qwen Technical Report".

    Args:
        positions: [num_tokens], from 0; the query at p sees p + 1 keys.
        length: tokens of a training sequence (seq_length of the config), above 1.
    Returns:
        [num_tokens] float64.
    """
    scale: NDArray[np.float64] = np.log(np.maximum(np.asarray(positions) + 1, length)) / np.log(length)
    return scale


def logn_query(q: Array, positions: Ints, length: int) -> Array:
    """Each query times the logn_scale of its position.

    Args:
        q: [num_tokens, n_heads, head_dim].
        positions: [num_tokens], from 0.
        length: see logn_scale.
    Returns:
        [num_tokens, n_heads, head_dim], dtype of q.

    Numerics: one rounding, of the product.
    """
    scaled: Array = q * logn_scale(positions, length)[:, None, None].astype(q.dtype)
    return scaled


def first_visible(position: int, window: int | None) -> int:
    """Position of the oldest key that the query at `position` sees."""
    return 0 if window is None else max(0, position - window + 1)


def attention_dense(
    q: Array, k: Array, v: Array, sm_scale: float, window: int | None = None, *, storage: str | None = None
) -> Array:
    """Causal attention of one sequence, its keys side by side.

    Args:
        q: [q_len, n_heads, head_dim], the last q_len tokens of the sequence.
        k, v: [kv_len, n_kv_heads, head_dim], all tokens; kv_len ≥ q_len.
    Returns:
        [q_len, n_heads, head_dim], dtype of q.
    """
    out = np.empty((*q.shape[:2], v.shape[-1]), q.dtype)
    for i in range(q.shape[0]):
        position = k.shape[0] - q.shape[0] + i
        visible = slice(first_visible(position, window), position + 1)
        out[i], _ = attend(q[i], k[visible], v[visible], sm_scale, storage)
    return out


def attention_prefill(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    block_table: Ints,
    cu_seqlens_q: Ints,
    seq_lens: Ints,
    sm_scale: float,
    window: int | None = None,
    *,
    storage: str | None = None,
) -> Array:
    """Causal attention of several sequences of any length over the paged cache, which already holds their new keys.

    Sequence s has the queries q[cu_seqlens_q[s] : cu_seqlens_q[s + 1]]; query i of its q_len stands at position
    seq_lens[s] − q_len + i. That covers a whole prompt, a chunk of one, and decode (q_len 1).

    Args:
        q: [num_tokens, n_heads, head_dim], the sequences one after another.
        k_cache, v_cache: [num_blocks, block_size, n_kv_heads, head_dim].
        block_table: [num_seqs, max_blocks_per_seq].
        cu_seqlens_q: [num_seqs + 1], running sum of query lengths, from 0.
        seq_lens: [num_seqs], keys of each sequence, the new ones included.
    Returns:
        [num_tokens, n_heads, head_dim], dtype of q; rows past cu_seqlens_q[−1] are padding and come back as zeros.
    """
    out = np.zeros((*q.shape[:2], v_cache.shape[-1]), q.dtype)
    for s in range(len(seq_lens)):
        rows = slice(int(cu_seqlens_q[s]), int(cu_seqlens_q[s + 1]))
        k = kv_cache_gather(k_cache, block_table[s], int(seq_lens[s]))
        v = kv_cache_gather(v_cache, block_table[s], int(seq_lens[s]))
        out[rows] = attention_dense(q[rows], k, v, sm_scale, window, storage=storage)
    return out


def attention_decode(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    block_table: Ints,
    seq_lens: Ints,
    sm_scale: float,
    window: int | None = None,
    *,
    num_splits: int = 1,
    storage: str | None = None,
) -> Array:
    """Attention of one query a sequence, its last token, over the paged cache.

    Args:
        q: [num_seqs, n_heads, head_dim].
        k_cache, v_cache, block_table, seq_lens: as in attention_prefill.
        num_splits: into how many parts each sequence's keys are cut; the answer is the same, to rounding.
    Returns:
        [num_seqs, n_heads, head_dim], dtype of q.
    """
    partials = attention_decode_split(
        q, k_cache, v_cache, block_table, seq_lens, sm_scale, window, num_splits=num_splits, storage=storage
    )
    return attention_combine(*partials)[0]


def attention_decode_split(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    block_table: Ints,
    seq_lens: Ints,
    sm_scale: float,
    window: int | None = None,
    *,
    num_splits: int,
    storage: str | None = None,
) -> tuple[Array, Array]:
    """First half of attention_decode: the keys of each sequence are cut into num_splits runs of whole blocks.

    One query cannot fill a GPU, but its keys can be shared out: each split answers for its own keys only, and
    attention_combine joins the answers. Source: Dao et al. 2023, "Flash-Decoding".

    Args:
        q, k_cache, v_cache, block_table, seq_lens: as in attention_decode.
    Returns:
        partial_out [num_splits, num_seqs, n_heads, head_dim] and partial_lse [num_splits, num_seqs, n_heads], dtype
        of q.

    Edge cases: a split without keys (short sequence, seq_len 0, all outside the window) is zeros and −inf.
    """
    partial_out = np.zeros((num_splits, *q.shape[:2], v_cache.shape[-1]), q.dtype)
    partial_lse = np.full((num_splits, *q.shape[:2]), -np.inf, q.dtype)
    block_size = k_cache.shape[1]
    for s, seq_len in enumerate(int(n) for n in seq_lens):
        k = kv_cache_gather(k_cache, block_table[s], seq_len)
        v = kv_cache_gather(v_cache, block_table[s], seq_len)
        num_blocks = -(-seq_len // block_size)
        keys_per_split = -(-num_blocks // num_splits) * block_size
        for split in range(num_splits):
            start = max(split * keys_per_split, first_visible(seq_len - 1, window))
            keys = slice(start, max(start, min((split + 1) * keys_per_split, seq_len)))
            partial_out[split, s], partial_lse[split, s] = attend(q[s], k[keys], v[keys], sm_scale, storage)
    return partial_out, partial_lse


def attention_combine(partial_out: Array, partial_lse: Array) -> tuple[Array, Array]:
    """Joins answers over separate sets of keys into the answer over all of them.

    A part's share is exp(lse_part − lse) with lse = log Σ exp(lse_part): out = Σ_part share · out_part.

    Args:
        partial_out: [num_splits, num_seqs, n_heads, head_dim].
        partial_lse: [num_splits, num_seqs, n_heads].
    Returns:
        out [num_seqs, n_heads, head_dim] and lse [num_seqs, n_heads], dtype of partial_out.

    Edge cases: a part without keys (−inf) has share 0; if all are, out is zeros and lse −inf.
    """
    shares = softmax(partial_lse, axis=0)[..., None]  # [num_splits, num_seqs, n_heads, 1]
    out: Array = np.sum(shares * partial_out, axis=0)
    return out, logsumexp(partial_lse, axis=0)
