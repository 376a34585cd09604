"""The KV pool: one pair of paged arrays a layer, sized once at start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Array = Any


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """What a group of layers must remember; the block manager and the runner see only this."""

    kind: Literal["full", "latent"]
    layers: tuple[int, ...]
    n_kv_heads: int  # latent: 1
    head_dim: int  # latent: kv_lora_rank + qk_rope_head_dim

    def bytes_per_block(self, block_size: int, itemsize: int) -> int:
        """Bytes of one block over all of these layers: keys and values, or the latents that stand for both."""
        arrays = 2 if self.kind == "full" else 1
        return arrays * len(self.layers) * block_size * self.n_kv_heads * self.head_dim * itemsize


@dataclass(frozen=True, slots=True)
class KVCache:
    """k_cache[layer], v_cache[layer]: [num_blocks, block_size, n_kv_heads, head_dim]; of layers with latent attention
    latent_cache[layer]: [num_blocks, block_size, kv_lora_rank + qk_rope_head_dim]."""

    k_cache: dict[int, Array]
    v_cache: dict[int, Array]
    latent_cache: dict[int, Array]
    block_size: int

    @property
    def num_bytes(self) -> int:
        groups = (self.k_cache, self.v_cache, self.latent_cache)
        return sum(int(array.nbytes) for arrays in groups for array in arrays.values())


def make_kv_cache(
    specs: tuple[CacheSpec, ...],
    num_blocks: int,
    block_size: int,
    dtype: Any = np.float32,
    allocate: Callable[..., Array] = np.zeros,  # on a CPU pages are taken from the system when first written
) -> KVCache:
    """Allocates the whole pool."""
    k_cache: dict[int, Array] = {}
    v_cache: dict[int, Array] = {}
    latent_cache: dict[int, Array] = {}
    for spec in specs:
        shape = (num_blocks, block_size, spec.n_kv_heads, spec.head_dim)
        for layer in spec.layers:
            if spec.kind == "latent":
                latent_cache[layer] = allocate((num_blocks, block_size, spec.head_dim), dtype=dtype)
                continue
            k_cache[layer] = allocate(shape, dtype=dtype)
            v_cache[layer] = allocate(shape, dtype=dtype)
    return KVCache(k_cache, v_cache, latent_cache, block_size)
