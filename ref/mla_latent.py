"""Around multi-head latent attention: the queries, and the one short vector a token that is cached (ref/mla.py).

kv_a_proj_with_mqa makes kv_lora_rank + qk_rope_head_dim numbers of a token's hidden state. The first become c by
rmsnorm, the others r by rotation; [c, r] is the latent. A query head is [q_nope, q_rope], and only q_rope rotates.
Source: DeepSeek-AI 2024, "DeepSeek-V2". DeepSeek pairs neighbours (interleaved), MiniCPM3 halves.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ref.kv_cache import kv_cache_write
from ref.linear import linear
from ref.numerics import round_to
from ref.rmsnorm import rmsnorm
from ref.rope import rope

Array = NDArray[Any]
Ints = NDArray[np.integer[Any]]


def mla_rope(x: Array, cos_sin: Array, *, interleaved: bool = True) -> Array:
    """Rotates the last rotary_dim elements of each head.

    Args:
        x: [num_tokens, n_heads, width].
        cos_sin: [num_tokens, rotary_dim], as in rope.
    Returns:
        [num_tokens, n_heads, width], dtype of x.
    """
    nope = x.shape[-1] - cos_sin.shape[1]
    return np.concatenate([x[..., :nope], rope(x[..., nope:], cos_sin, interleaved=interleaved)], axis=-1)


def mla_query(
    hidden: Array,
    q_proj: Array,
    n_heads: int,
    cos_sin: Array,
    *,
    q_a_proj: Array | None = None,
    q_a_layernorm: Array | None = None,
    eps: float = 1e-6,
    interleaved: bool = True,
) -> Array:
    """Queries of all heads, their last elements rotated.

    Args:
        hidden: [num_tokens, hidden_size].
        q_proj: [n_heads · qk_head_dim, hidden_size]; or q_b_proj, [n_heads · qk_head_dim, q_lora_rank].
        cos_sin: [num_tokens, qk_rope_head_dim].
        q_a_proj, q_a_layernorm: [q_lora_rank, hidden_size] and [q_lora_rank]: where queries go through a short vector
            of their own (q_lora_rank in the config); then q_proj is q_b_proj.
    Returns:
        [num_tokens, n_heads, qk_head_dim], dtype of hidden.
    """
    if q_a_proj is not None and q_a_layernorm is not None:
        hidden = rmsnorm(linear(hidden, q_a_proj), q_a_layernorm, eps)
    q = linear(hidden, q_proj).reshape(len(hidden), n_heads, q_proj.shape[0] // n_heads)
    return mla_rope(q, cos_sin, interleaved=interleaved)


def mla_latent(kv_a: Array, kv_a_layernorm: Array, eps: float, cos_sin: Array, *, interleaved: bool = True) -> Array:
    """What is cached of each token: [rmsnorm(c), rotated r].

    Args:
        kv_a: [num_tokens, kv_lora_rank + qk_rope_head_dim], hidden through kv_a_proj_with_mqa.
        kv_a_layernorm: [kv_lora_rank].
        cos_sin: [num_tokens, qk_rope_head_dim].
    Returns:
        [num_tokens, kv_lora_rank + qk_rope_head_dim], dtype of kv_a.
    """
    rank = kv_a_layernorm.shape[0]
    normed = rmsnorm(kv_a[:, :rank], kv_a_layernorm, eps)
    return np.concatenate([normed, rope(kv_a[:, None, rank:], cos_sin, interleaved=interleaved)[:, 0]], axis=-1)


def latent_cache_write(latent: Array, slot_mapping: Ints, latent_cache: Array) -> None:
    """kv_cache_write with one vector a token.

    Args:
        latent: [num_tokens, width].
        slot_mapping: [num_tokens]; −1 = store nothing.
        latent_cache: [num_blocks, block_size, width], changed in place.
    Raises:
        IndexError: as kv_cache_write.
    """
    kv_cache_write(latent, latent, slot_mapping, latent_cache, latent_cache)  # key and value in one


def mla_rope_latent_write(
    q: Array,
    kv_a: Array,
    kv_a_layernorm: Array,
    eps: float,
    cos_sin: Array,
    slot_mapping: Ints,
    latent_cache: Array,
    *,
    interleaved: bool = True,
    storage: str | None = None,
) -> Array:
    """mla_rope of q, mla_latent of kv_a and latent_cache_write in one: what lies between projections and attention.

    Args:
        q: [num_tokens, n_heads, qk_head_dim], not rotated.
        the others: as in mla_latent and latent_cache_write.
    Returns:
        [num_tokens, n_heads, qk_head_dim], rotated, dtype of q.
    """
    latent = mla_latent(kv_a, kv_a_layernorm, eps, cos_sin, interleaved=interleaved)
    latent_cache_write(round_to(latent, storage), slot_mapping, latent_cache)
    return round_to(mla_rope(q, cos_sin, interleaved=interleaved), storage)
