"""Latent attention as a part of a layer. Defined by ref.model.latent."""

from __future__ import annotations

from typing import Any

from engine.batch import ForwardBatch
from engine.config import MlaConfig, ModelConfig
from engine.kv_cache import CacheSpec, KVCache
from engine.ops import OpTable
from engine.weights import ArraySpec, LinearSpec, LinearWeight, Weights

Array = Any


def attention_weights(config: ModelConfig, layer: int) -> tuple[list[LinearSpec], list[ArraySpec]]:
    """Of a layer's attention. Queries by way of a short vector share one product with the latents."""
    mla, hidden = _mla(config), config.hidden_size
    dest, attn = f"layers.{layer}", f"model.layers.{layer}.self_attn"
    n_heads, heads = config.n_heads, config.n_heads * config.head_dim
    kv_a = (f"{attn}.kv_a_proj_with_mqa", mla.kv_lora_rank + mla.qk_rope_head_dim)
    kv_b = (f"{attn}.kv_b_proj", n_heads * (mla.qk_nope_head_dim + mla.v_head_dim))
    arrays = [ArraySpec(f"{dest}.kv_a_layernorm", f"{attn}.kv_a_layernorm.weight", (mla.kv_lora_rank,))]
    linears = [
        LinearSpec(f"{dest}.kv_b_proj", (kv_b,), mla.kv_lora_rank, latent=(n_heads, mla.qk_nope_head_dim)),
        LinearSpec(f"{dest}.o_proj", ((f"{attn}.o_proj", hidden),), n_heads * mla.v_head_dim, config.o_bias),
    ]
    if mla.q_lora_rank is None:
        linears.append(LinearSpec(f"{dest}.q_proj", ((f"{attn}.q_proj", heads),), hidden))
        linears.append(LinearSpec(f"{dest}.kv_a_proj", (kv_a,), hidden, config.qkv_bias))
    else:
        q_a = (f"{attn}.q_a_proj", mla.q_lora_rank)
        linears.append(LinearSpec(f"{dest}.qkv_a_proj", (q_a, kv_a), hidden, config.qkv_bias))
        linears.append(LinearSpec(f"{dest}.q_b_proj", ((f"{attn}.q_b_proj", heads),), mla.q_lora_rank))
        arrays.append(ArraySpec(f"{dest}.q_a_layernorm", f"{attn}.q_a_layernorm.weight", (mla.q_lora_rank,)))
    return linears, arrays


def cache_spec(config: ModelConfig) -> CacheSpec:
    """A latent a token, of all layers."""
    mla = _mla(config)
    return CacheSpec("latent", tuple(config.layers), 1, mla.kv_lora_rank + mla.qk_rope_head_dim)


def attention(
    hidden: Array,
    batch: ForwardBatch,
    cache: KVCache,
    config: ModelConfig,
    weights: Weights,
    ops: OpTable,
    layer: int,
) -> Array:
    """[num_tokens, hidden_size] → the same; writes the layer's latents."""
    mla, dest, linears = _mla(config), f"layers.{layer}", weights.linears
    if mla.q_lora_rank is None:
        q = ops.linear(hidden, linears[f"{dest}.q_proj"])
        kv_a = ops.linear(hidden, linears[f"{dest}.kv_a_proj"])
    else:
        short = ops.linear(hidden, linears[f"{dest}.qkv_a_proj"])
        q_a, kv_a = short[:, : mla.q_lora_rank], short[:, mla.q_lora_rank :]
        q_a = ops.rmsnorm(q_a, weights.arrays[f"{dest}.q_a_layernorm"], mla.eps)
        q = ops.linear(q_a, linears[f"{dest}.q_b_proj"])
    q = ops.mla_rope_latent_write(
        q.reshape(batch.num_tokens, config.n_heads, config.head_dim),
        kv_a,
        weights.arrays[f"{dest}.kv_a_layernorm"],
        mla.eps,
        batch.rope_cos_sin,
        batch.slot_mapping,
        cache.latent_cache[layer],
        interleaved=config.rope_interleaved,
    )
    out = attend(q, batch, cache.latent_cache[layer], linears[f"{dest}.kv_b_proj"], mla.sm_scale, ops)
    return ops.linear(out.reshape(batch.num_tokens, -1), linears[f"{dest}.o_proj"])


def attend(
    q: Array, batch: ForwardBatch, latent_cache: Array, kv_b_proj: LinearWeight, sm_scale: float, ops: OpTable
) -> Array:
    """Decoding rows in absorbed form, prefilling rows in expanded form, [num_tokens, n_heads, v_head_dim]."""
    num_decodes = batch.num_decodes
    decoded = prefilled = None
    if num_decodes:
        table, lens = batch.block_table[:num_decodes], batch.seq_lens[:num_decodes]
        decoded = ops.mla_decode(q[:num_decodes], latent_cache, kv_b_proj, table, lens, sm_scale)
    if num_decodes < batch.num_tokens:
        prefilled = ops.mla_prefill(
            q[num_decodes:],
            latent_cache,
            kv_b_proj,
            batch.block_table[num_decodes:],
            batch.cu_seqlens_q[num_decodes:] - num_decodes,
            batch.seq_lens[num_decodes:],
            sm_scale,
        )
    if decoded is None or prefilled is None:
        return prefilled if decoded is None else decoded
    out = q[:, :, : decoded.shape[2]]  # the queries are not needed again, and values are no wider
    out[:num_decodes], out[num_decodes:] = decoded, prefilled
    return out


def _mla(config: ModelConfig) -> MlaConfig:
    assert config.mla is not None, "only families with latent attention ask"
    return config.mla
