"""Latent attention as the families' config.json describes it: DeepSeek V2, V3 and R1, MiniCPM3.

Each function gives the fields of ModelConfig that its family sets, and notes problems in the fields.
"""

from __future__ import annotations

from typing import Any

from engine.config import MlaConfig
from engine.model_config.dense import scales
from engine.model_config.fields import Fields
from engine.model_config.moe import deepseek_v2_experts, deepseek_v3_experts
from engine.model_config.rope import latent_sm_scale

MLA_NAMES = {"head_dim": "qk_rope_head_dim"}  # the part of a head that rotates
_MLA = {"num_key_value_heads": None, "q_lora_rank": None, "attention_bias": False}
DEEPSEEK = {**_MLA, "rope_interleave": True, "num_nextn_predict_layers": 0}
MINICPM3 = {**_MLA, "v_head_dim": None, "mlp_bias": False, "tie_word_embeddings": True, "rms_norm_eps": 1e-5}


def deepseek_v2(fields: Fields) -> dict[str, Any]:
    """V2 and V2-Lite."""
    return {**_deepseek(fields), "moe": deepseek_v2_experts(fields)}


def deepseek_v3(fields: Fields) -> dict[str, Any]:
    """V3 and R1."""
    return {**_deepseek(fields), "moe": deepseek_v3_experts(fields)}


def minicpm3(fields: Fields) -> dict[str, Any]:
    """v_head_dim is hidden_size / num_attention_heads where it is not given, as in the published checkpoint."""
    return {**_latent(fields), **scales(fields), "mlp_bias": fields.flag("mlp_bias")}


def _deepseek(fields: Fields) -> dict[str, Any]:
    num_mtp = fields.optional("num_nextn_predict_layers") or 0
    return {
        **_latent(fields),
        "rope_interleaved": fields.flag("rope_interleave"),
        "n_mtp_layers": fields.integer("num_nextn_predict_layers", num_mtp, low=0),
    }


def _latent(fields: Fields) -> dict[str, Any]:
    nope, rotated = (fields.integer(key, fields.value(key)) for key in ("qk_nope_head_dim", "qk_rope_head_dim"))
    n_heads, n_kv_heads = fields.value("num_attention_heads"), fields.optional("num_key_value_heads")
    if n_kv_heads not in (None, n_heads):
        fields.problem(
            f"num_key_value_heads is {n_kv_heads!r}; with latent attention it must be num_attention_heads ({n_heads!r})"
        )
    q_lora_rank = fields.optional("q_lora_rank")
    v_head_dim = fields.value("v_head_dim")
    if v_head_dim is None and "v_head_dim" in fields.defaults:
        hidden_size, heads = (fields.integer(key, fields.value(key)) for key in ("hidden_size", "num_attention_heads"))
        v_head_dim = hidden_size // max(heads, 1)
    bias, head_dim = fields.flag("attention_bias"), nope + rotated
    mla = MlaConfig(
        q_lora_rank=None if q_lora_rank is None else fields.integer("q_lora_rank", q_lora_rank),
        kv_lora_rank=fields.integer("kv_lora_rank", fields.value("kv_lora_rank")),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rotated,
        v_head_dim=fields.integer("v_head_dim", v_head_dim),
        sm_scale=latent_sm_scale(fields, max(head_dim, 1)),
    )
    if mla.v_head_dim > head_dim:
        fields.problem(
            f"v_head_dim ({mla.v_head_dim}) is above qk_nope_head_dim + qk_rope_head_dim ({head_dim}), which is not "
            "supported"
        )
    return {"mla": mla, "head_dim": head_dim, "qkv_bias": bias, "o_bias": bias}
