"""Mixtral: a Mistral whose MLP is a mixture of experts in every layer, the chosen two weighted by their own softmax.

Source: Jiang et al. 2024, "Mixtral of Experts".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import ArrayLike, NDArray

from ref.model.blocks import decoder, decoder_shapes, gqa_attention, gqa_shapes
from ref.model.cache import Cache
from ref.model.experts import W1_W3_W2, MoeConfig, moe_block, moe_shapes
from ref.model.fields import Config, ModelConfig, common_fields, integer, one_of
from ref.model.run import Run, Shapes, Trace, Weights

Array = NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtralConfig(ModelConfig):
    sliding_window: int | None  # number of keys a query sees, itself included
    moe: MoeConfig


def read_mixtral(config: Config) -> MixtralConfig:
    """MixtralForCausalLM; the defaults are those of transformers.

    Raises ValueError: a key that is missing, of the wrong kind, or asks for what is not supported, by name.
    """
    one_of(config, "hidden_act", ["silu"], "silu")
    defaults = {"num_key_value_heads": 8, "max_position_embeddings": 131072, "rope_theta": 1e6, "rms_norm_eps": 1e-5}
    fields = common_fields(config, **defaults)
    moe = MoeConfig(
        n_experts=integer(config, "num_local_experts", 8),
        top_k=integer(config, "num_experts_per_tok", 2),
        intermediate_size=fields["intermediate_size"],
        renormalize=True,
        names=W1_W3_W2,
    )
    window = None if config.get("sliding_window") is None else integer(config, "sliding_window")
    return MixtralConfig(architecture="MixtralForCausalLM", sliding_window=window, moe=moe, **fields)


def weight_shapes(config: MixtralConfig) -> Shapes:
    """Name and shape of every tensor that the model reads."""
    shapes = decoder_shapes(config)
    for layer in range(config.n_layers):
        shapes |= gqa_shapes(config, layer)
        shapes |= moe_shapes(config.moe, f"model.layers.{layer}.block_sparse_moe", config.hidden_size)
    return shapes


def mixtral(
    config: MixtralConfig,
    weights: Weights,
    token_ids: ArrayLike,
    *,
    storage: str | None = None,
    trace: Trace | None = None,
    cache: Cache | None = None,
) -> Array:
    """Logits [num_tokens, vocab_size]; arguments, dtype, errors as in ref.model.llama.llama."""
    run = Run(weight_shapes(config), weights, token_ids, storage, trace, cache)
    cos_sin = run.cos_sin(config.rope, config.head_dim)

    def attention(layer: int, hidden: Array) -> Array:
        return gqa_attention(config, run, layer, hidden, cos_sin, window=config.sliding_window)

    def mlp(layer: int, hidden: Array) -> Array:
        return moe_block(config.moe, run, f"model.layers.{layer}.block_sparse_moe", hidden)

    return decoder(config, run, attention, mlp)
