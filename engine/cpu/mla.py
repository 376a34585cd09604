"""Multi-head latent attention on a CPU. Checked against ref.mla and ref.mla_latent by conformance.

Decoding attends to the latents themselves (absorbed), prefilling to keys and values made of them (expanded).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from engine.cpu.attention import QUERY_TILE, attend_padded, decode_groups, gather, prefill_tile
from engine.cpu.rmsnorm import rmsnorm
from engine.cpu.rope import rotate
from engine.cpu.team import Team
from engine.weights import LinearWeight

Float32 = NDArray[np.float32]
Int32 = NDArray[np.int32]


def mla_split_kv_b(kv_b_proj: LinearWeight, n_heads: int, qk_nope_head_dim: int) -> LinearWeight:
    """A loaded kv_b_proj as both forms of attention want it, in place of the layout for linear.

    Returns:
        w_uk [n_heads, qk_nope_head_dim, kv_lora_rank] and w_uv [n_heads, kv_lora_rank, v_head_dim], C order: a step
        of one token goes through them two to four times as fast as through views of the stored weight.
    """
    stored = np.asarray(kv_b_proj.tensors["weight"], np.float32)
    by_head = stored.reshape(n_heads, -1, kv_b_proj.in_features)
    w_uk, w_uv = by_head[:, :qk_nope_head_dim], by_head[:, qk_nope_head_dim:].swapaxes(1, 2)
    tensors = {"w_uk": np.ascontiguousarray(w_uk), "w_uv": np.ascontiguousarray(w_uv)}
    return replace(kv_b_proj, tensors=tensors)


def mla_rope_latent_write(
    q: Float32,
    kv_a: Float32,
    kv_a_layernorm: Float32,
    eps: float,
    cos_sin: Float32,
    slot_mapping: Int32,
    latent_cache: Float32,
    *,
    interleaved: bool = True,
) -> Float32:
    """Stores [rmsnorm(c), rotated r] of each token, and returns q with the last elements of each head rotated.

    q [num_tokens, n_heads, qk_head_dim]; kv_a [num_tokens, kv_lora_rank + qk_rope_head_dim], c and r;
    cos_sin [num_tokens, qk_rope_head_dim]; slot_mapping [num_tokens], all ≥ 0 here; latent_cache [num_blocks,
    block_size, kv_lora_rank + qk_rope_head_dim]. float32.
    """
    rank, nope = len(kv_a_layernorm), q.shape[2] - cos_sin.shape[1]
    latent = np.empty(kv_a.shape, np.float32)
    latent[:, :rank] = rmsnorm(kv_a[:, :rank], kv_a_layernorm, eps)
    latent[:, rank:] = rotate(kv_a[:, None, rank:], cos_sin, interleaved)[:, 0]
    latent_cache.reshape(-1, latent_cache.shape[2])[slot_mapping] = latent
    out = q.copy()
    out[:, :, nope:] = rotate(q[:, :, nope:], cos_sin, interleaved)
    return out


def mla_decode(
    q: Float32,
    latent_cache: Float32,
    kv_b_proj: LinearWeight,
    block_table: Int32,
    seq_lens: Int32,
    sm_scale: float,
) -> Float32:
    """One query a sequence, [num_seqs, n_heads, qk_head_dim] → [num_seqs, n_heads, v_head_dim].

    W_uk goes into the query, so that the latents are keys and, their first kv_lora_rank elements, values of one head
    that all query heads share; W_uv is applied to what comes out. kv_b_proj: of mla_split_kv_b.
    """
    w_uk, w_uv = kv_b_proj.tensors["w_uk"], kv_b_proj.tensors["w_uv"]
    nope, rank = w_uk.shape[1:]
    latent_q = np.empty((*q.shape[:2], latent_cache.shape[2]), np.float32)
    latent_q[:, :, :rank] = (q[:, :, :nope].transpose(1, 0, 2) @ w_uk).transpose(1, 0, 2)
    latent_q[:, :, rank:] = q[:, :, nope:]
    summed = np.empty((*q.shape[:2], rank), np.float32)
    for rows in decode_groups(seq_lens, latent_cache.shape[1]):
        summed[rows] = _decode_group(latent_q[rows], latent_cache, rank, block_table[rows], seq_lens[rows], sm_scale)
    out: Float32 = np.ascontiguousarray((summed.transpose(1, 0, 2) @ w_uv).transpose(1, 0, 2))
    return out


def _decode_group(
    latent_q: Float32, latent_cache: Float32, rank: int, block_table: Int32, seq_lens: Int32, sm_scale: float
) -> Float32:
    latent = gather(latent_cache, block_table, seq_lens)[:, :, None, :]  # of one KV head
    return attend_padded(latent_q, latent, latent[..., :rank], seq_lens, sm_scale)


def mla_prefill(
    q: Float32,
    latent_cache: Float32,
    kv_b_proj: LinearWeight,
    block_table: Int32,
    cu_seqlens_q: Int32,
    seq_lens: Int32,
    sm_scale: float,
    *,
    team: Team,
) -> Float32:
    """Chunks of prompts, [num_tokens, n_heads, qk_head_dim] → [num_tokens, n_heads, v_head_dim].

    Keys and values are made head by head, so that those of one head are held at once. kv_b_proj: of mla_split_kv_b.
    """
    w_uk, w_uv = kv_b_proj.tensors["w_uk"], kv_b_proj.tensors["w_uv"]
    n_heads, rank, v_head_dim = w_uv.shape
    out = np.empty((len(q), n_heads, v_head_dim), np.float32)
    ends = cu_seqlens_q.tolist()
    for row, seq_len in enumerate(seq_lens.tolist()):
        latent = gather(latent_cache, block_table[row : row + 1], seq_lens[row : row + 1])[0]
        first = seq_len - (ends[row + 1] - ends[row])  # position of the first query
        for head in range(n_heads):
            k = np.concatenate([team.matmul(latent[:, :rank], w_uk[head].T), latent[:, rank:]], axis=1)
            v = team.matmul(latent[:, :rank], w_uv[head])
            for start in range(ends[row], ends[row + 1], QUERY_TILE):
                rows, position = slice(start, min(start + QUERY_TILE, ends[row + 1])), first + start - ends[row]
                out[rows, head : head + 1] = prefill_tile(
                    q[rows, head : head + 1], k[None], v[None], position, sm_scale
                )
    return out
