"""CPM-Ant: learned vectors before the prompt, which sees itself both ways; scores with a bias by distance.

Defined by ref.model.cpm_ant. The learned vectors are rows of the embedding and have ids, which the engine puts before
each prompt; so they have places in the cache like tokens.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from engine.batch import ForwardBatch
from engine.config import ModelConfig, PrefixLmConfig
from engine.kv_cache import CacheSpec, KVCache
from engine.models.mlp import mlp_linears
from engine.models.model import Model, Piece
from engine.ops import OpTable
from engine.weights import ArraySpec, LinearSpec, Norm, WeightMap, Weights

Array = Any

GATE_UP_DOWN = ("w_in.w_0", "w_in.w_1", "w_out")
PROMPT_SEGMENT, TOKEN_SEGMENT = 0, 2  # of the learned vectors, and of tokens


def weight_map(config: ModelConfig) -> WeightMap:
    """Every tensor of a checkpoint with this config."""
    prefix, hidden, heads = _prefix(config), config.hidden_size, config.n_heads * config.head_dim
    bias_shape = (prefix.num_buckets + prefix.segment_types**2, config.n_heads)
    linears = [LinearSpec("lm_head", (("lm_head", config.vocab_size),), hidden)]
    arrays = [
        ArraySpec("embed_tokens", "cpmant.input_embedding.weight", (prefix.num_embeddings, hidden)),
        ArraySpec("embed_segments", "cpmant.segment_embedding.weight", (prefix.segment_types, hidden)),
        ArraySpec("position_bias", "cpmant.position_bias.relative_attention_bias", bias_shape),
        ArraySpec("norm", "cpmant.encoder.output_layernorm.weight", (hidden,)),
    ]
    for layer in range(config.n_layers):
        dest, source = f"layers.{layer}", f"cpmant.encoder.layers.{layer}"
        attn = f"{source}.self_att.self_attention"
        linears += [
            LinearSpec(f"{dest}.qkv_proj", tuple((f"{attn}.project_{x}", heads) for x in "qkv"), hidden),
            LinearSpec(f"{dest}.o_proj", ((f"{attn}.attention_out", hidden),), heads),
            *mlp_linears(dest, f"{source}.ffn.ffn", hidden, config.intermediate_size, names=GATE_UP_DOWN, gated=False),
        ]
        for norm, name in (
            ("attn_norm", "self_att.layernorm_before_attention"),
            ("mlp_norm", "ffn.layernorm_before_ffn"),
        ):
            arrays.append(ArraySpec(f"{dest}.{norm}", f"{source}.{name}.weight", (hidden,)))
    return WeightMap(tuple(linears), tuple(arrays))


def build(config: ModelConfig, weights: Weights, ops: OpTable) -> Model:
    """The model over an op table; weights are prepared for it already."""
    prefix, arrays = _prefix(config), weights.arrays
    num_soft = len(prefix.soft_prompt_ids)
    crossings = ((TOKEN_SEGMENT, PROMPT_SEGMENT), (PROMPT_SEGMENT, TOKEN_SEGMENT))  # segments of query and key
    rows = [prefix.num_buckets + query * prefix.segment_types + key for query, key in crossings]
    bias_table = arrays["position_bias"][[*range(prefix.num_buckets), *rows]]

    def embed(batch: ForwardBatch) -> Array:
        embedded = ops.embedding(batch.token_ids, arrays["embed_tokens"], first=config.vocab_first)
        if "embed_segments" not in arrays:  # another rank adds them
            return embedded
        segments = (batch.positions >= num_soft) * (TOKEN_SEGMENT - PROMPT_SEGMENT) + PROMPT_SEGMENT
        return embedded + ops.embedding(segments, arrays["embed_segments"])

    pieces: list[Piece] = []
    for layer in config.layers:
        dest = f"layers.{layer}"
        attn = partial(attention, config=config, weights=weights, ops=ops, layer=layer, bias_table=bias_table)
        pieces.append(Piece(f"{dest}.attention", Norm(arrays[f"{dest}.attn_norm"], config.norm_eps), attn))
        feed = partial(gated_mlp, config=config, weights=weights, ops=ops, layer=layer)
        pieces.append(Piece(f"{dest}.mlp", Norm(arrays[f"{dest}.mlp_norm"], config.norm_eps), feed))
    return Model(
        config=config,
        embed=embed,
        pieces=tuple(pieces),
        final_norm=Norm(arrays["norm"], config.norm_eps),
        logits=lambda hidden: ops.logits(hidden, weights.linears["lm_head"]),
        cache_specs=(CacheSpec("full", tuple(config.layers), config.n_kv_heads, config.head_dim),),
    )


def attention(
    hidden: Array,
    batch: ForwardBatch,
    cache: KVCache,
    config: ModelConfig,
    weights: Weights,
    ops: OpTable,
    layer: int,
    bias_table: Array,
) -> Array:
    """[num_tokens, hidden_size] → the same; bias_table as in ref.attention_biased."""
    qkv = ops.linear(hidden, weights.linears[f"layers.{layer}.qkv_proj"])
    q, k, v = qkv.reshape(batch.num_tokens, 3, config.n_heads, config.head_dim).swapaxes(0, 1)
    caches = cache.k_cache[layer], cache.v_cache[layer]
    ops.kv_cache_write(k, v, batch.slot_mapping, *caches)
    sequences = batch.block_table, batch.cu_seqlens_q, batch.seq_lens, batch.two_way_lens
    prefix = _prefix(config)
    bias = bias_table, len(prefix.soft_prompt_ids), prefix.max_distance
    out = ops.attention_biased(q, *caches, *sequences, config.head_dim**-0.5, *bias)
    return ops.linear(out.reshape(batch.num_tokens, -1), weights.linears[f"layers.{layer}.o_proj"])


def gated_mlp(
    hidden: Array,
    batch: ForwardBatch,
    cache: KVCache,
    config: ModelConfig,
    weights: Weights,
    ops: OpTable,
    layer: int,
) -> Array:
    """[num_tokens, hidden_size] → the same."""
    gate_up = ops.linear(hidden, weights.linears[f"layers.{layer}.gate_up_proj"])
    inner = ops.gate_up_act(gate_up, config.hidden_act)
    return ops.linear(inner, weights.linears[f"layers.{layer}.down_proj"])


def _prefix(config: ModelConfig) -> PrefixLmConfig:
    assert config.prefix_lm is not None, "the family's config reading sets it"
    return config.prefix_lm
