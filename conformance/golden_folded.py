"""Checkpoints of families that transformers lacks, rewritten as checkpoints of ones that it has: the same function.

    MiniCPM 1, 2   → Llama: each scale is linear, so it moves into the weight before or after it
    MiniCPM MoE    → Mixtral, likewise
    DeepSeekMoE    → Qwen2-MoE, whose shared expert's gate of zeros is σ(0) = 1/2, with twice the down_proj
    Qwen 1         → Qwen2, with c_attn cut in three and other names; only for prompts of up to seq_length

What this cannot check is that the scales stand where the published code has them: that was compared by reading
(the MiniCPM models of vLLM).
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from conformance.golden_families import FAMILY_GOLDENS, family_tensors
from conformance.golden_models import GOLDEN_SEED, Config, Tensors, write_checkpoint


def oracle_model(folder: Path, name: str) -> Path | None:
    """A checkpoint that transformers reads in the place of family golden `name`; None: it reads that one itself."""
    config = FAMILY_GOLDENS[name]
    fold = FOLDS.get(config["architectures"][0])
    if fold is None:
        return None
    return write_checkpoint(folder, *fold(config, family_tensors(config, GOLDEN_SEED)))


def fold_minicpm(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    """embed · scale_emb; o_proj and down_proj · scale_depth / √n_layers; lm_head · dim_model_base / hidden_size."""
    branch = config["scale_depth"] / math.sqrt(config["num_hidden_layers"])
    folded = dict(tensors)
    head = tensors["model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"]
    folded["lm_head.weight"] = _scaled(head, config["dim_model_base"] / config["hidden_size"])
    folded["model.embed_tokens.weight"] = _scaled(tensors["model.embed_tokens.weight"], config["scale_emb"])
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight", "w2.weight")):
            folded[name] = _scaled(tensor, branch)
    if not config.get("num_experts"):
        kind = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
        return {**config, **kind, "tie_word_embeddings": False}, folded
    kind = {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": config["num_experts"],
    }
    renamed = {name.replace(".mlp.", ".block_sparse_moe."): tensor for name, tensor in folded.items()}
    return {**config, **kind, "tie_word_embeddings": False}, renamed


def fold_deepseek_moe(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    """The shared experts' gate is σ(0) = 1/2, and their down_proj twice as large."""
    folded: Tensors = {}
    for name, tensor in tensors.items():
        factor = 2.0 if name.endswith("shared_experts.down_proj.weight") else 1.0
        folded[name.replace("shared_experts", "shared_expert")] = _scaled(tensor, factor)
    for name, tensor in tensors.items():
        if name.endswith("mlp.gate.weight"):
            folded[name.replace("gate.weight", "shared_expert_gate.weight")] = np.zeros(
                (1, tensor.shape[1]), np.float32
            )
    changes: Config = {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "num_experts": config["n_routed_experts"],
        "shared_expert_intermediate_size": config["n_shared_experts"] * config["moe_intermediate_size"],
        "mlp_only_layers": list(range(config["first_k_dense_replace"])),
        "qkv_bias": False,
    }
    return {**config, **changes}, folded


def fold_qwen1(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    """w2 gates w1."""
    names = {
        "transformer.wte": "model.embed_tokens",
        "transformer.ln_f": "model.norm",
        "transformer.h.": "model.layers.",
        ".attn.c_proj": ".self_attn.o_proj",
        ".mlp.w1": ".mlp.up_proj",
        ".mlp.w2": ".mlp.gate_proj",
        ".mlp.c_proj": ".mlp.down_proj",
        ".ln_1": ".input_layernorm",
        ".ln_2": ".post_attention_layernorm",
    }
    folded: Tensors = {}
    for name, tensor in tensors.items():
        for old, new in names.items():
            name = name.replace(old, new)
        if ".attn.c_attn" in name:
            for part, rows in zip(("q_proj", "k_proj", "v_proj"), np.split(tensor, 3), strict=True):
                folded[name.replace("attn.c_attn", f"self_attn.{part}")] = rows
        else:
            folded[name] = tensor
    changes: Config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "intermediate_size": config["intermediate_size"] // 2,
        "rms_norm_eps": config["layer_norm_epsilon"],
        "rope_theta": config["rotary_emb_base"],
    }
    return {**config, **changes}, folded


def without_mtp(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    """transformers passes over the MTP layer by its number in the published model, 61, and so not over ours."""
    return config, {
        name: tensor for name, tensor in tensors.items() if f"layers.{config['num_hidden_layers']}" not in name
    }


def _scaled(tensor: np.ndarray, scale: float) -> np.ndarray:
    return (tensor.astype(np.float64) * scale).astype(np.float32)


FOLDS = {
    "MiniCPMForCausalLM": fold_minicpm,
    "DeepseekForCausalLM": fold_deepseek_moe,
    "QWenLMHeadModel": fold_qwen1,
    "DeepseekV3ForCausalLM": without_mtp,
}
