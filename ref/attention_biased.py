"""Attention of a prefix language model with a bias on scores, as CPM-Ant has it: one op for prompts and for decode.

A prompt is context: its tokens see each other both ways. A token after it sees all up to itself. To each score a
number is added that a head has learned for the distance of the two, or for the crossing between the soft prompt, the
learned vectors in front, and the tokens behind it.
Source: Raffel et al. 2020, "T5", for the buckets of distance and the prefix; the OpenBMB CPM-Live project.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ref.kv_cache import kv_cache_gather
from ref.numerics import softmax

Array = NDArray[Any]
Ints = NDArray[np.integer[Any]]


def position_bucket(distance: Ints, num_buckets: int, max_distance: int) -> NDArray[np.int64]:
    """Half of the buckets for keys up to the query, half for later ones; in each half a quarter of num_buckets
    distances of their own, then wider and wider steps, by the logarithm, up to max_distance.

    Args:
        distance: key minus query, any shape.
    Returns:
        int64 from 0 to num_buckets − 1, shape of distance.
    """
    half, exact = num_buckets // 2, num_buckets // 4
    away = np.abs(distance)
    steps = np.log(np.maximum(away, 1) / exact) / math.log(max_distance / exact) * (half - exact)
    wide = np.minimum(exact + steps.astype(np.int64), half - 1)
    buckets: NDArray[np.int64] = np.where(distance > 0, half, 0) + np.where(away < exact, away, wide)
    return buckets


def position_bias(first_query: int, num_keys: int, num_soft: int, bias_table: Array, max_distance: int) -> Array:
    """What is added to the scores of the last rows of a sequence: [n_heads, num_keys − first_query, num_keys].

    Args:
        first_query: place of the first query; places count the soft prompt, which comes first.
        num_soft: vectors of the soft prompt.
        bias_table: [num_buckets + 2, n_heads]; a row a bucket of distance for two of the same kind, then one for a
            token that looks at the soft prompt, then one for the soft prompt that looks at a token.
        max_distance: see position_bucket.
    Returns:
        [n_heads, num_keys − first_query, num_keys], dtype of bias_table.
    """
    num_buckets = len(bias_table) - 2
    key, query = np.arange(num_keys), np.arange(first_query, num_keys)[:, None]
    rows = position_bucket(key - query, num_buckets, max_distance)
    rows = np.where((query >= num_soft) & (key < num_soft), num_buckets, rows)
    rows = np.where((query < num_soft) & (key >= num_soft), num_buckets + 1, rows)
    return np.moveaxis(bias_table[rows], -1, 0)


def attention_biased_dense(
    q: Array, k: Array, v: Array, prefix_len: int, sm_scale: float, bias_table: Array, num_soft: int, max_distance: int
) -> Array:
    """softmax(sm_scale · q·k + bias) v of one sequence, its keys side by side.

    Args:
        q: [q_len, n_heads, head_dim], the last q_len rows of the sequence.
        k, v: [kv_len, n_heads, head_dim], all rows; kv_len ≥ q_len.
        prefix_len: so many rows are the prompt, the soft one included: all see them, also those before.
        bias_table: [num_buckets + 2, n_heads], see position_bias.
    Returns:
        [q_len, n_heads, head_dim], dtype of q.
    """
    kv_len, first = len(k), len(k) - len(q)
    scores = q.transpose(1, 0, 2) @ k.transpose(1, 2, 0) * q.dtype.type(sm_scale)  # [n_heads, q_len, kv_len]
    scores += position_bias(first, kv_len, num_soft, bias_table, max_distance)
    sees = np.maximum(np.arange(first, kv_len), prefix_len - 1)  # last key of each query
    scores[:, np.arange(kv_len) > sees[:, None]] = -np.inf
    out: Array = (softmax(scores) @ v.transpose(1, 0, 2)).transpose(1, 0, 2)
    return out


def attention_biased(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    block_table: Ints,
    cu_seqlens_q: Ints,
    seq_lens: Ints,
    prefix_lens: Ints,
    sm_scale: float,
    bias_table: Array,
    num_soft: int,
    max_distance: int,
) -> Array:
    """attention_biased_dense of several sequences over the paged cache, which already holds their new keys.

    Args:
        q: [num_tokens, n_heads, head_dim], the sequences one after another.
        k_cache, v_cache: [num_blocks, block_size, n_heads, head_dim].
        block_table: [num_seqs, max_blocks_per_seq].
        cu_seqlens_q: [num_seqs + 1], running sum of query lengths, from 0.
        seq_lens: [num_seqs], rows of each sequence, the soft prompt and the new ones included.
        prefix_lens: [num_seqs], rows of each prompt, the soft one included.
        bias_table: [num_buckets + 2, n_heads], see position_bias.
    Returns:
        [num_tokens, n_heads, head_dim], dtype of q.

    Edge cases: the rows of a prompt must be computed in one call, or the first would not see the last.
    """
    out = np.empty_like(q)
    for s in range(len(seq_lens)):
        rows = slice(int(cu_seqlens_q[s]), int(cu_seqlens_q[s + 1]))
        k, v = (kv_cache_gather(cache, block_table[s], int(seq_lens[s])) for cache in (k_cache, v_cache))
        prefix_len = int(prefix_lens[s])
        out[rows] = attention_biased_dense(q[rows], k, v, prefix_len, sm_scale, bias_table, num_soft, max_distance)
    return out
