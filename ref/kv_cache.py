"""The paged KV cache: keys and values of past tokens, in blocks that need not be neighbours.

A cache is [num_blocks, block_size, n_kv_heads, head_dim]. A sequence owns a list of blocks, its row of the block
table; its token at position p lives in block block_table[p // block_size] at offset p % block_size. A slot is that
place as one number, block · block_size + offset. Source: Kwon et al. 2023, "PagedAttention".
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Ints = NDArray[np.integer[Any]]


def kv_cache_slots(block_table_row: Ints, positions: Ints, block_size: int) -> NDArray[np.int64]:
    """Slot of each position of one sequence: [max_blocks_per_seq], [num_tokens] → [num_tokens] int64."""
    positions = np.asarray(positions, np.int64)
    blocks: NDArray[np.int64] = np.asarray(block_table_row, np.int64)[positions // block_size]
    slots: NDArray[np.int64] = blocks * block_size + positions % block_size
    return slots


def kv_cache_write(k: Array, v: Array, slot_mapping: Ints, k_cache: Array, v_cache: Array) -> None:
    """Stores token t's key and value at slot_mapping[t].

    Args:
        k, v: [num_tokens, n_kv_heads, head_dim].
        slot_mapping: [num_tokens]; −1 = the token is padding, store nothing.
        k_cache, v_cache: [num_blocks, block_size, n_kv_heads, head_dim], changed in place.
    Raises:
        IndexError: a slot past the end of the cache, or below −1.

    Numerics: rounded to the cache's dtype.
    Edge cases: the same slot twice in one call is the caller's mistake; here the later token wins.
    """
    num_blocks, block_size = k_cache.shape[:2]
    for token, slot in enumerate(np.asarray(slot_mapping, np.int64)):
        if slot == -1:
            continue
        if not 0 <= slot < num_blocks * block_size:
            raise IndexError(f"slot {slot} of token {token} is outside a cache of {num_blocks * block_size} slots")
        k_cache[slot // block_size, slot % block_size] = k[token]
        v_cache[slot // block_size, slot % block_size] = v[token]


def kv_cache_gather(cache: Array, block_table_row: Ints, seq_len: int) -> Array:
    """The first seq_len entries of one sequence in order, as a dense copy.

    Args:
        cache: [num_blocks, block_size, n_kv_heads, head_dim].
        block_table_row: [max_blocks_per_seq]; only the first ceil(seq_len / block_size) entries are read.
    Returns:
        [seq_len, n_kv_heads, head_dim], dtype of cache.
    """
    slots = kv_cache_slots(block_table_row, np.arange(seq_len), cache.shape[1])
    gathered: Array = cache[slots // cache.shape[1], slots % cache.shape[1]]
    return gathered


def kv_cache_copy(k_cache: Array, v_cache: Array, src_blocks: Ints, dst_blocks: Ints) -> None:
    """Copies whole blocks within the cache: block src_blocks[i] over block dst_blocks[i].

    Used when two sequences share a block and one of them is about to write to it.

    Args:
        k_cache, v_cache: [num_blocks, block_size, n_kv_heads, head_dim], changed in place.
        src_blocks, dst_blocks: [num_copies]; no block twice in dst_blocks.
    Raises:
        IndexError: a block that is not there.

    Edge cases: a block that is both source and target is the caller's mistake, as copies have no order; here all
    sources are read before anything is written.
    """
    kv_cache_swap(k_cache, v_cache, k_cache, v_cache, src_blocks, dst_blocks)


def kv_cache_swap(
    k_cache: Array, v_cache: Array, k_other: Array, v_other: Array, src_blocks: Ints, dst_blocks: Ints
) -> None:
    """Copies whole blocks to another cache: block src_blocks[i] over block dst_blocks[i] of the other.

    Used to keep what a preempted sequence has computed in the host's memory; with the caches given the other way
    round it brings it back.

    Args:
        k_cache, v_cache: [num_blocks, block_size, n_kv_heads, head_dim].
        k_other, v_other: [any number of blocks, block_size, n_kv_heads, head_dim], of the same dtype, changed in place.
        src_blocks, dst_blocks: [num_copies]; no block twice in dst_blocks.
    Raises:
        IndexError: a block that is not there.
    """
    for blocks, cache in ((src_blocks, k_cache), (dst_blocks, k_other)):
        outside = [block for block in np.asarray(blocks).tolist() if not 0 <= block < len(cache)]
        if outside:
            raise IndexError(f"block {outside[0]} is outside a cache of {len(cache)} blocks")
    for cache, other in ((k_cache, k_other), (v_cache, v_other)):
        other[np.asarray(dst_blocks, np.int64)] = cache[np.asarray(src_blocks, np.int64)]
