"""The keys and values of one sequence, kept in pages while it grows: what generation has and a single pass has not."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ref.attention import attention_prefill
from ref.kv_cache import kv_cache_slots, kv_cache_write

Array = NDArray[Any]


class Cache:
    """Room for num_tokens tokens of every layer, in blocks of block_size.

    num_cached: tokens that earlier passes have put in; the next pass starts at this position.
    table_tokens: the number of tokens that chose the rope table, for good, since cached keys are rotated already.
    block_table [1, num_blocks] runs backwards, for any order must do.
    k, v: by layer, [num_blocks, block_size, n_kv_heads, head_dim].
    """

    def __init__(self, num_tokens: int, block_size: int, table_tokens: int) -> None:
        self.block_size = block_size
        self.block_table = np.arange(-(-num_tokens // block_size))[None, ::-1]
        self.table_tokens = table_tokens
        self.num_cached = 0
        self.k: dict[int, Array] = {}
        self.v: dict[int, Array] = {}

    def attend(self, layer: int, q: Array, k: Array, v: Array, sm_scale: float, window: int | None) -> Array:
        """Stores the keys and values of new tokens, then attends from them to all: see ref.attention.

        Args:
            q: [num_tokens, n_heads, head_dim], rotated.
            k, v: [num_tokens, n_kv_heads, head_dim], k rotated.
        Returns:
            [num_tokens, n_heads, head_dim].
        """
        if layer not in self.k:
            room = (self.block_table.shape[1], self.block_size)
            self.k[layer], self.v[layer] = np.zeros(room + k.shape[1:], k.dtype), np.zeros(room + v.shape[1:], v.dtype)
        k_cache, v_cache = self.k[layer], self.v[layer]
        num_tokens = len(q)
        positions = np.arange(self.num_cached, self.num_cached + num_tokens)
        kv_cache_write(k, v, kv_cache_slots(self.block_table[0], positions, self.block_size), k_cache, v_cache)
        cu_seqlens_q, seq_lens = np.array([0, num_tokens]), np.array([self.num_cached + num_tokens])
        return attention_prefill(q, k_cache, v_cache, self.block_table, cu_seqlens_q, seq_lens, sm_scale, window)
