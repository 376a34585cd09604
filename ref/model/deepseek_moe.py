"""DeepSeekMoE, the first: the attention of Llama, and many small experts beside shared ones.

Source: Dai et al. 2024, "DeepSeekMoE".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import ArrayLike, NDArray

from ref.model.blocks import decoder, decoder_shapes, gated_mlp, gqa_attention, gqa_shapes, mlp_shapes
from ref.model.cache import Cache
from ref.model.deepseek import expert_layers, v2_experts
from ref.model.experts import MoeConfig, moe_block, moe_shapes
from ref.model.fields import Config, ModelConfig, common_fields, flag, one_of
from ref.model.run import Run, Shapes, Trace, Weights

Array = NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekMoeConfig(ModelConfig):
    attention_bias: bool
    moe: MoeConfig
    moe_layers: tuple[bool, ...]  # which layers have experts; the others have a dense MLP


def read_deepseek_moe(config: Config) -> DeepseekMoeConfig:
    """DeepseekForCausalLM.

    Raises ValueError: a key that is missing, of the wrong kind, or asks for what is not supported, by name.
    """
    one_of(config, "hidden_act", ["silu"], "silu")
    fields = common_fields(config)
    return DeepseekMoeConfig(
        architecture="DeepseekForCausalLM",
        attention_bias=flag(config, "attention_bias", False),
        moe=v2_experts(config),
        moe_layers=expert_layers(config, fields["n_layers"]),
        **fields,
    )


def weight_shapes(config: DeepseekMoeConfig) -> Shapes:
    """Name and shape of every tensor that the model reads."""
    shapes, bias = decoder_shapes(config), config.attention_bias
    for layer in range(config.n_layers):
        key = f"model.layers.{layer}.mlp"
        shapes |= gqa_shapes(config, layer, qkv_bias=bias, o_bias=bias)
        if config.moe_layers[layer]:
            shapes |= moe_shapes(config.moe, key, config.hidden_size)
        else:
            shapes |= mlp_shapes(key, config.hidden_size, config.intermediate_size)
    return shapes


def deepseek_moe(
    config: DeepseekMoeConfig,
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
        return moe_block(config.moe, run, key, hidden) if config.moe_layers[layer] else gated_mlp(run, key, hidden)

    return decoder(config, run, attention, mlp)
