"""CPM-1, the layout of GPT-2: learned positions, LayerNorm with bias, a plain MLP. Defined by ref.model.cpm1."""

from __future__ import annotations

from functools import partial
from typing import Any

from engine.batch import ForwardBatch
from engine.config import ModelConfig
from engine.kv_cache import CacheSpec, KVCache
from engine.models.llama import attention
from engine.models.model import Model, Piece
from engine.ops import OpTable
from engine.weights import ArraySpec, LinearSpec, Norm, WeightMap, Weights

Array = Any


def weight_map(config: ModelConfig) -> WeightMap:
    """Every tensor of a checkpoint with this config."""
    hidden, inner, heads = config.hidden_size, config.intermediate_size, config.n_heads * config.head_dim
    linears: list[LinearSpec] = []
    arrays = [
        ArraySpec("embed_tokens", "transformer.wte.weight", (config.vocab_size, hidden)),
        ArraySpec("embed_positions", "transformer.wpe.weight", (config.max_position_embeddings, hidden)),
        *_norm_arrays("norm", "transformer.ln_f", hidden),
    ]
    for layer in range(config.n_layers):
        dest, source = f"layers.{layer}", f"transformer.h.{layer}"
        linears += [
            _linear(f"{dest}.qkv_proj", f"{source}.attn.c_attn", hidden, 3 * heads),
            _linear(f"{dest}.o_proj", f"{source}.attn.c_proj", heads, hidden),
            _linear(f"{dest}.up_proj", f"{source}.mlp.c_fc", hidden, inner),
            _linear(f"{dest}.down_proj", f"{source}.mlp.c_proj", inner, hidden),
        ]
        arrays += _norm_arrays(f"{dest}.input_layernorm", f"{source}.ln_1", hidden)
        arrays += _norm_arrays(f"{dest}.post_attention_layernorm", f"{source}.ln_2", hidden)
    if not config.tie_word_embeddings:
        linears.append(LinearSpec("lm_head", (("lm_head", config.vocab_size),), hidden))
    masks = r"transformer\.h\.\d+\.attn\.(masked_)?bias"
    return WeightMap(tuple(linears), tuple(arrays), (masks,), tied=config.tie_word_embeddings)


def _linear(dest: str, module: str, in_features: int, out_features: int) -> LinearSpec:
    return LinearSpec(dest, ((module, out_features),), in_features, bias=True, transposed=True)


def _norm_arrays(dest: str, module: str, hidden: int) -> list[ArraySpec]:
    return [
        ArraySpec(dest, f"{module}.weight", (hidden,)),
        ArraySpec(f"{dest}.bias", f"{module}.bias", (hidden,)),
    ]


def build(config: ModelConfig, weights: Weights, ops: OpTable) -> Model:
    """The model over an op table; weights are prepared for it already."""

    def norm(dest: str) -> Norm:
        return Norm(weights.arrays[dest], config.norm_eps, "layernorm", weights.arrays[f"{dest}.bias"])

    def embed(batch: ForwardBatch) -> Array:
        table, positions = weights.arrays["embed_tokens"], weights.arrays.get("embed_positions")
        if positions is None:  # another rank adds them
            return ops.embedding(batch.token_ids, table, first=config.vocab_first)
        return ops.position_embedding(batch.token_ids, batch.positions, table, positions, first=config.vocab_first)

    pieces: list[Piece] = []
    for layer in config.layers:
        dest = f"layers.{layer}"
        attn = partial(attention, config=config, weights=weights, ops=ops, layer=layer, write_kv=write_kv)
        pieces.append(Piece(f"{dest}.attention", norm(f"{dest}.input_layernorm"), attn))
        feed = partial(plain_mlp, config=config, weights=weights, ops=ops, layer=layer)
        pieces.append(Piece(f"{dest}.mlp", norm(f"{dest}.post_attention_layernorm"), feed))
    return Model(
        config=config,
        embed=embed,
        pieces=tuple(pieces),
        final_norm=norm("norm"),
        logits=lambda hidden: ops.logits(hidden, weights.linears["lm_head"]),
        cache_specs=(CacheSpec("full", tuple(config.layers), config.n_kv_heads, config.head_dim),),
    )


def write_kv(
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
    """Stores k and v, and returns q as it is: nothing rotates."""
    ops.kv_cache_write(k, v, batch.slot_mapping, cache.k_cache[layer], cache.v_cache[layer])
    return q


def plain_mlp(
    hidden: Array,
    batch: ForwardBatch,
    cache: KVCache,
    config: ModelConfig,
    weights: Weights,
    ops: OpTable,
    layer: int,
) -> Array:
    """down(activation(up(x))): [num_tokens, hidden_size] → the same."""
    inner = ops.linear(hidden, weights.linears[f"layers.{layer}.up_proj"])
    return ops.linear(ops.act(inner, config.hidden_act), weights.linears[f"layers.{layer}.down_proj"])
