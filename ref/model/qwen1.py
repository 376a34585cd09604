"""Qwen 1: one matrix with bias for q, k and v, an MLP whose second half gates the first, and two ways to go on past
the length of training: log-n scaling of queries, and a rope table chosen by the length.

Source: Bai et al. 2023, "Qwen Technical Report", and modeling_qwen.py, which its checkpoints carry. transformers has
no such class: golden logits are those of its Qwen2 with the same weights under other names, which prompts of up to
seq_length must give; log-n scaling and the table for longer ones are checked by hand in tests/ref/model/test_qwen1.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ref.activation import gate_up_act
from ref.attention import logn_query
from ref.model.blocks import linear_shapes
from ref.model.cache import Cache
from ref.model.fields import Config, ModelConfig, common_fields, flag, integer, number
from ref.model.run import Run, Shapes, Trace, Weights
from ref.rope import rope

Array = NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen1Config(ModelConfig):
    """intermediate_size is the width of the MLP's inside, half of what config.json calls so."""

    bias: bool  # of all but c_attn, which always has one
    seq_length: int  # tokens of a training sequence
    logn: bool
    dynamic_ntk: bool


def read_qwen1(config: Config) -> Qwen1Config:
    """QWenLMHeadModel.

    Raises ValueError: a key that is missing, of the wrong kind, or asks for what is not supported, by name.
    """
    width = integer(config, "intermediate_size")
    if width % 2:
        raise ValueError(
            f"config.json: intermediate_size of Qwen 1 counts w1 and w2, so it must be even; found {width}"
        )
    n_heads, hidden_size = integer(config, "num_attention_heads"), integer(config, "hidden_size")
    if integer(config, "kv_channels", hidden_size // n_heads) * n_heads != hidden_size:
        raise ValueError(f"config.json: kv_channels times {n_heads} heads must be hidden_size {hidden_size}")
    if config.get("rotary_pct", 1.0) != 1.0:
        raise ValueError(f"config.json: rotary_pct must be 1, found {config['rotary_pct']!r}")
    if not flag(config, "scale_attn_weights", True):
        raise ValueError("config.json: scale_attn_weights false is not supported")
    seq_length = integer(config, "seq_length")
    named = {**config, "intermediate_size": width // 2, "rope_theta": number(config, "rotary_emb_base", 10000.0)}
    fields = common_fields(named, max_position_embeddings=seq_length)
    dtypes = {"bf16": "bfloat16", "fp16": "float16"}
    return Qwen1Config(
        architecture="QWenLMHeadModel",
        bias=not flag(config, "no_bias", True),
        seq_length=seq_length,
        logn=flag(config, "use_logn_attn", True),
        dynamic_ntk=flag(config, "use_dynamic_ntk", True),
        **fields
        | {
            "norm_eps": number(config, "layer_norm_epsilon", 1e-6),
            "dtype": next((name for key, name in dtypes.items() if config.get(key)), fields["dtype"]),
        },
    )


def ntk_alpha(num_tokens: int, seq_length: int) -> float:
    """2^⌈log2(num_tokens / seq_length) + 1⌉ − 1, at least 1; theta grows by alpha^(d / (d − 2)).

    So the table changes at seq_length, twice it, four times it, and not in between.
    """
    return max(1.0, 2.0 ** math.ceil(math.log2(max(num_tokens, 1) / seq_length) + 1) - 1)


def weight_shapes(config: Qwen1Config) -> Shapes:
    """Name and shape of every tensor that the model reads."""
    hidden, inner, bias = config.hidden_size, config.intermediate_size, config.bias
    shapes: Shapes = {"transformer.wte.weight": (config.vocab_size, hidden), "transformer.ln_f.weight": (hidden,)}
    for layer in range(config.n_layers):
        key = f"transformer.h.{layer}"
        shapes |= {f"{key}.ln_1.weight": (hidden,), f"{key}.ln_2.weight": (hidden,)}
        shapes |= linear_shapes(f"{key}.attn.c_attn", 3 * hidden, hidden, bias=True)
        shapes |= linear_shapes(f"{key}.attn.c_proj", hidden, hidden, bias=bias)
        shapes |= linear_shapes(f"{key}.mlp.w1", inner, hidden, bias=bias)
        shapes |= linear_shapes(f"{key}.mlp.w2", inner, hidden, bias=bias)
        shapes |= linear_shapes(f"{key}.mlp.c_proj", hidden, inner, bias=bias)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def qwen1(
    config: Qwen1Config,
    weights: Weights,
    token_ids: ArrayLike,
    *,
    storage: str | None = None,
    trace: Trace | None = None,
    cache: Cache | None = None,
) -> Array:
    """Logits [num_tokens, vocab_size]; arguments, dtype, errors as in ref.model.llama.llama.

    The rope table goes by num_tokens.
    """
    run = Run(weight_shapes(config), weights, token_ids, storage, trace, cache)
    num_tokens = len(run.token_ids) if cache is None else cache.table_tokens
    alpha = ntk_alpha(num_tokens, config.seq_length) if config.dynamic_ntk else 1.0
    theta = config.rope.theta * alpha ** (config.head_dim / (config.head_dim - 2))
    cos_sin = run.cos_sin(replace(config.rope, theta=theta), config.head_dim)
    residual = run.embed("transformer.wte")
    for layer in range(config.n_layers):
        key = f"transformer.h.{layer}"
        hidden = run.rmsnorm(f"{key}.ln_1", residual, config.norm_eps)
        attended = run.step(f"layers.{layer}.attn_out", _attention(config, run, layer, hidden, cos_sin))
        residual = run.step(f"layers.{layer}.attn_residual", residual + attended)
        hidden = run.rmsnorm(f"{key}.ln_2", residual, config.norm_eps)
        fed = run.step(f"layers.{layer}.mlp_out", _mlp(run, f"{key}.mlp", hidden))
        residual = run.step(f"layers.{layer}.residual", residual + fed)
    hidden = run.rmsnorm("transformer.ln_f", residual, config.norm_eps)
    head = "transformer.wte" if config.tie_word_embeddings else "lm_head"
    return run.step("logits", run.product(head, hidden))


def _attention(config: Qwen1Config, run: Run, layer: int, hidden: Array, cos_sin: Array) -> Array:
    """[num_tokens, hidden_size] → [num_tokens, hidden_size]; cos_sin [num_tokens, head_dim]."""
    key, heads = f"transformer.h.{layer}.attn", (len(hidden), config.n_heads, config.head_dim)
    q, k, v = (part.reshape(heads) for part in np.split(run.linear(f"{key}.c_attn", hidden), 3, axis=-1))
    q, k = rope(q, cos_sin), run.step(f"{key}.k_rope", rope(k, cos_sin))
    if config.logn:
        q = logn_query(q, run.positions, config.seq_length)
    q = run.step(f"{key}.q_rope", q)
    out = run.step(f"{key}.attention", run.attend(layer, q, k, v, config.head_dim**-0.5))
    return run.linear(f"{key}.c_proj", out.reshape(len(hidden), config.hidden_size))


def _mlp(run: Run, key: str, hidden: Array) -> Array:
    """c_proj(w1(x) · silu(w2(x))): w2 is the gate."""
    up, gate = run.linear(f"{key}.w1", hidden), run.linear(f"{key}.w2", hidden)
    return run.linear(f"{key}.c_proj", run.step(f"{key}.gate_up_act", gate_up_act(np.concatenate([gate, up], axis=-1))))
