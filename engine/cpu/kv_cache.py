"""The write of keys and values into the paged cache, on a CPU. Checked against ref.kv_cache by conformance."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]
Int32 = NDArray[np.int32]


def kv_cache_write(k: Float32, v: Float32, slot_mapping: Int32, k_cache: Float32, v_cache: Float32) -> None:
    """Stores k and v [num_tokens, n_kv_heads, head_dim] at slot_mapping [num_tokens], all ≥ 0 here.

    Caches [num_blocks, block_size, n_kv_heads, head_dim], float32.
    """
    k_cache.reshape(-1, *k_cache.shape[2:])[slot_mapping] = k
    v_cache.reshape(-1, *v_cache.shape[2:])[slot_mapping] = v
