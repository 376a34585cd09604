"""Qwen2-MoE (a shared expert behind a sigmoid gate) and Qwen3-MoE (none): the attention of qwen.py, and experts.

Source: Yang et al. 2024, "Qwen2 Technical Report"; 2025, "Qwen3 Technical Report".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import ArrayLike, NDArray

from ref.model.blocks import decoder, decoder_shapes, gated_mlp, gqa_attention, mlp_shapes
from ref.model.cache import Cache
from ref.model.experts import MoeConfig, moe_block, moe_shapes
from ref.model.fields import Config, common_fields, flag, integer, one_of
from ref.model.qwen import LAYER_TYPES, QwenConfig, attention_shapes, windows_of
from ref.model.run import Run, Shapes, Trace, Weights

Array = NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenMoeConfig(QwenConfig):
    moe: MoeConfig
    moe_layers: tuple[bool, ...]  # which layers have experts; the others have a dense MLP


def read_qwen_moe(config: Config) -> QwenMoeConfig:
    """Qwen2MoeForCausalLM or Qwen3MoeForCausalLM; the defaults are those of transformers.

    Raises ValueError: a key that is missing, of the wrong kind, or asks for what is not supported, by name.
    """
    architecture = config["architectures"][0]
    one_of(config, "hidden_act", ["silu"], "silu")
    is_qwen3 = architecture == "Qwen3MoeForCausalLM"
    fields = common_fields(config, max_position_embeddings=32768, num_key_value_heads=4 if is_qwen3 else 16)
    attention_bias = flag(config, "attention_bias", False) if is_qwen3 else False
    moe = MoeConfig(
        n_experts=integer(config, "num_experts" if config.get("num_experts") else "num_local_experts"),
        top_k=integer(config, "num_experts_per_tok", 8 if is_qwen3 else 4),
        intermediate_size=integer(config, "moe_intermediate_size"),
        renormalize=flag(config, "norm_topk_prob", False),
        shared_intermediate_size=0 if is_qwen3 else integer(config, "shared_expert_intermediate_size"),
        shared_name="shared_expert",
        shared_gate=not is_qwen3,
    )
    every, dense = integer(config, "decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise ValueError(f"config.json: mlp_only_layers must be a list of layers, found {dense!r}")
    return QwenMoeConfig(
        architecture=architecture,
        qkv_bias=attention_bias if is_qwen3 else flag(config, "qkv_bias", True),
        o_bias=attention_bias,
        qk_norm=is_qwen3,
        windows=_windows(config, fields["n_layers"], is_qwen3),
        moe=moe,
        moe_layers=tuple(layer not in dense and (layer + 1) % every == 0 for layer in range(fields["n_layers"])),
        **fields,
    )


def _windows(config: Config, n_layers: int, is_qwen3: bool) -> tuple[int | None, ...]:
    """With use_sliding_window: on all layers of Qwen3-MoE, on every other of the lower ones of Qwen2-MoE."""
    if is_qwen3:
        return windows_of({**config, "layer_types": None}, [LAYER_TYPES[1]] * n_layers)
    lower = config.get("max_window_layers", 28)
    return windows_of(config, [LAYER_TYPES[layer % 2 == 0 and layer < lower] for layer in range(n_layers)])


def weight_shapes(config: QwenMoeConfig) -> Shapes:
    """Name and shape of every tensor that the model reads."""
    shapes = decoder_shapes(config)
    for layer in range(config.n_layers):
        key = f"model.layers.{layer}.mlp"
        shapes |= attention_shapes(config, layer)
        if config.moe_layers[layer]:
            shapes |= moe_shapes(config.moe, key, config.hidden_size)
        else:
            shapes |= mlp_shapes(key, config.hidden_size, config.intermediate_size)
    return shapes


def qwen_moe(
    config: QwenMoeConfig,
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
        window = config.windows[layer]
        return gqa_attention(config, run, layer, hidden, cos_sin, window=window, qk_norm=config.qk_norm)

    def mlp(layer: int, hidden: Array) -> Array:
        key = f"model.layers.{layer}.mlp"
        return moe_block(config.moe, run, key, hidden) if config.moe_layers[layer] else gated_mlp(run, key, hidden)

    return decoder(config, run, attention, mlp)
