"""Qwen 1.5, 2, 2.5 (bias on q, k and v) and Qwen 3 (a norm on each head of q and k instead).

Source: Yang et al. 2024, "Qwen2 Technical Report"; 2025, "Qwen3 Technical Report". Qwen 1 has other names and a file
of its own; the MoE models are in qwen_moe.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import ArrayLike, NDArray

from ref.model.blocks import decoder, decoder_shapes, gated_mlp, gqa_attention, gqa_shapes, mlp_shapes
from ref.model.cache import Cache
from ref.model.fields import Config, ModelConfig, common_fields, flag, integer, one_of
from ref.model.run import Run, Shapes, Trace, Weights

Array = NDArray[Any]

LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenConfig(ModelConfig):
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]  # of each layer


def read_qwen(config: Config) -> QwenConfig:
    """Qwen2ForCausalLM or Qwen3ForCausalLM; the defaults are those of transformers.

    Raises ValueError: a key that is missing, of the wrong kind, or asks for what is not supported, by name.
    """
    architecture = config["architectures"][0]
    one_of(config, "hidden_act", ["silu"], "silu")
    is_qwen3 = architecture == "Qwen3ForCausalLM"
    attention_bias = flag(config, "attention_bias", False)
    fields = common_fields(config, max_position_embeddings=32768, **({"head_dim": 128} if is_qwen3 else {}))
    return QwenConfig(
        architecture=architecture,
        qkv_bias=attention_bias if is_qwen3 else True,
        o_bias=attention_bias if is_qwen3 else False,
        qk_norm=is_qwen3,
        windows=read_windows(config, fields["n_layers"]),
        **fields,
    )


def read_windows(config: Config, n_layers: int) -> tuple[int | None, ...]:
    """The window of each layer: by layer_types (5.x), or on the layers from max_window_layers on (4.x).

    Raises ValueError, see windows_of.
    """
    first = config.get("max_window_layers", 28)
    return windows_of(config, [LAYER_TYPES[layer >= first] for layer in range(n_layers)])


def windows_of(config: Config, layer_types: list[str]) -> tuple[int | None, ...]:
    """sliding_window on the sliding layers, if use_sliding_window says so; layer_types of the config come first.

    Raises ValueError: another number of layer_types than of layers, or one that is not known.
    """
    n_layers = len(layer_types)
    if not config.get("use_sliding_window", False) or config.get("sliding_window", 4096) is None:
        return (None,) * n_layers
    window, layer_types = integer(config, "sliding_window", 4096), config.get("layer_types") or layer_types
    if len(layer_types) != n_layers:
        raise ValueError(f"config.json: layer_types has {len(layer_types)} entries for {n_layers} layers")
    kinds = [one_of({"layer_types": kind}, "layer_types", LAYER_TYPES, "") for kind in layer_types]
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def weight_shapes(config: QwenConfig) -> Shapes:
    """Name and shape of every tensor that the model reads."""
    shapes = decoder_shapes(config)
    for layer in range(config.n_layers):
        shapes |= attention_shapes(config, layer)
        shapes |= mlp_shapes(f"model.layers.{layer}.mlp", config.hidden_size, config.intermediate_size)
    return shapes


def attention_shapes(config: QwenConfig, layer: int) -> Shapes:
    """Of one layer's attention: bias and head norms as the config says."""
    return gqa_shapes(config, layer, qkv_bias=config.qkv_bias, o_bias=config.o_bias, qk_norm=config.qk_norm)


def qwen(
    config: QwenConfig,
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
        return gated_mlp(run, f"model.layers.{layer}.mlp", hidden)

    return decoder(config, run, attention, mlp)
