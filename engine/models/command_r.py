"""Command-R and R+: attention and MLP side by side as one piece, LayerNorm without bias, pairs of rope are neighbours.

Defined by ref.model.command_r.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from engine.batch import ForwardBatch
from engine.config import ModelConfig
from engine.kv_cache import CacheSpec, KVCache
from engine.models.llama import attention
from engine.models.mlp import mlp, mlp_linears
from engine.models.model import Model, Piece, times
from engine.ops import OpTable
from engine.weights import ArraySpec, LinearSpec, Norm, WeightMap, Weights

Array = Any


def weight_map(config: ModelConfig) -> WeightMap:
    """Every tensor of a checkpoint with this config."""
    hidden, head_dim = config.hidden_size, config.head_dim
    heads, kv_heads = config.n_heads * head_dim, config.n_kv_heads * head_dim
    linears: list[LinearSpec] = []
    arrays = [
        ArraySpec("embed_tokens", "model.embed_tokens.weight", (config.vocab_size, hidden)),
        ArraySpec("norm", "model.norm.weight", (hidden,)),
    ]
    for layer in range(config.n_layers):
        dest, source = f"layers.{layer}", f"model.layers.{layer}"
        attn = f"{source}.self_attn"
        qkv = ((f"{attn}.q_proj", heads), (f"{attn}.k_proj", kv_heads), (f"{attn}.v_proj", kv_heads))
        linears += [
            LinearSpec(f"{dest}.qkv_proj", qkv, hidden, config.qkv_bias),
            LinearSpec(f"{dest}.o_proj", ((f"{attn}.o_proj", hidden),), heads, config.o_bias),
            *mlp_linears(dest, f"{source}.mlp", hidden, config.intermediate_size),
        ]
        arrays.append(ArraySpec(f"{dest}.input_layernorm", f"{source}.input_layernorm.weight", (hidden,)))
        if config.qk_norm:  # each head has a weight of its own
            for norm, n_heads in (("q_norm", config.n_heads), ("k_norm", config.n_kv_heads)):
                arrays.append(ArraySpec(f"{dest}.{norm}", f"{attn}.{norm}.weight", (n_heads, head_dim)))
    if not config.tie_word_embeddings:
        linears.append(LinearSpec("lm_head", (("lm_head", config.vocab_size),), hidden))
    return WeightMap(tuple(linears), tuple(arrays), tied=config.tie_word_embeddings)


def build(config: ModelConfig, weights: Weights, ops: OpTable) -> Model:
    """The model over an op table; weights are prepared for it already."""
    return Model(
        config=config,
        embed=lambda batch: ops.embedding(batch.token_ids, weights.arrays["embed_tokens"], first=config.vocab_first),
        pieces=tuple(
            Piece(
                f"layers.{layer}",
                Norm(weights.arrays[f"layers.{layer}.input_layernorm"], config.norm_eps, "layernorm"),
                partial(parallel_block, config=config, weights=weights, ops=ops, layer=layer),
            )
            for layer in config.layers
        ),
        final_norm=Norm(weights.arrays["norm"], config.norm_eps, "layernorm"),
        logits=lambda hidden: times(ops.logits(hidden, weights.linears["lm_head"]), config.logit_scale),
        cache_specs=(CacheSpec("full", tuple(config.layers), config.n_kv_heads, config.head_dim),),
    )


def parallel_block(
    hidden: Array,
    batch: ForwardBatch,
    cache: KVCache,
    config: ModelConfig,
    weights: Weights,
    ops: OpTable,
    layer: int,
) -> Array:
    """attention(hidden) + mlp(hidden): [num_tokens, hidden_size] → the same."""
    out = attention(hidden, batch, cache, config, weights, ops, layer, write_kv=rotate)
    out += mlp(hidden, f"layers.{layer}", weights, ops)
    return out


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
    """Norms the heads of q and k in R+, rotates both, stores k and v, and returns the rotated q."""
    if config.qk_norm:
        q = ops.layernorm(q, weights.arrays[f"layers.{layer}.q_norm"], None, config.norm_eps)
        k = ops.layernorm(k, weights.arrays[f"layers.{layer}.k_norm"], None, config.norm_eps)
    place = (batch.rope_cos_sin, batch.slot_mapping, cache.k_cache[layer], cache.v_cache[layer])
    return ops.rope_kv_write(q, k, v, *place, interleaved=config.rope_interleaved)
