"""A whole Llama or Mistral model from token ids to logits, without a cache: read it from top to bottom.

Source: Touvron et al. 2023, "LLaMA"; Jiang et al. 2023, "Mistral 7B" (the sliding window). Names of weights are
those of Hugging Face checkpoints, and every linear weight is [out_features, in_features].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ref.activation import gate_up_act
from ref.attention import attention_dense
from ref.config import LlamaConfig
from ref.embedding import embedding
from ref.linear import linear
from ref.numerics import round_to
from ref.rmsnorm import add_rmsnorm, rmsnorm
from ref.rope import rope, rope_cos_sin, rope_inv_freq

Array = NDArray[Any]
Weights = Mapping[str, Array]
Trace = Callable[[str, Array], None]


def llama(
    config: LlamaConfig,
    weights: Weights,
    token_ids: ArrayLike,
    *,
    storage: str | None = None,
    trace: Trace | None = None,
) -> Array:
    """Logits of the next token at every position of one sequence.

    Args:
        weights: by checkpoint name, all of one dtype; everything is computed in it.
        token_ids: [num_tokens].
        storage: None, or the type to which each op's output is rounded ("bfloat16"), as a kernel that stores it would;
            the weights are the caller's to round.
        trace: called with the name and value of every intermediate, in order.
    Returns:
        [num_tokens, vocab_size], dtype of the weights.
    Raises:
        ValueError: an id outside the vocabulary; a weight that is missing or of another shape than config says.

    Edge cases: no tokens gives [0, vocab_size]. The dynamic rope table is chosen by num_tokens.
    """
    weights = select_weights(config, weights)

    def step(name: str, value: Array) -> Array:
        value = round_to(value, storage)
        if trace is not None:
            trace(name, value)
        return value

    token_ids = np.asarray(token_ids, np.int64)
    num_tokens = len(token_ids)
    inv_freq = rope_inv_freq(**asdict(config.rope), head_dim=config.head_dim, seq_len=num_tokens)
    cos_sin = rope_cos_sin(inv_freq, np.arange(num_tokens))  # [num_tokens, head_dim], kept in float64

    residual = step("embed_tokens", embedding(token_ids, weights["model.embed_tokens.weight"]))
    hidden = step("layers.0.input_layernorm", _norm(config, weights, "model.layers.0.input_layernorm", residual))
    for layer in range(config.n_layers):
        name, key = f"layers.{layer}", f"model.layers.{layer}"
        attended = _attention(config, weights, layer, hidden, cos_sin, step, storage)
        hidden, residual = _add_norm(config, weights, f"{key}.post_attention_layernorm", attended, residual, storage)
        step(f"{name}.post_attention_layernorm", hidden)
        mlp_out = _mlp(weights, layer, hidden, step)
        # the norm that follows belongs to the next layer, or is the last one of the model
        is_last = layer == config.n_layers - 1
        next_norm = "norm" if is_last else f"layers.{layer + 1}.input_layernorm"
        hidden, residual = _add_norm(config, weights, f"model.{next_norm}", mlp_out, residual, storage)
        step(f"{name}.residual", residual)
        step(next_norm, hidden)

    lm_head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
    return step("logits", linear(hidden, weights[f"{lm_head}.weight"]))  # [num_tokens, vocab_size]


def _attention(
    config: LlamaConfig,
    weights: Weights,
    layer: int,
    hidden: Array,
    cos_sin: Array,
    step: Callable[[str, Array], Array],
    storage: str | None,
) -> Array:
    """Self-attention block: [num_tokens, hidden_size] → [num_tokens, hidden_size]."""
    name, key = f"layers.{layer}.self_attn", f"model.layers.{layer}.self_attn"
    heads = (hidden.shape[0], config.n_heads, config.head_dim)
    kv_heads = (hidden.shape[0], config.n_kv_heads, config.head_dim)
    q = step(f"{name}.q_proj", _linear(weights, f"{key}.q_proj", hidden)).reshape(heads)
    k = step(f"{name}.k_proj", _linear(weights, f"{key}.k_proj", hidden)).reshape(kv_heads)
    v = step(f"{name}.v_proj", _linear(weights, f"{key}.v_proj", hidden)).reshape(kv_heads)
    q = step(f"{name}.q_rope", rope(q, cos_sin))
    k = step(f"{name}.k_rope", rope(k, cos_sin))
    out = attention_dense(q, k, v, config.head_dim**-0.5, config.sliding_window, storage=storage)
    merged = step(f"{name}.attention", out).reshape(hidden.shape[0], config.n_heads * config.head_dim)
    return step(f"{name}.o_proj", _linear(weights, f"{key}.o_proj", merged))


def _mlp(weights: Weights, layer: int, hidden: Array, step: Callable[[str, Array], Array]) -> Array:
    """Feed-forward block: [num_tokens, hidden_size] → [num_tokens, hidden_size]."""
    name, key = f"layers.{layer}.mlp", f"model.layers.{layer}.mlp"
    gate = step(f"{name}.gate_proj", _linear(weights, f"{key}.gate_proj", hidden))
    up = step(f"{name}.up_proj", _linear(weights, f"{key}.up_proj", hidden))
    activated = step(f"{name}.gate_up_act", gate_up_act(np.concatenate([gate, up], axis=-1)))
    return step(f"{name}.down_proj", _linear(weights, f"{key}.down_proj", activated))


def _linear(weights: Weights, key: str, x: Array) -> Array:
    return linear(x, weights[f"{key}.weight"], weights.get(f"{key}.bias"))


def _norm(config: LlamaConfig, weights: Weights, key: str, x: Array) -> Array:
    return rmsnorm(x, weights[f"{key}.weight"], config.rms_norm_eps)


def _add_norm(
    config: LlamaConfig, weights: Weights, key: str, x: Array, residual: Array, storage: str | None
) -> tuple[Array, Array]:
    return add_rmsnorm(x, residual, weights[f"{key}.weight"], config.rms_norm_eps, storage=storage)


def weight_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that the model reads."""
    hidden, intermediate = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.n_layers):
        key = f"model.layers.{layer}"
        shapes[f"{key}.input_layernorm.weight"] = shapes[f"{key}.post_attention_layernorm.weight"] = (hidden,)
        for module, shape, bias in (
            ("self_attn.q_proj", (q_size, hidden), config.attention_bias),
            ("self_attn.k_proj", (kv_size, hidden), config.attention_bias),
            ("self_attn.v_proj", (kv_size, hidden), config.attention_bias),
            ("self_attn.o_proj", (hidden, q_size), config.attention_bias),
            ("mlp.gate_proj", (intermediate, hidden), config.mlp_bias),
            ("mlp.up_proj", (intermediate, hidden), config.mlp_bias),
            ("mlp.down_proj", (hidden, intermediate), config.mlp_bias),
        ):
            shapes[f"{key}.{module}.weight"] = shape
            if bias:
                shapes[f"{key}.{module}.bias"] = shape[:1]
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def select_weights(config: LlamaConfig, weights: Weights) -> dict[str, Array]:
    """The tensors that the model reads, and no other.

    Raises:
        ValueError: names the first weight that is missing or has another shape than config says.
    """
    shapes = weight_shapes(config)
    for name, shape in shapes.items():
        if name not in weights:
            raise ValueError(f"the checkpoint has no tensor {name}; config.json asks for one of shape {list(shape)}")
        if weights[name].shape != shape:
            found = list(weights[name].shape)
            raise ValueError(f"tensor {name} has shape {found}, but config.json asks for {list(shape)}")
    return {name: weights[name] for name in shapes}
