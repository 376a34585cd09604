"""The keys and values of one sequence, kept in pages while it grows: what generation has and a single pass has not."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ref.attention import attention_prefill
from ref.kv_cache import kv_cache_slots, kv_cache_write
from ref.mla import mla_decode, mla_prefill
from ref.mla_latent import latent_cache_write
from ref.quant.kv import kv_dequantize, kv_quantize

Array = NDArray[Any]


class Cache:
    """Room for num_tokens tokens of every layer, in blocks of block_size.

    num_cached: tokens that earlier passes have put in; the next pass starts at this position.
    table_tokens: the number of tokens that chose the rope table, for good, since cached keys are rotated already.
    block_table [1, num_blocks] runs backwards, for any order must do.
    k, v: by layer, [num_blocks, block_size, n_kv_heads, head_dim] (with `extend` [num_rows, n_kv_heads, head_dim]); or,
    with latent attention,
    latent: by layer, [num_blocks, block_size, kv_lora_rank + qk_rope_head_dim].
    codes: "fp8" or "int8": k and v are what is left of keys and values in a cache of such codes (ref.quant.kv).
    """

    def __init__(self, num_tokens: int, block_size: int, table_tokens: int, codes: str | None = None) -> None:
        self.codes = codes
        self.block_size = block_size
        self.block_table = np.arange(-(-num_tokens // block_size))[None, ::-1]
        self.table_tokens = table_tokens
        self.num_cached = 0
        self.k: dict[int, Array] = {}
        self.v: dict[int, Array] = {}
        self.latent: dict[int, Array] = {}

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
        if self.codes is not None:
            k, v = (kv_dequantize(*kv_quantize(x, self.codes)).astype(x.dtype) for x in (k, v))
        kv_cache_write(k, v, self._slots(len(q)), k_cache, v_cache)
        cu_seqlens_q, seq_lens = np.array([0, len(q)]), np.array([self.num_cached + len(q)])
        return attention_prefill(q, k_cache, v_cache, self.block_table, cu_seqlens_q, seq_lens, sm_scale, window)

    def attend_latent(self, layer: int, q: Array, latent: Array, kv_b_proj: Array, sm_scale: float) -> Array:
        """Stores the latents of new tokens, then attends from them to all: expanded, or absorbed for a single one.

        Args:
            q: [num_tokens, n_heads, qk_head_dim], rotated.
            latent: [num_tokens, kv_lora_rank + qk_rope_head_dim].
            kv_b_proj: see ref.mla.
        Returns:
            [num_tokens, n_heads, v_head_dim].
        """
        if layer not in self.latent:
            room = (self.block_table.shape[1], self.block_size, latent.shape[1])
            self.latent[layer] = np.zeros(room, latent.dtype)
        pages = self.latent[layer]
        latent_cache_write(latent, self._slots(len(q)), pages)
        seq_lens = np.array([self.num_cached + len(q)])
        if len(q) == 1:
            return mla_decode(q, pages, kv_b_proj, self.block_table, seq_lens, sm_scale)
        return mla_prefill(q, pages, kv_b_proj, self.block_table, np.array([0, len(q)]), seq_lens, sm_scale)

    def extend(self, layer: int, k: Array, v: Array) -> tuple[Array, Array]:
        """Stores keys and values without pages, and gives all that the layer has: for attention of an own kind.

        Args:
            k, v: [num_tokens, n_kv_heads, head_dim] of new rows.
        Returns:
            keys and values of all rows, the new ones last.
        """
        past_k, past_v = self.k.get(layer, k[:0]), self.v.get(layer, v[:0])
        self.k[layer], self.v[layer] = np.concatenate([past_k, k]), np.concatenate([past_v, v])
        return self.k[layer], self.v[layer]

    def _slots(self, num_tokens: int) -> NDArray[np.int64]:
        positions = np.arange(self.num_cached, self.num_cached + num_tokens)
        return kv_cache_slots(self.block_table[0], positions, self.block_size)
