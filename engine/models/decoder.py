"""What most families share: an embedding, layers of attention and MLP behind a norm each, a last norm and a head.

A family brings its attention. Defined by ref.model.blocks.decoder.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from engine.coded8 import FP8, INT8
from engine.config import ModelConfig
from engine.kv_cache import CacheSpec
from engine.models.model import Model, Piece
from engine.models.moe import MoeNames, feed_forward, feed_forward_arrays, feed_forward_linears
from engine.ops import OpTable
from engine.weights import ArraySpec, LinearSpec, Norm, WeightMap, Weights, order_of

Array = Any
AttentionWeights = Callable[[ModelConfig, int], tuple[list[LinearSpec], list[ArraySpec]]]  # of a layer


def decoder_weights(
    config: ModelConfig, names: MoeNames, attention_weights: AttentionWeights, ignored: tuple[str, ...]
) -> WeightMap:
    """Every tensor of a checkpoint with this config; names are those of layers with experts."""
    hidden = config.hidden_size
    linears: list[LinearSpec] = []
    arrays = [
        ArraySpec("embed_tokens", "model.embed_tokens.weight", (config.vocab_size, hidden)),
        ArraySpec("norm", "model.norm.weight", (hidden,)),
    ]
    for layer in range(config.n_layers):
        dest, source = f"layers.{layer}", f"model.layers.{layer}"
        attention_linears, attention_arrays = attention_weights(config, layer)
        linears += attention_linears + feed_forward_linears(config, layer, source, names)
        arrays += attention_arrays + feed_forward_arrays(config, layer, source, names)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            arrays.append(ArraySpec(f"{dest}.{norm}", f"{source}.{norm}.weight", (hidden,)))
    if not config.tie_word_embeddings:
        linears.append(LinearSpec("lm_head", (("lm_head", config.vocab_size),), hidden))
    return WeightMap(tuple(linears), tuple(arrays), ignored, tied=config.tie_word_embeddings)


def decoder(
    config: ModelConfig, weights: Weights, ops: OpTable, attention: Callable[..., Array], cache_spec: CacheSpec
) -> Model:
    """The model over an op table; weights are prepared for it already.

    attention takes hidden, batch and cache as a Piece does, and config, weights, ops and layer by name.
    """
    pieces: list[Piece] = []
    for layer in config.layers:
        dest = f"layers.{layer}"
        attn_norm = _norm(config, weights, f"{dest}.input_layernorm", f"{dest}.qkv_proj")
        mlp_norm = _norm(config, weights, f"{dest}.post_attention_layernorm", f"{dest}.gate_up_proj")
        attn = partial(attention, config=config, weights=weights, ops=ops, layer=layer)
        pieces.append(Piece(f"{dest}.attention", attn_norm, attn))
        mlp = feed_forward(config, weights, ops, layer)
        is_by_token = mlp_norm.into is None  # rows of codes are not picked
        pieces.append(Piece(f"{dest}.mlp", mlp_norm, mlp, is_by_token=is_by_token))
    return Model(
        config=config,
        embed=lambda batch: ops.embedding(batch.token_ids, weights.arrays["embed_tokens"], first=config.vocab_first),
        pieces=tuple(pieces),
        final_norm=Norm(weights.arrays["norm"], config.norm_eps),
        logits=lambda hidden: ops.logits(hidden, weights.linears["lm_head"]),
        cache_specs=(cache_spec,),
    )


def _norm(config: ModelConfig, weights: Weights, dest: str, reader: str) -> Norm:
    """A norm whose result the layer `reader` alone takes, if the model has that layer: as it wants it."""
    weight = weights.linears.get(reader)
    into = weight if weight is not None and weight.format in (INT8, FP8) else None
    return Norm(weights.arrays[dest], config.norm_eps, into=into, order=weights.arrays.get(order_of(dest)))
