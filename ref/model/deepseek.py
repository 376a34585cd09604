"""DeepSeek V2, V2-Lite, V3 and R1: latent attention, and many small experts beside shared ones.

The first layers are dense. V2 scores experts by softmax, V3 by sigmoid with a bias that only chooses; both may first
choose groups of experts, as those of a group live on one machine (ref/moe_routing.py).
Source: DeepSeek-AI 2024, "DeepSeek-V2" and "DeepSeek-V3 Technical Report".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import ArrayLike, NDArray

from ref.model.blocks import Block, decoder, decoder_shapes, gated_mlp, mlp_shapes
from ref.model.cache import Cache
from ref.model.experts import MoeConfig, moe_block, moe_shapes
from ref.model.fields import Config, count, flag, integer, number, one_of
from ref.model.latent import LatentConfig, latent_attention, latent_fields, latent_shapes
from ref.model.run import Run, Shapes, Trace, Weights

Array = NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekConfig(LatentConfig):
    interleaved: bool
    moe: MoeConfig
    moe_layers: tuple[bool, ...]  # which layers have experts; the others have a dense MLP
    n_mtp_layers: int  # after the others, for speculation only: see deepseek_mtp.py


def read_deepseek(config: Config) -> DeepseekConfig:
    """DeepseekV2ForCausalLM or DeepseekV3ForCausalLM. The MTP layers past num_hidden_layers have no part in logits.

    Raises ValueError: a key that is missing, of the wrong kind, or asks for what is not supported, by name.
    """
    architecture = config["architectures"][0]
    one_of(config, "hidden_act", ["silu"], "silu")
    fields = latent_fields(config)
    moe = v3_experts(config) if architecture == "DeepseekV3ForCausalLM" else v2_experts(config)
    return DeepseekConfig(
        architecture=architecture,
        interleaved=flag(config, "rope_interleave", True),
        moe=moe,
        moe_layers=expert_layers(config, fields["n_layers"]),
        n_mtp_layers=count(config, "num_nextn_predict_layers") or count(config, "num_mtp_layers"),
        **fields,
    )


def expert_layers(config: Config, n_layers: int) -> tuple[bool, ...]:
    """From first_k_dense_replace on, every moe_layer_freq-th layer. Raises ValueError, see integer."""
    first, every = count(config, "first_k_dense_replace"), integer(config, "moe_layer_freq", 1)
    return tuple(layer >= first and layer % every == 0 for layer in range(n_layers))


def v2_experts(config: Config) -> MoeConfig:
    """V2: softmax, one group or the best of several. Raises ValueError, see one_of and number."""
    one_of(config, "scoring_func", ["softmax"], "softmax")
    grouped = one_of(config, "topk_method", ["greedy", "group_limited_greedy"], "greedy") == "group_limited_greedy"
    return MoeConfig(
        renormalize=flag(config, "norm_topk_prob", False),
        scaling_factor=number(config, "routed_scaling_factor", 1.0),
        n_group=integer(config, "n_group") if grouped else 1,
        topk_group=integer(config, "topk_group") if grouped else 1,
        **expert_sizes(config),
    )


def v3_experts(config: Config) -> MoeConfig:
    """V3: sigmoid, a bias that chooses, groups by their two best. Raises ValueError, see one_of and number."""
    one_of(config, "topk_method", ["noaux_tc"], "noaux_tc")
    return MoeConfig(
        renormalize=flag(config, "norm_topk_prob", True),
        scoring=one_of(config, "scoring_func", ["sigmoid"], "sigmoid"),
        scaling_factor=number(config, "routed_scaling_factor", 2.5),
        n_group=integer(config, "n_group", 8),
        topk_group=integer(config, "topk_group", 4),
        group_best=2,
        selection_bias=True,
        **expert_sizes(config),
    )


def expert_sizes(config: Config) -> dict[str, Any]:
    """n_shared_experts are one that is as many times as wide. Raises ValueError, see integer."""
    size = integer(config, "moe_intermediate_size")
    return {
        "n_experts": integer(config, "n_routed_experts" if config.get("n_routed_experts") else "num_local_experts"),
        "top_k": integer(config, "num_experts_per_tok"),
        "intermediate_size": size,
        "shared_intermediate_size": count(config, "n_shared_experts") * size,
    }


def weight_shapes(config: DeepseekConfig) -> Shapes:
    """Name and shape of every tensor that the model reads."""
    shapes = decoder_shapes(config)
    for layer in range(config.n_layers):
        key = f"model.layers.{layer}.mlp"
        shapes |= latent_shapes(config, layer)
        if config.moe_layers[layer]:
            shapes |= moe_shapes(config.moe, key, config.hidden_size)
        else:
            shapes |= mlp_shapes(key, config.hidden_size, config.intermediate_size)
    return shapes


def deepseek(
    config: DeepseekConfig,
    weights: Weights,
    token_ids: ArrayLike,
    *,
    storage: str | None = None,
    trace: Trace | None = None,
    cache: Cache | None = None,
) -> Array:
    """Logits [num_tokens, vocab_size]; arguments, dtype, errors as in ref.model.llama.llama."""
    run = Run(weight_shapes(config), weights, token_ids, storage, trace, cache)
    return decoder(config, run, *blocks_of(config, run))


def blocks_of(config: DeepseekConfig, run: Run) -> tuple[Block, Block]:
    """Attention and MLP of any layer, for the tokens of run; a layer past the last is an MTP layer and has experts."""
    cos_sin = run.cos_sin(config.rope, config.qk_rope_head_dim)

    def attention(layer: int, hidden: Array) -> Array:
        return latent_attention(config, run, layer, hidden, cos_sin, interleaved=config.interleaved)

    def mlp(layer: int, hidden: Array) -> Array:
        key = f"model.layers.{layer}.mlp"
        has_experts = layer >= config.n_layers or config.moe_layers[layer]
        return moe_block(config.moe, run, key, hidden) if has_experts else gated_mlp(run, key, hidden)

    return attention, mlp
