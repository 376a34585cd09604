"""Golden models of the families beside Llama: a config.json each, and weights made from a seed by their names alone.

Names and shapes come from ref, so a checkpoint that transformers loads without a missing or spare tensor proves the
weight map as well.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.golden_models import GOLDEN_SEED, Config, Tensors, random_ids, uniform_tensor, write_checkpoint
from ref.config import parse_config
from ref.model.deepseek_mtp import mtp_weight_shapes
from ref.model.registry import weight_shapes

PROMPT_LENGTHS = (5, 21)

_BASE: Config = {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
}
_YARN: Config = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
_QWEN2: Config = {**_BASE, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rope_theta": 1000000.0}
_QWEN3: Config = {**_BASE, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16}
_COHERE: Config = {
    **{key: value for key, value in _BASE.items() if key != "rms_norm_eps"},
    "architectures": ["CohereForCausalLM"],
    "model_type": "cohere",
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.25,
    "tie_word_embeddings": True,
}
_MINICPM: Config = {
    **_BASE,
    "architectures": ["MiniCPMForCausalLM"],
    "model_type": "minicpm",
    "scale_emb": 12,
    "scale_depth": 1.4,
    "dim_model_base": 16,
    "tie_word_embeddings": True,
}
_LATENT: Config = {
    **_BASE,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "attention_bias": False,
}
_QWEN_MOE: Config = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "rope_theta": 1000000.0}
_DEEPSEEK: Config = {
    **_LATENT,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.5,
    "rope_scaling": {**_YARN, "mscale": 0.9, "mscale_all_dim": 0.7},
}
_GROUPS: Config = {"n_group": 4, "topk_group": 2}

FAMILY_GOLDENS: dict[str, Config] = {
    "qwen2": {**_QWEN2, "tie_word_embeddings": True},
    "qwen2_yarn": {**_QWEN2, "rope_theta": 10000.0, "rope_scaling": _YARN},
    "qwen2_window": {
        **_QWEN2,
        "num_hidden_layers": 3,
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 1,
    },
    "qwen3": _QWEN3,
    "qwen3_bias": {**_QWEN3, "attention_bias": True},
    "mixtral": {
        **_BASE,
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "rope_theta": 1000000.0,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
    },
    "qwen2_moe": {
        **_BASE,
        **_QWEN_MOE,
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "num_hidden_layers": 3,
        "decoder_sparse_step": 2,
        "shared_expert_intermediate_size": 40,
        "norm_topk_prob": False,
    },
    "qwen3_moe": {
        **_BASE,
        **_QWEN_MOE,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_hidden_layers": 3,
        "head_dim": 16,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
    },
    "deepseek_moe": {
        **{key: value for key, value in _DEEPSEEK.items() if key not in _LATENT},
        **_BASE,
        "architectures": ["DeepseekForCausalLM"],
        "model_type": "deepseek",
        "routed_scaling_factor": 1.0,
    },
    "deepseek_v2_lite": {
        **_DEEPSEEK,
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "q_lora_rank": None,
        "topk_method": "greedy",
    },
    "deepseek_v2": {
        **_DEEPSEEK,
        **_GROUPS,
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "topk_method": "group_limited_greedy",
    },
    "deepseek_v3": {
        **_DEEPSEEK,
        **_GROUPS,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "n_shared_experts": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 1,
    },
    "command_r": _COHERE,
    "command_r_plus": {**_COHERE, "use_qk_norm": True, "attention_bias": True, "tie_word_embeddings": False},
    "minicpm": _MINICPM,
    "minicpm_moe": {**_MINICPM, "num_experts": 5, "num_experts_per_tok": 2, "tie_word_embeddings": False},
    "minicpm3": {
        **_LATENT,
        "architectures": ["MiniCPM3ForCausalLM"],
        "model_type": "minicpm3",
        "scale_emb": 12,
        "scale_depth": 1.4,
        "dim_model_base": 16,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0, 1.05, 1.1, 1.3],
            "long_factor": [1.0, 1.5, 2.0, 4.0],
            "original_max_position_embeddings": 16,
        },
    },
    "qwen1": {
        **{key: value for key, value in _BASE.items() if key not in ("rms_norm_eps", "rope_theta", "rope_scaling")},
        "architectures": ["QWenLMHeadModel"],
        "model_type": "qwen",
        "num_key_value_heads": 4,
        "layer_norm_epsilon": 1e-6,
        "rotary_emb_base": 10000,
        "seq_length": 64,
        "no_bias": True,
        "use_logn_attn": True,
        "use_dynamic_ntk": True,
    },
    "cpm1": {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": 128,
        "n_embd": 48,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "activation_function": "gelu_new",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    },
    "cpm_ant": {
        "architectures": ["CpmAntForCausalLM"],
        "model_type": "cpmant",
        "vocab_size": 128,
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "dim_head": 12,
        "dim_ff": 64,
        "position_bias_num_buckets": 16,
        "position_bias_max_distance": 20,
        "prompt_types": 4,
        "prompt_length": 3,
        "segment_types": 4,
        "torch_dtype": "float32",
    },
}
# models without stored greedy ids: their logits of earlier tokens change as the sequence grows
CHANGES_UNDER_WAY = ("minicpm3", "cpm_ant")


def family_model(folder: str | Path, name: str, **overrides: Any) -> Path:
    """The checkpoint behind conformance/golden/<name>.npz, or with overrides of its config.json one like it."""
    config = FAMILY_GOLDENS[name] | overrides
    return write_checkpoint(folder, config, family_tensors(config, GOLDEN_SEED))


def family_prompts(name: str) -> list[list[int]]:
    """Two prompts of 5 and 21 ids; ids 0 to 3 (begin and end of text) are left out."""
    return random_ids(FAMILY_GOLDENS[name]["vocab_size"], PROMPT_LENGTHS)


def family_tensors(config: Config, seed: int) -> Tensors:
    """All tensors of a checkpoint by their names, float32; norms and biases are random too."""
    parsed = parse_config(config)
    shapes = weight_shapes(parsed)
    if config.get("num_nextn_predict_layers"):
        shapes |= mtp_weight_shapes(parsed)
    return {name: _tensor(seed, name, shape) for name, shape in shapes.items()}


def _tensor(seed: int, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Spread so that no part of a model is without say: norms near 1, scores and logits of a few units."""
    kind = name.rsplit(".", 2)[-2:]
    if ("norm" in kind[0] or kind[0].startswith("ln_")) and kind[1] == "weight":
        return 1 + uniform_tensor(seed, name, shape, 0.2)
    if len(shape) == 1:
        return uniform_tensor(seed, name, shape, 0.1 if "correction" in name else 0.3)
    gain = 2.0 if any(part in name for part in ("embed", "lm_head", "q_", "k_proj", ".gate.")) else 1.0
    return uniform_tensor(seed, name, shape, gain / math.sqrt(shape[-1]))
