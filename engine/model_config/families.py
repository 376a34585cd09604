"""What each architecture's config.json says in its own way: a row a family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.model_config.dense import (
    COMMAND_R,
    COMMAND_R_NAMES,
    CPM1,
    CPM1_ACTIVATIONS,
    CPM1_NAMES,
    CPM_ANT,
    CPM_ANT_NAMES,
    DEEPSEEK_VL,
    QWEN1,
    QWEN1_NAMES,
    command_r,
    cpm1,
    cpm_ant,
    qwen1,
    scales,
)
from engine.model_config.fields import Fields
from engine.model_config.mla import DEEPSEEK, MINICPM3, MLA_NAMES, deepseek_v2, deepseek_v3, minicpm3
from engine.model_config.moe import (
    DEEPSEEK_V2_MOE,
    DEEPSEEK_V3_MOE,
    MINICPM_MOE,
    MIXTRAL_MOE,
    QWEN_MOE,
    deepseek_v2_experts,
    minicpm_experts,
    mixtral_experts,
    qwen_experts,
)

# num_key_value_heads None: as many as num_attention_heads
QWEN_WINDOW = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "layer_types": None}


@dataclass(frozen=True, slots=True)
class Family:
    """optional: its optional keys and what transformers takes for each where config.json is silent; a key that is
    neither there nor common to all families is not read. extra: the fields of ModelConfig that this family sets
    beyond those common to all, or instead of them; it may note problems in the fields. names: what the family calls
    a common key. activations: what hidden_act may be. rotates: whether it has a rotary embedding. part: the key of
    the language model's config in a file that describes more. slides: (layer, max_window_layers) → whether a layer has
    a window, where layer_types does not say it.
    """

    optional: Mapping[str, Any]
    extra: Callable[[Fields], dict[str, Any]] = lambda fields: {}
    names: Mapping[str, str] = field(default_factory=dict)
    activations: tuple[str, ...] = ("silu",)
    rotates: bool = True
    part: str | None = None
    slides: Callable[[int, int], bool] = lambda layer, first: layer >= first


def _llama(fields: Fields) -> dict[str, Any]:
    bias = fields.flag("attention_bias")
    return {"qkv_bias": bias, "o_bias": bias, "mlp_bias": fields.flag("mlp_bias")}


def _qwen2(fields: Fields) -> dict[str, Any]:
    return {"qkv_bias": True}  # always, and never one on o_proj


def _qwen3(fields: Fields) -> dict[str, Any]:
    bias = fields.flag("attention_bias")
    return {"qkv_bias": bias, "o_bias": bias, "qk_norm": True}


def _mixtral(fields: Fields) -> dict[str, Any]:
    return {"moe": mixtral_experts(fields)}


def _qwen2_moe(fields: Fields) -> dict[str, Any]:
    return {"qkv_bias": fields.flag("qkv_bias"), "moe": qwen_experts(fields, shared_expert=True)}


def _qwen3_moe(fields: Fields) -> dict[str, Any]:
    return {**_qwen3(fields), "moe": qwen_experts(fields, shared_expert=False)}


def _deepseek_moe(fields: Fields) -> dict[str, Any]:
    bias = fields.flag("attention_bias")
    return {"qkv_bias": bias, "o_bias": bias, "moe": deepseek_v2_experts(fields)}


def _minicpm(fields: Fields) -> dict[str, Any]:
    return {**scales(fields), "moe": minicpm_experts(fields)}


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family({"num_key_value_heads": None, "attention_bias": False, "mlp_bias": False}, _llama),
    "MistralForCausalLM": Family({"num_key_value_heads": 8, "sliding_window": 4096}),
    "Qwen2ForCausalLM": Family({"num_key_value_heads": 32, **QWEN_WINDOW}, _qwen2),
    "Qwen3ForCausalLM": Family(
        {"num_key_value_heads": 32, "head_dim": 128, "attention_bias": False, **QWEN_WINDOW}, _qwen3
    ),
    "MixtralForCausalLM": Family(
        {"num_key_value_heads": 8, "rope_theta": 1e6, "sliding_window": None, **MIXTRAL_MOE}, _mixtral
    ),
    "Qwen2MoeForCausalLM": Family(
        {"num_key_value_heads": 16, "qkv_bias": True, "num_experts_per_tok": 4, **QWEN_WINDOW, **QWEN_MOE},
        _qwen2_moe,
        slides=lambda layer, last: layer % 2 == 0 and layer < last,
    ),
    "Qwen3MoeForCausalLM": Family(
        {
            "num_key_value_heads": 4,
            "attention_bias": False,
            "use_sliding_window": False,
            "sliding_window": 4096,  # of all layers
            "num_experts_per_tok": 8,
            **QWEN_MOE,
        },
        _qwen3_moe,
    ),
    "DeepseekForCausalLM": Family(
        {"num_key_value_heads": None, "attention_bias": False, **DEEPSEEK_V2_MOE}, _deepseek_moe
    ),
    "DeepseekV2ForCausalLM": Family({**DEEPSEEK, **DEEPSEEK_V2_MOE}, deepseek_v2, MLA_NAMES),
    "DeepseekV3ForCausalLM": Family({**DEEPSEEK, **DEEPSEEK_V3_MOE}, deepseek_v3, MLA_NAMES),
    "MiniCPM3ForCausalLM": Family(MINICPM3, minicpm3, MLA_NAMES),
    "CohereForCausalLM": Family(COMMAND_R, command_r, COMMAND_R_NAMES),
    "MiniCPMForCausalLM": Family({"num_key_value_heads": None, "tie_word_embeddings": True, **MINICPM_MOE}, _minicpm),
    "QWenLMHeadModel": Family(QWEN1, qwen1, QWEN1_NAMES),
    "CpmAntForCausalLM": Family(CPM_ANT, cpm_ant, CPM_ANT_NAMES, rotates=False),
    "GPT2LMHeadModel": Family(CPM1, cpm1, CPM1_NAMES, CPM1_ACTIVATIONS, rotates=False),
    "DeepseekVLForConditionalGeneration": Family(DEEPSEEK_VL, _llama, part="text_config"),
    "MultiModalityCausalLM": Family(DEEPSEEK_VL, _llama, part="language_config"),
}
