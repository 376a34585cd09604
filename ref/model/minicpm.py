"""MiniCPM 1 and 2: a Llama whose embeddings, branches and logits are scaled, so that small models tell of large ones.

embeddings · scale_emb; each branch · scale_depth / √n_layers before it joins the residual stream; logits divided by
hidden_size / dim_model_base. MiniCPM3 has latent attention with longrope besides.
Source: Hu et al. 2024, "MiniCPM: Unveiling the Potential of Small Language Models".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from numpy.typing import ArrayLike, NDArray

from ref.model.blocks import decoder, decoder_shapes, gated_mlp, gqa_attention, gqa_shapes, mlp_shapes
from ref.model.cache import Cache
from ref.model.experts import W1_W3_W2, MoeConfig, moe_block, moe_shapes
from ref.model.fields import Config, ModelConfig, common_fields, flag, integer, number, one_of
from ref.model.latent import LatentConfig, latent_attention, latent_fields, latent_shapes
from ref.model.run import Run, Shapes, Trace, Weights

Array = NDArray[Any]


def scales(config: Config) -> dict[str, float]:
    """The three factors, as fields of ModelConfig. Raises ValueError, see number."""
    return {
        "embedding_scale": number(config, "scale_emb"),
        "residual_scale": number(config, "scale_depth") / math.sqrt(integer(config, "num_hidden_layers")),
        "logit_scale": number(config, "dim_model_base") / integer(config, "hidden_size"),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniCPMConfig(ModelConfig):
    moe: MoeConfig | None  # in every layer


def read_minicpm(config: Config) -> MiniCPMConfig:
    """MiniCPMForCausalLM, dense or, with num_experts, MoE.

    Raises ValueError: a key that is missing, of the wrong kind, or asks for what is not supported, by name.
    """
    one_of(config, "hidden_act", ["silu"], "silu")
    fields = common_fields(config, tie_word_embeddings=True) | scales(config)
    moe = None
    if config.get("num_experts"):
        moe = MoeConfig(
            n_experts=integer(config, "num_experts"),
            top_k=integer(config, "num_experts_per_tok", 2),
            intermediate_size=fields["intermediate_size"],
            renormalize=True,
            names=W1_W3_W2,
        )
    return MiniCPMConfig(architecture="MiniCPMForCausalLM", moe=moe, **fields)


def weight_shapes(config: MiniCPMConfig) -> Shapes:
    """Name and shape of every tensor that the model reads."""
    shapes = decoder_shapes(config)
    for layer in range(config.n_layers):
        key = f"model.layers.{layer}.mlp"
        shapes |= gqa_shapes(config, layer)
        if config.moe is None:
            shapes |= mlp_shapes(key, config.hidden_size, config.intermediate_size)
        else:
            shapes |= moe_shapes(config.moe, key, config.hidden_size)
    return shapes


def minicpm(
    config: MiniCPMConfig,
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
        return gqa_attention(config, run, layer, hidden, cos_sin)

    def mlp(layer: int, hidden: Array) -> Array:
        key = f"model.layers.{layer}.mlp"
        return gated_mlp(run, key, hidden) if config.moe is None else moe_block(config.moe, run, key, hidden)

    return decoder(config, run, attention, mlp)


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniCPM3Config(LatentConfig):
    mlp_bias: bool


def read_minicpm3(config: Config) -> MiniCPM3Config:
    """MiniCPM3ForCausalLM; the defaults are those of transformers.

    Raises ValueError: a key that is missing, of the wrong kind, or asks for what is not supported, by name.
    """
    one_of(config, "hidden_act", ["silu"], "silu")
    if config.get("v_head_dim") is None:  # as in the published MiniCPM3-4B
        config = {**config, "v_head_dim": integer(config, "hidden_size") // integer(config, "num_attention_heads")}
    fields = latent_fields(config, tie_word_embeddings=True, rms_norm_eps=1e-5) | scales(config)
    mlp_bias = flag(config, "mlp_bias", False)
    return MiniCPM3Config(architecture="MiniCPM3ForCausalLM", mlp_bias=mlp_bias, **fields)


def minicpm3_weight_shapes(config: MiniCPM3Config) -> Shapes:
    """Name and shape of every tensor that the model reads."""
    shapes = decoder_shapes(config)
    for layer in range(config.n_layers):
        key = f"model.layers.{layer}.mlp"
        shapes |= latent_shapes(config, layer)
        shapes |= mlp_shapes(key, config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
    return shapes


def minicpm3(
    config: MiniCPM3Config,
    weights: Weights,
    token_ids: ArrayLike,
    *,
    storage: str | None = None,
    trace: Trace | None = None,
    cache: Cache | None = None,
) -> Array:
    """Logits [num_tokens, vocab_size]; arguments, dtype, errors as in ref.model.llama.llama.

    The longrope table goes by num_tokens.
    """
    run = Run(minicpm3_weight_shapes(config), weights, token_ids, storage, trace, cache)
    cos_sin = run.cos_sin(config.rope, config.qk_rope_head_dim)

    def attention(layer: int, hidden: Array) -> Array:
        return latent_attention(config, run, layer, hidden, cos_sin, interleaved=False)

    def mlp(layer: int, hidden: Array) -> Array:
        return gated_mlp(run, f"model.layers.{layer}.mlp", hidden)

    return decoder(config, run, attention, mlp)
