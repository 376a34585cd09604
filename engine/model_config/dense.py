"""Dense families that are not quite a Llama, as their config.json describes them. Defined by ref.model.

Each function gives the fields of ModelConfig that its family sets, and notes problems in the fields.
"""

from __future__ import annotations

import math
from typing import Any

from engine.config import PrefixLmConfig, RopeConfig
from engine.model_config.fields import Fields, is_int

# what transformers, or for Qwen 1 the code beside the checkpoint, takes for keys that are absent
COMMAND_R = {
    "num_key_value_heads": None,
    "max_position_embeddings": 8192,
    "model_max_length": None,
    "rope_theta": 500000.0,
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "use_qk_norm": False,
}
COMMAND_R_NAMES = {"rms_norm_eps": "layer_norm_eps"}
QWEN1 = {
    "max_position_embeddings": None,
    "seq_length": None,
    "kv_channels": None,
    "rotary_emb_base": 10000.0,
    "layer_norm_epsilon": 1e-6,
    "scale_attn_weights": True,
    "no_bias": True,
    "use_logn_attn": True,
    "use_dynamic_ntk": True,
    "bf16": False,
    "fp16": False,
}
QWEN1_NAMES = {
    "head_dim": "kv_channels",
    "rms_norm_eps": "layer_norm_epsilon",
    "rope_theta": "rotary_emb_base",
    "partial_rotary_factor": "rotary_pct",
}
CPM1 = {
    "n_positions": 1024,
    "n_inner": None,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}
CPM1_NAMES = {
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
    "hidden_act": "activation_function",
    "rms_norm_eps": "layer_norm_epsilon",
}
CPM1_ACTIVATIONS = ("gelu_new", "gelu", "gelu_pytorch_tanh", "relu", "silu")
CPM_ANT = {
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "dim_head": 128,
    "hidden_size": 4096,
    "dim_ff": 10240,
    "vocab_size": 30720,
    "eps": 1e-6,
    "position_bias_num_buckets": 512,
    "position_bias_max_distance": 2048,
    "prompt_types": 32,
    "prompt_length": 32,
    "segment_types": 32,
}
CPM_ANT_NAMES = {
    "head_dim": "dim_head",
    "intermediate_size": "dim_ff",
    "max_position_embeddings": "position_bias_max_distance",
    "rms_norm_eps": "eps",
}
CPM_ANT_PROMPT = 2  # of prompt_types, the vectors in use
DEEPSEEK_VL = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "mlp_bias": False,
}


def command_r(fields: Fields) -> dict[str, Any]:
    """model_max_length, where it is given, is how far positions reach; the other length is only that of training."""
    bias, longest = fields.flag("attention_bias"), fields.optional("model_max_length")
    reach = {} if longest is None else {"max_position_embeddings": fields.integer("model_max_length", longest)}
    return {
        **{"norm": "layernorm", "rope_interleaved": True, "qkv_bias": bias, "o_bias": bias},
        **{"qk_norm": fields.flag("use_qk_norm"), "logit_scale": fields.number("logit_scale"), **reach},
    }


def scales(fields: Fields) -> dict[str, float]:
    """The three factors of all MiniCPM."""
    return {
        "embedding_scale": fields.number("scale_emb"),
        "residual_scale": fields.number("scale_depth") / math.sqrt(_size(fields, "num_hidden_layers")),
        "logit_scale": fields.number("dim_model_base") / _size(fields, "hidden_size"),
    }


def qwen1(fields: Fields) -> dict[str, Any]:
    """intermediate_size counts both halves of the MLP's inside. Positions reach seq_length where no more is said."""
    wide, heads = _size(fields, "intermediate_size"), _size(fields, "num_attention_heads")
    if wide > 1 and wide % 2:
        fields.problem(f"intermediate_size ({wide}) counts w1 and w2, so it must be even")
    head_dim = fields.value("head_dim")
    if is_int(head_dim) and head_dim * heads != _size(fields, "hidden_size"):
        fields.problem(f"kv_channels ({head_dim}) times num_attention_heads ({heads}) must be hidden_size")
    for group in ("rope_scaling", "rope_parameters"):
        if fields.values.get(group):
            fields.problem(f"{group} is not read by this architecture; it has use_dynamic_ntk")
    _check_scaled(fields)
    seq_length = fields.integer("seq_length", fields.optional("seq_length"), low=2)
    reach = fields.value("max_position_embeddings")
    bias = not fields.flag("no_bias")
    dtypes = [dtype for key, dtype in (("bf16", "bfloat16"), ("fp16", "float16")) if fields.flag(key)]
    return {
        **{"intermediate_size": wide // 2, "qkv_bias": True, "o_bias": bias, "mlp_bias": bias},
        "rope": RopeConfig(
            "ntk_alpha" if fields.flag("use_dynamic_ntk") else "default",
            fields.number("rope_theta"),
            original_max_position_embeddings=seq_length,
        ),
        "logn_length": seq_length if fields.flag("use_logn_attn") else 0,
        **({"max_position_embeddings": seq_length} if reach is None else {}),
        **({"dtype": dtypes[0]} if dtypes else {}),
    }


def cpm1(fields: Fields) -> dict[str, Any]:
    """n_inner is four times n_embd where it is not given."""
    for key in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if fields.flag(key):
            fields.problem(f"{key} is not supported")
    _check_scaled(fields)
    inner = {"intermediate_size": 4 * _size(fields, "hidden_size")} if fields.value("intermediate_size") is None else {}
    return {"norm": "layernorm", "qkv_bias": True, "o_bias": True, "mlp_bias": True, **inner}


def cpm_ant(fields: Fields) -> dict[str, Any]:
    """The learned vectors stand behind the tokens in the embedding, prompt_length of each type."""
    keys = ("prompt_types", "prompt_length", "segment_types", "position_bias_num_buckets")
    prompt_types, length, segments, buckets = (_size(fields, key) for key in keys)
    for key, low, found in (("prompt_types", 3, prompt_types), ("segment_types", 3, segments), (keys[3], 4, buckets)):
        if found < low:
            fields.problem(f"{key} must be at least {low}, found {found}")
    max_distance = _size(fields, "max_position_embeddings")
    if max_distance <= buckets // 4:
        fields.problem(f"position_bias_max_distance must be above a quarter of {keys[3]}, found {max_distance}")
    first = _size(fields, "vocab_size") + CPM_ANT_PROMPT * length
    prefix_lm = PrefixLmConfig(
        soft_prompt_ids=tuple(range(first, first + length)),
        num_embeddings=_size(fields, "vocab_size") + prompt_types * length,
        segment_types=segments,
        num_buckets=buckets,
        max_distance=max_distance,
    )
    return {"hidden_act": "gelu", "tie_word_embeddings": False, "prefix_lm": prefix_lm}


def _check_scaled(fields: Fields) -> None:
    if not fields.flag("scale_attn_weights"):
        fields.problem("scale_attn_weights false is not supported")


def _size(fields: Fields, key: str) -> int:
    """A size of the geometry, 1 where it has a problem."""
    return fields.integer(key, fields.value(key)) or 1
