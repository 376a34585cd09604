"""Llama 1 to 3.3, and its close kin: Mistral (sliding window), Qwen 1.5 to 2.5 (bias on q, k, v), Qwen 3 (q/k norm),
and those with experts: Mixtral, Qwen2-MoE, Qwen3-MoE, DeepSeekMoE.

Defined by ref.model.llama, qwen, mixtral, qwen_moe and deepseek_moe.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from engine.batch import ForwardBatch
from engine.config import ModelConfig
from engine.kv_cache import CacheSpec, KVCache
from engine.models.decoder import decoder, decoder_weights
from engine.models.model import Model
from engine.models.moe import MOE_NAMES, MoeNames
from engine.ops import OpTable
from engine.weights import ArraySpec, LinearSpec, WeightMap, Weights

Array = Any
WriteKV = Callable[..., Array]


def weight_map(config: ModelConfig, names: MoeNames = MOE_NAMES) -> WeightMap:
    """Every tensor of a checkpoint with this config."""
    ignored = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)
    return decoder_weights(config, names, attention_weights, ignored)


def attention_weights(config: ModelConfig, layer: int) -> tuple[list[LinearSpec], list[ArraySpec]]:
    """Of a layer's attention."""
    heads, kv_heads = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    dest, attn = f"layers.{layer}", f"model.layers.{layer}.self_attn"
    qkv = ((f"{attn}.q_proj", heads), (f"{attn}.k_proj", kv_heads), (f"{attn}.v_proj", kv_heads))
    linears = [
        LinearSpec(f"{dest}.qkv_proj", qkv, config.hidden_size, config.qkv_bias, norm=f"{dest}.input_layernorm"),
        LinearSpec(f"{dest}.o_proj", ((f"{attn}.o_proj", config.hidden_size),), heads, config.o_bias),
    ]
    norms = ("q_norm", "k_norm") if config.qk_norm else ()
    return linears, [ArraySpec(f"{dest}.{norm}", f"{attn}.{norm}.weight", (config.head_dim,)) for norm in norms]


def rotate(
    q: Array,
    k: Array,
    v: Array,
    batch: ForwardBatch,
    cache: KVCache,
    config: ModelConfig,
    weights: Weights,
    ops: OpTable,
    layer: int,
) -> Array:
    """Norms the heads of q and k where the model does, rotates both, stores k and v, and returns the rotated q."""
    place = (batch.rope_cos_sin, batch.slot_mapping, cache.k_cache[layer], cache.v_cache[layer])
    if not config.qk_norm:
        return ops.rope_kv_write(q, k, v, *place)
    q_norm, k_norm = weights.arrays[f"layers.{layer}.q_norm"], weights.arrays[f"layers.{layer}.k_norm"]
    return ops.qk_norm_rope_kv_write(q, k, v, q_norm, k_norm, config.norm_eps, *place)


def build(config: ModelConfig, weights: Weights, ops: OpTable, write_kv: WriteKV = rotate) -> Model:
    """The model over an op table; weights are prepared for it already. write_kv: see attention."""
    spec = CacheSpec("full", tuple(config.layers), config.n_kv_heads, config.head_dim)
    return decoder(config, weights, ops, partial(attention, write_kv=write_kv), spec)


def attention(
    hidden: Array,
    batch: ForwardBatch,
    cache: KVCache,
    config: ModelConfig,
    weights: Weights,
    ops: OpTable,
    layer: int,
    write_kv: WriteKV,
) -> Array:
    """[num_tokens, hidden_size] → the same.

    write_kv takes q [num_tokens, n_heads, head_dim], k and v [num_tokens, n_kv_heads, head_dim] and arguments as here,
    stores the layer's keys and values, and gives the queries that attend to them.
    """
    n_heads, n_kv_heads, head_dim = config.n_heads, config.n_kv_heads, config.head_dim
    qkv = ops.linear(hidden, weights.linears[f"layers.{layer}.qkv_proj"])
    heads = qkv.reshape(batch.num_tokens, n_heads + 2 * n_kv_heads, head_dim)
    q, k, v = heads[:, :n_heads], heads[:, n_heads : n_heads + n_kv_heads], heads[:, n_heads + n_kv_heads :]
    q = write_kv(q, k, v, batch, cache, config, weights, ops, layer)
    out = attend(q, batch, cache.k_cache[layer], cache.v_cache[layer], head_dim**-0.5, config.windows[layer], ops)
    return ops.linear(out.reshape(batch.num_tokens, -1), weights.linears[f"layers.{layer}.o_proj"])


def attend(
    q: Array,
    batch: ForwardBatch,
    k_cache: Array,
    v_cache: Array,
    sm_scale: float,
    window: int | None,
    ops: OpTable,
    out: Array | None = None,
) -> Array:
    """Attention of decoding rows by the one op and of prefilling rows by the other, [num_tokens, n_heads, head_dim]."""
    num_decodes, seq_lens, table, lens = batch.num_decodes, batch.seq_lens, batch.block_table, batch.cu_seqlens_q
    if num_decodes == len(seq_lens):
        return ops.attention_decode(q, k_cache, v_cache, table, seq_lens, sm_scale, window, out=out)
    if num_decodes:
        table, lens, seq_lens = table[num_decodes:], lens[num_decodes:], seq_lens[num_decodes:]
    out = ops.attention_prefill(q, k_cache, v_cache, table, lens, seq_lens, sm_scale, window, out=out)
    if num_decodes:
        table, seq_lens = batch.block_table[:num_decodes], batch.seq_lens[:num_decodes]
        rows = q[:num_decodes], out[:num_decodes]
        ops.attention_decode(rows[0], k_cache, v_cache, table, seq_lens, sm_scale, window, out=rows[1])
    return out
