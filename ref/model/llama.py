"""Llama 1, 2, 3.x and Mistral: the plain decoder. Other families are this one with something exchanged.

Source: Touvron et al. 2023, "LLaMA"; Jiang et al. 2023, "Mistral 7B" (the sliding window). Names of weights are
those of Hugging Face checkpoints, and every linear weight is [out_features, in_features].
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig(ModelConfig):
    attention_bias: bool = False  # of q, k, v and o
    mlp_bias: bool = False
    sliding_window: int | None = None  # number of keys a query sees, itself included


def read_llama(config: Config) -> LlamaConfig:
    """LlamaForCausalLM or MistralForCausalLM; the defaults are those of transformers.

    Raises ValueError: a key that is missing, of the wrong kind, or asks for what is not supported, by name.
    """
    architecture = config["architectures"][0]
    one_of(config, "hidden_act", ["silu"], "silu")
    if architecture == "MistralForCausalLM":
        fields = common_fields(config, num_key_value_heads=8, max_position_embeddings=131072)
        window = None if config.get("sliding_window", 4096) is None else integer(config, "sliding_window", 4096)
        return LlamaConfig(architecture=architecture, sliding_window=window, **fields)
    return LlamaConfig(
        architecture=architecture,
        attention_bias=flag(config, "attention_bias", False),
        mlp_bias=flag(config, "mlp_bias", False),
        **common_fields(config),
    )


def weight_shapes(config: LlamaConfig) -> Shapes:
    """Name and shape of every tensor that the model reads."""
    shapes, bias = decoder_shapes(config), config.attention_bias
    for layer in range(config.n_layers):
        shapes |= gqa_shapes(config, layer, qkv_bias=bias, o_bias=bias)
        key = f"model.layers.{layer}.mlp"
        shapes |= mlp_shapes(key, config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
    return shapes


def llama(
    config: LlamaConfig,
    weights: Weights,
    token_ids: ArrayLike,
    *,
    storage: str | None = None,
    trace: Trace | None = None,
    cache: Cache | None = None,
) -> Array:
    """Logits of the next token at every position of one sequence.

    Args:
        token_ids: [num_tokens].
        weights, storage, trace: see ref.model.run.Run.
        cache: None, or the tokens before these; see ref.model.cache.
    Returns:
        [num_tokens, vocab_size], dtype of the weights.
    Raises:
        ValueError: an id outside the vocabulary; a weight that is missing or of another shape than config says.

    Edge cases: no tokens gives [0, vocab_size]. The dynamic rope table is chosen by num_tokens.
    """
    run = Run(weight_shapes(config), weights, token_ids, storage, trace, cache)
    cos_sin = run.cos_sin(config.rope, config.head_dim)

    def attention(layer: int, hidden: Array) -> Array:
        return gqa_attention(config, run, layer, hidden, cos_sin, window=config.sliding_window)

    def mlp(layer: int, hidden: Array) -> Array:
        return gated_mlp(run, f"model.layers.{layer}.mlp", hidden)

    return decoder(config, run, attention, mlp)
