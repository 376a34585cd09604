"""The KV pool: one pair of paged arrays a layer, sized once at start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from engine.batch import Int32, StepPlan
from engine.coded_kv import CODES, SCALE_BYTES, CodedKV, KVArray, KVKind

Array = Any


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """What a group of layers must remember; the block manager and the runner see only this."""

    kind: Literal["full", "latent"]
    layers: tuple[int, ...]
    n_kv_heads: int  # latent: 1
    head_dim: int  # latent: kv_lora_rank + qk_rope_head_dim

    def bytes_per_block(self, block_size: int, itemsize: int, codes: KVKind | None = None) -> int:
        """Bytes of one block over all of these layers: keys and values, or the latents that stand for both.

        itemsize: of a number. codes: keys and values are codes of 8 bits, with a scale a head of a token.
        """
        arrays = 2 if self.kind == "full" else 1
        head = self.head_dim * itemsize if codes is None else self.head_dim + SCALE_BYTES
        return arrays * len(self.layers) * block_size * self.n_kv_heads * head

    def num_arrays(self, codes: KVKind | None = None) -> int:
        """Of all of these layers, each an allocation of its own."""
        return len(self.layers) * (1 if self.kind == "latent" else 2 if codes is None else 4)


@dataclass(frozen=True, slots=True)
class KVCache:
    """k_cache[layer], v_cache[layer]: [num_blocks, block_size, n_kv_heads, head_dim], or codes for it; of layers with
    latent attention latent_cache[layer]: [num_blocks, block_size, kv_lora_rank + qk_rope_head_dim]."""

    k_cache: dict[int, KVArray]
    v_cache: dict[int, KVArray]
    latent_cache: dict[int, Array]
    block_size: int

    @property
    def num_bytes(self) -> int:
        groups = (self.k_cache, self.v_cache, self.latent_cache)
        return sum(int(array.nbytes) for arrays in groups for array in arrays.values())


class KVSwap:
    """Copies blocks between the pool and another one in memory of the host, as a plan says."""

    def __init__(
        self, cache: KVCache, on_host: KVCache, copy: Callable[..., None], to_device: Callable[[Any], Array]
    ) -> None:
        """copy: kv_cache_swap of an op table; to_device: of integers, [n] int32."""
        self.on_host = on_host
        self._cache, self._copy, self._to_device = cache, copy, to_device

    def __call__(self, plan: StepPlan) -> None:
        self._move(self._cache, self.on_host, plan.swaps_out)
        self._move(self.on_host, self._cache, plan.swaps_in)

    def _move(self, source: KVCache, target: KVCache, pairs: Int32) -> None:
        if not len(pairs):
            return
        src, dst = (self._to_device(np.ascontiguousarray(column)) for column in pairs.T)
        for layer, keys in source.k_cache.items():
            values = source.v_cache[layer]
            self._copy(keys, values, target.k_cache[layer], target.v_cache[layer], src, dst)
        for layer, latent in source.latent_cache.items():  # keys of one head, and values that are the same
            heads, other = latent[:, :, None], target.latent_cache[layer][:, :, None]
            self._copy(heads, heads, other, other, src, dst)


def make_kv_cache(
    specs: tuple[CacheSpec, ...],
    num_blocks: int,
    block_size: int,
    dtype: Any = np.float32,
    allocate: Callable[..., Array] = np.zeros,  # on a CPU pages are taken from the system when first written
    codes: KVKind | None = None,
) -> KVCache:
    """Allocates the whole pool. codes: in place of numbers of keys and values in dtype."""

    def pages(shape: tuple[int, ...]) -> KVArray:
        if codes is None:
            return allocate(shape, dtype=dtype)
        return CodedKV(allocate(shape, dtype=CODES[codes]), allocate(shape[:3], dtype=np.float32))

    k_cache: dict[int, KVArray] = {}
    v_cache: dict[int, KVArray] = {}
    latent_cache: dict[int, Array] = {}
    for spec in specs:
        shape = (num_blocks, block_size, spec.n_kv_heads, spec.head_dim)
        for layer in spec.layers:
            if spec.kind == "latent":
                latent_cache[layer] = allocate((num_blocks, block_size, spec.head_dim), dtype=dtype)
                continue
            k_cache[layer], v_cache[layer] = pages(shape), pages(shape)
    return KVCache(k_cache, v_cache, latent_cache, block_size)
