"""CPM-1: the layout of GPT-2. Learned positions, LayerNorm with bias, a plain MLP with gelu, a tied head.

Its linear weights are [in_features, out_features], the other way round than everywhere else.
Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners" (GPT-2); Zhang et al. 2020, "CPM: A
Large-scale Generative Chinese Pre-trained Language Model". Checked against GPT2LMHeadModel of transformers, which is
what the checkpoint's config names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ref.activation import ACTIVATIONS, act
from ref.embedding import embedding
from ref.layernorm import layernorm
from ref.linear import linear
from ref.model.cache import Cache
from ref.model.fields import Config, ModelConfig, common_fields, flag, number, one_of
from ref.model.run import Run, Shapes, Trace, Weights

Array = NDArray[Any]

KEYS = {  # of ModelConfig's common keys, as GPT-2 calls them
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpm1Config(ModelConfig):
    activation: str


def read_cpm1(config: Config) -> Cpm1Config:
    """GPT2LMHeadModel.

    Raises ValueError: a key that is missing, of the wrong kind, or asks for what is not supported, by name.
    """
    for key in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if flag(config, key, False):
            raise ValueError(f"config.json: {key} is not supported")
    if not flag(config, "scale_attn_weights", True):
        raise ValueError("config.json: scale_attn_weights false is not supported")
    named = {**config, **{key: config.get(name) for key, name in KEYS.items()}}
    if named["intermediate_size"] is None and isinstance(named["hidden_size"], int):
        named["intermediate_size"] = 4 * named["hidden_size"]
    fields = common_fields(named, tie_word_embeddings=True, max_position_embeddings=1024)
    fields["norm_eps"] = number(config, "layer_norm_epsilon", 1e-5)
    activation = one_of(config, "activation_function", tuple(ACTIVATIONS), "gelu_new")
    return Cpm1Config(architecture="GPT2LMHeadModel", activation=activation, **fields)


def weight_shapes(config: Cpm1Config) -> Shapes:
    """Name and shape of every tensor that the model reads."""
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes: Shapes = {
        "transformer.wte.weight": (config.vocab_size, hidden),
        "transformer.wpe.weight": (config.max_position_embeddings, hidden),
    }
    for layer in range(config.n_layers):
        key = f"transformer.h.{layer}"
        shapes |= _norm_shapes(f"{key}.ln_1", hidden) | _norm_shapes(f"{key}.ln_2", hidden)
        shapes |= _conv_shapes(f"{key}.attn.c_attn", hidden, 3 * hidden)
        shapes |= _conv_shapes(f"{key}.attn.c_proj", hidden, hidden)
        shapes |= _conv_shapes(f"{key}.mlp.c_fc", hidden, inner) | _conv_shapes(f"{key}.mlp.c_proj", inner, hidden)
    shapes |= _norm_shapes("transformer.ln_f", hidden)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def _conv_shapes(key: str, in_features: int, out_features: int) -> Shapes:
    return {f"{key}.weight": (in_features, out_features), f"{key}.bias": (out_features,)}


def _norm_shapes(key: str, hidden: int) -> Shapes:
    return {f"{key}.weight": (hidden,), f"{key}.bias": (hidden,)}


def cpm1(
    config: Cpm1Config,
    weights: Weights,
    token_ids: ArrayLike,
    *,
    storage: str | None = None,
    trace: Trace | None = None,
    cache: Cache | None = None,
) -> Array:
    """Logits [num_tokens, vocab_size]; arguments, dtype, errors as in ref.model.llama.llama.

    Raises ValueError for a sequence longer than max_position_embeddings too: there are no more positions.
    """
    run = Run(weight_shapes(config), weights, token_ids, storage, trace, cache)
    if run.positions.size and run.positions[-1] >= config.max_position_embeddings:
        raise ValueError(f"position {run.positions[-1]} is past the {config.max_position_embeddings} that were learned")
    places = embedding(run.positions, run.weights["transformer.wpe.weight"])
    residual = run.step("transformer.wpe", run.embed("transformer.wte") + places)
    for layer in range(config.n_layers):
        key = f"transformer.h.{layer}"
        hidden = _norm(config, run, f"{key}.ln_1", residual)
        attended = run.step(f"layers.{layer}.attn_out", _attention(config, run, layer, hidden))
        residual = run.step(f"layers.{layer}.attn_residual", residual + attended)
        hidden = _norm(config, run, f"{key}.ln_2", residual)
        inner = run.step(f"{key}.mlp.act", act(_conv(run, f"{key}.mlp.c_fc", hidden), config.activation))
        fed = run.step(f"layers.{layer}.mlp_out", _conv(run, f"{key}.mlp.c_proj", inner))
        residual = run.step(f"layers.{layer}.residual", residual + fed)
    hidden = _norm(config, run, "transformer.ln_f", residual)
    head = "transformer.wte" if config.tie_word_embeddings else "lm_head"
    return run.step("logits", run.product(head, hidden))


def _attention(config: Cpm1Config, run: Run, layer: int, hidden: Array) -> Array:
    """[num_tokens, hidden_size] → [num_tokens, hidden_size]; nothing rotates."""
    key, heads = f"transformer.h.{layer}.attn", (len(hidden), config.n_heads, config.head_dim)
    q, k, v = (part.reshape(heads) for part in np.split(_conv(run, f"{key}.c_attn", hidden), 3, axis=-1))
    out = run.step(f"{key}.attention", run.attend(layer, q, k, v, config.head_dim**-0.5))
    return _conv(run, f"{key}.c_proj", out.reshape(len(hidden), config.hidden_size))


def _conv(run: Run, key: str, x: Array) -> Array:
    return run.step(key, linear(x, run.weights[f"{key}.weight"].T, run.weights[f"{key}.bias"]))


def _norm(config: Cpm1Config, run: Run, key: str, x: Array) -> Array:
    return run.step(key, layernorm(x, run.weights[f"{key}.weight"], run.weights[f"{key}.bias"], config.norm_eps))
