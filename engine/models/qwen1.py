"""Qwen 1: a Llama under other names, whose queries grow with the logarithm of their position past a training length.

Defined by ref.model.qwen1. Its rope table, chosen by the prompt's length, is engine.rope_table's business.
"""

from __future__ import annotations

from typing import Any

from engine.batch import ForwardBatch
from engine.config import ModelConfig
from engine.kv_cache import KVCache
from engine.models import llama
from engine.models.mlp import mlp_linears
from engine.models.model import Model
from engine.ops import OpTable
from engine.weights import ArraySpec, LinearSpec, WeightMap, Weights

Array = Any

GATE_UP_DOWN = ("w2", "w1", "c_proj")


def weight_map(config: ModelConfig) -> WeightMap:
    """Every tensor of a checkpoint with this config."""
    hidden, heads = config.hidden_size, config.n_heads * config.head_dim
    linears: list[LinearSpec] = []
    arrays = [
        ArraySpec("embed_tokens", "transformer.wte.weight", (config.vocab_size, hidden)),
        ArraySpec("norm", "transformer.ln_f.weight", (hidden,)),
    ]
    for layer in range(config.n_layers):
        dest, source = f"layers.{layer}", f"transformer.h.{layer}"
        mlp_sizes, mlp_norm = (hidden, config.intermediate_size), f"{dest}.post_attention_layernorm"
        linears += [
            LinearSpec(
                *(f"{dest}.qkv_proj", ((f"{source}.attn.c_attn", 3 * heads),), hidden, config.qkv_bias),
                norm=f"{dest}.input_layernorm",
            ),
            LinearSpec(f"{dest}.o_proj", ((f"{source}.attn.c_proj", hidden),), heads, config.o_bias),
            *mlp_linears(dest, f"{source}.mlp", *mlp_sizes, bias=config.mlp_bias, names=GATE_UP_DOWN, norm=mlp_norm),
        ]
        for dest_norm, norm in (("input_layernorm", "ln_1"), ("post_attention_layernorm", "ln_2")):
            arrays.append(ArraySpec(f"{dest}.{dest_norm}", f"{source}.{norm}.weight", (hidden,)))
    if not config.tie_word_embeddings:
        linears.append(LinearSpec("lm_head", (("lm_head", config.vocab_size),), hidden))
    ignored = (r"transformer\.rotary_emb\.inv_freq", r"transformer\.h\.\d+\.attn\.(masked_)?bias")
    return WeightMap(tuple(linears), tuple(arrays), ignored, tied=config.tie_word_embeddings)


def build(config: ModelConfig, weights: Weights, ops: OpTable) -> Model:
    """The model over an op table; weights are prepared for it already."""
    return llama.build(config, weights, ops, write_kv=rotate)


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
    """Rotates q and k, stores k and v, and returns the rotated q, log-n scaled if that is asked for."""
    q = llama.rotate(q, k, v, batch, cache, config, weights, ops, layer)
    if config.logn_length:
        q = ops.logn_query(q, batch.positions, config.logn_length)
    return q
