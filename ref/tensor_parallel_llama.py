"""A whole Llama on several ranks: each runs the ordinary blocks with a smaller config, and sums stand between them.

Two all_reduces a layer, one for the embedding, one all_gather for the logits; nothing else is sent. Norms and the
residual stream are computed by every rank, from the same bits.

Source: Shoeybi et al. 2019, "Megatron-LM"; composed of ref.model.blocks, ref.collectives and ref.tensor_parallel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ref.collectives import all_gather, all_reduce, split_ranges
from ref.model.blocks import gated_mlp, gqa_attention
from ref.model.llama import LlamaConfig, weight_shapes
from ref.model.run import Run
from ref.tensor_parallel import attention_cuts, mlp_cuts, shard_weights, split_heads
from ref.tensor_parallel_vocab import shard_vocab, vocab_embedding, vocab_logits

Array = NDArray[Any]
Rank = tuple[LlamaConfig, dict[str, Array]]

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def shard_llama(config: LlamaConfig, weights: Mapping[str, Array], world_size: int) -> list[Rank]:
    """What each rank holds: the config of the smaller model that it is, and its weights by their usual names.

    Returns:
        (config, weights) of each rank; weights have the shapes of its config, and the dtypes they had.
    Raises:
        ValueError: heads or intermediate elements do not go round.
    """
    heads = split_heads(config.n_heads, config.n_kv_heads, world_size)
    parts = split_ranges(config.intermediate_size, world_size)
    if not parts[-1]:
        raise ValueError(f"intermediate_size {config.intermediate_size} leaves one of {world_size} ranks without any")
    ranks = []
    for rank, (split, part) in enumerate(zip(heads, parts, strict=True)):
        cuts = {**attention_cuts(split, config.head_dim), **mlp_cuts(part)}
        held = shard_weights(weights, cuts, rank)
        for name in {EMBED, HEAD} & set(held):
            held[name], _ = shard_vocab(weights[name], rank, world_size)
        local = replace(
            config,
            n_heads=len(split.heads),
            n_kv_heads=len(split.kv_heads),
            intermediate_size=len(part),
            vocab_size=len(held[EMBED]),
        )
        ranks.append((local, held))
    return ranks


def llama_tensor_parallel(ranks: Sequence[Rank], vocab_size: int, token_ids: ArrayLike) -> Array:
    """Logits as ref.model.llama gives them, from the shards of all ranks.

    Args:
        ranks: as shard_llama gives them, shapes by the config of each.
        vocab_size: of the whole model.
        token_ids: [num_tokens], all within the vocabulary.
    Returns:
        [num_tokens, vocab_size], dtype of the weights.
    """
    runs = [Run(weight_shapes(config), weights, token_ids) for config, weights in ranks]
    config, replicated = ranks[0][0], runs[0]
    cos_sin = replicated.cos_sin(config.rope, config.head_dim)
    first = [rank * config.vocab_size for rank in range(len(ranks))]

    embedded = [
        vocab_embedding(run.token_ids, run.weights[EMBED], start) for run, start in zip(runs, first, strict=True)
    ]
    residual = all_reduce(embedded)[0]
    for layer in range(config.n_layers):
        key = f"model.layers.{layer}"
        hidden = replicated.rmsnorm(f"{key}.input_layernorm", residual, config.norm_eps)
        partial = [
            gqa_attention(local, run, layer, hidden, cos_sin, window=local.sliding_window)
            for (local, _), run in zip(ranks, runs, strict=True)
        ]
        residual = residual + all_reduce(partial)[0]
        hidden = replicated.rmsnorm(f"{key}.post_attention_layernorm", residual, config.norm_eps)
        residual = residual + all_reduce([gated_mlp(run, f"{key}.mlp", hidden) for run in runs])[0]
    hidden = replicated.rmsnorm("model.norm", residual, config.norm_eps)

    head = EMBED if config.tie_word_embeddings else HEAD
    logits = [
        vocab_logits(hidden, run.weights[head], start, vocab_size) for run, start in zip(runs, first, strict=True)
    ]
    return np.ascontiguousarray(all_gather(logits, axis=-1)[0][:, :vocab_size])
