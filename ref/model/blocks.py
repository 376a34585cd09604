"""The blocks that most families share: the walk along the residual stream, grouped attention, the gated MLP.

A family that differs in one of them brings a function of its own and keeps the rest. Beside each block stand the
names and shapes of its weights.

Source: Touvron et al. 2023, "LLaMA" (pre-norm, gated MLP); the modeling files of transformers, whose names these are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ref.activation import gate_up_act
from ref.model.fields import ModelConfig
from ref.model.run import Run, Shapes
from ref.rmsnorm import rmsnorm
from ref.rope import rope

Array = NDArray[Any]
Block = Callable[[int, Array], Array]  # (layer, [num_tokens, hidden_size]) → [num_tokens, hidden_size]

GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")


def decoder(config: ModelConfig, run: Run, attention: Block, mlp: Block) -> Array:
    """A pre-norm decoder, from token ids to logits [num_tokens, vocab_size], dtype of the weights."""
    return lm_head(config, run, decoder_hidden(config, run, attention, mlp))


def decoder_hidden(config: ModelConfig, run: Run, attention: Block, mlp: Block) -> Array:
    """embed · embedding_scale, the layers, the last norm: [num_tokens, hidden_size], dtype of the weights."""
    residual = run.embed("model.embed_tokens", config.embedding_scale)
    for layer in range(config.n_layers):
        residual = decoder_layer(config, run, layer, residual, attention, mlp)
    return run.rmsnorm("model.norm", residual, config.norm_eps)


def decoder_layer(config: ModelConfig, run: Run, layer: int, residual: Array, attention: Block, mlp: Block) -> Array:
    """residual + residual_scale · attention(norm(residual)), then the same with mlp; a new residual, same dtype.

    residual [num_tokens, hidden_size] is the stream before the layer, what comes back the one behind it.

    All scales are 1 but in MiniCPM.
    """
    key, scale, eps = f"model.layers.{layer}", config.residual_scale, config.norm_eps
    hidden = run.rmsnorm(f"{key}.input_layernorm", residual, eps)
    attended = run.step(f"{key}.attn_out", attention(layer, hidden))
    residual = run.step(f"{key}.attn_residual", residual + scaled(attended, scale))
    hidden = run.rmsnorm(f"{key}.post_attention_layernorm", residual, eps)
    fed = run.step(f"{key}.mlp_out", mlp(layer, hidden))
    return run.step(f"{key}.residual", residual + scaled(fed, scale))


def lm_head(config: ModelConfig, run: Run, hidden: Array) -> Array:
    """[num_tokens, hidden_size] → logits · logit_scale [num_tokens, vocab_size], same dtype; a tied head is embed."""
    key = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
    return run.step("logits", scaled(run.product(key, hidden), config.logit_scale))


def scaled(x: Array, scale: float) -> Array:
    """x · scale, shape and dtype as x."""
    return x if scale == 1 else x * x.dtype.type(scale)


def decoder_shapes(config: ModelConfig) -> Shapes:
    """Of all that stands outside attention and MLP."""
    hidden = config.hidden_size
    shapes: Shapes = {"model.embed_tokens.weight": (config.vocab_size, hidden), "model.norm.weight": (hidden,)}
    for layer in range(config.n_layers):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{layer}.{norm}.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def gqa_attention(
    config: ModelConfig,
    run: Run,
    layer: int,
    hidden: Array,
    cos_sin: Array,
    *,
    window: int | None = None,
    qk_norm: bool = False,
) -> Array:
    """Grouped-query attention: project, turn, attend, project.

    Args:
        hidden: [num_tokens, hidden_size], normed.
        cos_sin: [num_tokens, head_dim].
        window: keys a query sees, itself included.
        qk_norm: an RMSNorm of each head of q and k before they turn, one weight [head_dim] for all (Qwen3).
    Returns:
        [num_tokens, hidden_size], dtype of hidden.
    """
    key, num_tokens = f"model.layers.{layer}.self_attn", len(hidden)
    q = run.linear(f"{key}.q_proj", hidden).reshape(num_tokens, config.n_heads, config.head_dim)
    k = run.linear(f"{key}.k_proj", hidden).reshape(num_tokens, config.n_kv_heads, config.head_dim)
    v = run.linear(f"{key}.v_proj", hidden).reshape(num_tokens, config.n_kv_heads, config.head_dim)
    if qk_norm:
        q = run.step(f"{key}.q_norm", rmsnorm(q, run.weights[f"{key}.q_norm.weight"], config.norm_eps))
        k = run.step(f"{key}.k_norm", rmsnorm(k, run.weights[f"{key}.k_norm.weight"], config.norm_eps))
    q = run.step(f"{key}.q_rope", rope(q, cos_sin))
    k = run.step(f"{key}.k_rope", rope(k, cos_sin))
    out = run.step(f"{key}.attention", run.attend(layer, q, k, v, config.head_dim**-0.5, window))
    return run.linear(f"{key}.o_proj", out.reshape(num_tokens, config.n_heads * config.head_dim))


def gqa_shapes(
    config: ModelConfig, layer: int, *, qkv_bias: bool = False, o_bias: bool = False, qk_norm: bool = False
) -> Shapes:
    """Of the weights that gqa_attention reads in this layer."""
    key = f"model.layers.{layer}.self_attn"
    q_size, kv_size = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    shapes: Shapes = {}
    for name, size in (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size)):
        shapes |= linear_shapes(f"{key}.{name}", size, config.hidden_size, bias=qkv_bias)
    shapes |= linear_shapes(f"{key}.o_proj", config.hidden_size, q_size, bias=o_bias)
    if qk_norm:
        shapes |= {f"{key}.{name}.weight": (config.head_dim,) for name in ("q_norm", "k_norm")}
    return shapes


def gated_mlp(run: Run, key: str, hidden: Array, names: tuple[str, str, str] = GATE_UP_DOWN) -> Array:
    """down(silu(gate(x)) · up(x)): [num_tokens, hidden_size] → [num_tokens, hidden_size], dtype of hidden."""
    gate_name, up_name, down_name = names
    gate, up = run.linear(f"{key}.{gate_name}", hidden), run.linear(f"{key}.{up_name}", hidden)
    activated = run.step(f"{key}.gate_up_act", gate_up_act(np.concatenate([gate, up], axis=-1)))
    return run.linear(f"{key}.{down_name}", activated)


def mlp_shapes(
    key: str,
    hidden_size: int,
    intermediate_size: int,
    *,
    bias: bool = False,
    names: tuple[str, str, str] = GATE_UP_DOWN,
) -> Shapes:
    """Of the weights that gated_mlp reads."""
    gate, up, down = names
    return {
        **linear_shapes(f"{key}.{gate}", intermediate_size, hidden_size, bias=bias),
        **linear_shapes(f"{key}.{up}", intermediate_size, hidden_size, bias=bias),
        **linear_shapes(f"{key}.{down}", hidden_size, intermediate_size, bias=bias),
    }


def linear_shapes(key: str, out_features: int, in_features: int, *, bias: bool = False) -> Shapes:
    """Of one linear layer: weight [out_features, in_features] and, if asked for, bias [out_features]."""
    shapes: Shapes = {f"{key}.weight": (out_features, in_features)}
    return shapes | ({f"{key}.bias": (out_features,)} if bias else {})
