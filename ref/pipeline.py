"""Pipeline parallelism: each stage holds some of the layers and hands the residual stream on to the next.

Little is sent, [num_tokens, hidden_size] a cut, but the stages work one after another: it takes several batches on the
way at once (micro-batches) to keep all of them busy. With m of them on p stages the share of idle time is
(p − 1)/(m + p − 1). Source: Huang et al. 2019, "GPipe".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import ArrayLike, NDArray

from ref.collectives import split_ranges
from ref.model.blocks import gated_mlp, gqa_attention, lm_head
from ref.model.llama import LlamaConfig
from ref.model.run import Run, Weights

Array = NDArray[Any]


def shard_stages(config: LlamaConfig, weights: Mapping[str, Array], num_stages: int) -> list[dict[str, Array]]:
    """What each stage holds, under the names of the checkpoint.

    The first stage has the embedding, the last the final norm and the head. A tied head is the embedding, which both
    of them then need.

    Returns:
        The weights of each stage by name, shapes and dtypes as they were.
    Raises:
        ValueError: more stages than layers.
    """
    n_layers = config.n_layers
    if num_stages > n_layers:
        raise ValueError(f"{n_layers} layers on {num_stages} stages leave one without; at most {n_layers} stages")
    stages = []
    for stage, layers in enumerate(split_ranges(n_layers, num_stages)):
        is_last = stage == num_stages - 1
        prefixes = [f"model.layers.{layer}." for layer in layers]
        if stage == 0 or (is_last and config.tie_word_embeddings):
            prefixes.append("model.embed_tokens.")
        if is_last:
            prefixes += ["model.norm.", "lm_head."]
        stages.append({name: tensor for name, tensor in weights.items() if name.startswith(tuple(prefixes))})
    return stages


def llama_stage(config: LlamaConfig, weights: Weights, token_ids: ArrayLike, residual: Array | None) -> Array:
    """One stage of a Llama: the layers whose weights are there.

    Args:
        weights: see shard_stages; nothing else is read.
        token_ids: [num_tokens].
        residual: [num_tokens, hidden_size] from the stage before; None in the first.
    Returns:
        The residual for the next stage, shape and dtype as it came; logits [num_tokens, vocab_size] from the last.
    """
    run = Run({name: tensor.shape for name, tensor in weights.items()}, weights, token_ids)
    cos_sin = run.cos_sin(config.rope, config.head_dim)
    if residual is None:
        residual = run.embed("model.embed_tokens")
    for layer in range(config.n_layers):
        key = f"model.layers.{layer}"
        if f"{key}.input_layernorm.weight" not in weights:
            continue
        hidden = run.rmsnorm(f"{key}.input_layernorm", residual, config.norm_eps)
        residual = residual + gqa_attention(config, run, layer, hidden, cos_sin, window=config.sliding_window)
        hidden = run.rmsnorm(f"{key}.post_attention_layernorm", residual, config.norm_eps)
        residual = residual + gated_mlp(run, f"{key}.mlp", hidden)
    if "model.norm.weight" not in weights:
        return residual
    return lm_head(config, run, run.rmsnorm("model.norm", residual, config.norm_eps))
