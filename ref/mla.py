"""Multi-head latent attention: all heads' keys and values from one short vector a token, which is all that is cached.

A token's latent is [c, r] (see ref/mla_latent.py): c of kv_lora_rank numbers is what it says, r of qk_rope_head_dim
numbers carries its position and is the same for all heads. Head h has key k = [W_uk c, r] and value v = W_uv c, with
W_uk and W_uv its rows of kv_b_proj. Two ways lead to the same answer:

expanded: make k and v of every cached token and attend as usual. Right for prefill: many queries share the work.
absorbed: q_nope · (W_uk c) = (W_ukᵀ q_nope) · c, so a query taken through W_ukᵀ attends to the latents themselves, as
          to one KV head with values c, and the sum of the c goes through W_uv at the end. Right for decode: nothing
          is expanded and every head reads the same short vector.

Source: DeepSeek-AI 2024, "DeepSeek-V2". MiniCPM3 has it too.
Numerics: both forms in q's dtype; they differ by rounding only, as sums are taken in another order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ref.attention import attention_decode, attention_dense
from ref.kv_cache import kv_cache_gather
from ref.numerics import round_to
from ref.rope_scaling import yarn_mscale

Array = NDArray[Any]
Ints = NDArray[np.integer[Any]]


def mla_sm_scale(qk_head_dim: int, factor: float = 1.0, mscale_all_dim: float = 0.0) -> float:
    """What scores are multiplied by: m(mscale_all_dim)² / √qk_head_dim, with yarn's factor and m of yarn_mscale.

    qk_head_dim is qk_nope_head_dim + qk_rope_head_dim. Without yarn m is 1.
    """
    return float(yarn_mscale(factor, mscale_all_dim) ** 2 / np.sqrt(qk_head_dim))


def mla_split_kv_b(kv_b_proj: Array, n_heads: int, qk_nope_head_dim: int) -> tuple[Array, Array]:
    """W_uk [n_heads, qk_nope_head_dim, kv_lora_rank] and W_uv [n_heads, v_head_dim, kv_lora_rank] as views.

    kv_b_proj [n_heads · (qk_nope_head_dim + v_head_dim), kv_lora_rank] holds them head by head, keys first; its dtype
    stays.
    """
    by_head = kv_b_proj.reshape(n_heads, kv_b_proj.shape[0] // n_heads, kv_b_proj.shape[1])
    return by_head[:, :qk_nope_head_dim], by_head[:, qk_nope_head_dim:]


def _nope_dim(q: Array, latent_width: int, kv_b_proj: Array) -> int:
    return int(q.shape[-1] - (latent_width - kv_b_proj.shape[1]))  # qk_head_dim − qk_rope_head_dim


def mla_dense(q: Array, latent: Array, kv_b_proj: Array, sm_scale: float, *, storage: str | None = None) -> Array:
    """Expanded form for one sequence: keys and values of every head, then attention_dense.

    Args:
        q: [q_len, n_heads, qk_head_dim], rotated; the last q_len tokens.
        latent: [kv_len, kv_lora_rank + qk_rope_head_dim], of all tokens.
        kv_b_proj: [n_heads · (qk_nope_head_dim + v_head_dim), kv_lora_rank].
    Returns:
        [q_len, n_heads, v_head_dim], dtype of q.

    Numerics: keys and values are rounded to `storage`, as they are written out before attention reads them.
    """
    n_heads, rank = q.shape[1], kv_b_proj.shape[1]
    w_uk, w_uv = mla_split_kv_b(kv_b_proj, n_heads, _nope_dim(q, latent.shape[1], kv_b_proj))
    c, r = latent[:, :rank].astype(q.dtype), latent[:, rank:].astype(q.dtype)
    k_nope, v = np.einsum("tc,hnc->thn", c, w_uk), np.einsum("tc,hvc->thv", c, w_uv)
    shared = np.broadcast_to(r[:, None, :], (len(r), n_heads, r.shape[1]))
    k = np.concatenate([k_nope, shared], axis=-1)  # [kv_len, n_heads, qk_head_dim]
    return attention_dense(q, round_to(k, storage), round_to(v, storage), sm_scale, storage=storage)


def mla_prefill(
    q: Array,
    latent_cache: Array,
    kv_b_proj: Array,
    block_table: Ints,
    cu_seqlens_q: Ints,
    seq_lens: Ints,
    sm_scale: float,
    *,
    storage: str | None = None,
) -> Array:
    """Expanded form of several sequences of any length over the paged cache; as ref.attention.attention_prefill.

    Args:
        q: [num_tokens, n_heads, qk_head_dim], rotated, the sequences one after another.
        latent_cache: [num_blocks, block_size, kv_lora_rank + qk_rope_head_dim], the new tokens included.
        kv_b_proj: as in mla_dense.
        block_table, cu_seqlens_q, seq_lens: [num_seqs, max_blocks_per_seq], [num_seqs + 1], [num_seqs].
    Returns:
        [num_tokens, n_heads, v_head_dim], dtype of q; rows past cu_seqlens_q[−1] are padding and come back as zeros.
    """
    v_head_dim = kv_b_proj.shape[0] // q.shape[1] - _nope_dim(q, latent_cache.shape[2], kv_b_proj)
    out = np.zeros((*q.shape[:2], v_head_dim), q.dtype)
    for s in range(len(seq_lens)):
        rows = slice(int(cu_seqlens_q[s]), int(cu_seqlens_q[s + 1]))
        latent = kv_cache_gather(latent_cache, block_table[s], int(seq_lens[s]))
        out[rows] = mla_dense(q[rows], latent, kv_b_proj, sm_scale, storage=storage)
    return out


def mla_decode(
    q: Array,
    latent_cache: Array,
    kv_b_proj: Array,
    block_table: Ints,
    seq_lens: Ints,
    sm_scale: float,
    *,
    num_splits: int = 1,
    storage: str | None = None,
) -> Array:
    """Absorbed form, one query a sequence: attention_decode with the cache as its one KV head.

    Args:
        q: [num_seqs, n_heads, qk_head_dim], rotated.
        latent_cache, kv_b_proj, block_table, seq_lens: as in mla_prefill.
        num_splits: as in ref.attention.attention_decode.
    Returns:
        [num_seqs, n_heads, v_head_dim], dtype of q.

    Numerics: the absorbed query and the sum of latents are rounded to `storage`, each a product's output.
    Edge cases: a sequence without keys gives zeros.
    """
    rank = kv_b_proj.shape[1]
    nope = _nope_dim(q, latent_cache.shape[2], kv_b_proj)
    w_uk, w_uv = mla_split_kv_b(kv_b_proj, q.shape[1], nope)
    absorbed = np.einsum("shn,hnc->shc", q[..., :nope], w_uk)
    latent_q = np.concatenate([round_to(absorbed, storage), q[..., nope:]], axis=-1)  # as wide as a latent
    keys = latent_cache[:, :, None, :]
    args = (block_table, seq_lens, sm_scale)
    summed = attention_decode(latent_q, keys, keys[..., :rank], *args, num_splits=num_splits, storage=storage)
    out: Array = np.einsum("shc,hvc->shv", round_to(summed, storage), w_uv)
    return out
