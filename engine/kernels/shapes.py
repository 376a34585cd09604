"""Sizes of models that people run, as their config.json says them: what kernels are compiled and measured for."""

from __future__ import annotations

from typing import Any


def _llama(
    architecture: str, hidden: int, intermediate: int, heads: int, kv_heads: int, vocab: int, **more: Any
) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": 1,
        "vocab_size": vocab,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        **more,
    }


_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}

MODEL_SHAPES: dict[str, dict[str, Any]] = {  # of one layer
    "llama-2-13b": _llama("LlamaForCausalLM", 5120, 13824, 40, 40, 32000),
    "llama-3.1-8b": _llama("LlamaForCausalLM", 4096, 14336, 32, 8, 128256),
    "llama-3.1-70b": _llama("LlamaForCausalLM", 8192, 28672, 64, 8, 128256),
    "llama-3.2-1b": _llama("LlamaForCausalLM", 2048, 8192, 32, 8, 128256, tie_word_embeddings=True),
    "smollm2-135m": _llama("LlamaForCausalLM", 576, 1536, 9, 3, 49152, tie_word_embeddings=True),
    "mistral-7b": _llama("MistralForCausalLM", 4096, 14336, 32, 8, 32000, sliding_window=4096),
    "qwen2.5-0.5b": _llama("Qwen2ForCausalLM", 896, 4864, 14, 2, 151936, tie_word_embeddings=True),
    "qwen2.5-7b": _llama("Qwen2ForCausalLM", 3584, 18944, 28, 4, 152064),
    "qwen3-8b": _llama("Qwen3ForCausalLM", 4096, 12288, 32, 8, 151936, head_dim=128),
    "minicpm-2b": _llama(
        "MiniCPMForCausalLM", 2304, 5760, 36, 36, 122753, scale_emb=12, scale_depth=1.4, dim_model_base=256
    ),
    "command-r": _llama("CohereForCausalLM", 8192, 22528, 64, 64, 256000, layer_norm_eps=1e-5, logit_scale=0.0625),
    "command-r-plus": _llama(
        "CohereForCausalLM", 12288, 33792, 96, 8, 256000, layer_norm_eps=1e-5, logit_scale=0.8, use_qk_norm=True
    ),
    "llama-3.1-8b-awq": _llama("LlamaForCausalLM", 4096, 14336, 32, 8, 128256, quantization_config=_AWQ),
    "qwen2-72b-gptq": _llama("Qwen2ForCausalLM", 8192, 29568, 64, 8, 152064, quantization_config=_GPTQ),
    "qwen-7b": {
        "architectures": ["QWenLMHeadModel"],
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_attention_heads": 32,
        "num_hidden_layers": 1,
        "vocab_size": 151936,
        "seq_length": 8192,
        "max_position_embeddings": 32768,
        "kv_channels": 128,
        "layer_norm_epsilon": 1e-6,
        "use_logn_attn": True,
    },
    "cpm-1": {
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": 2560,
        "n_head": 32,
        "n_layer": 1,
        "n_positions": 1024,
        "vocab_size": 30000,
    },
}
