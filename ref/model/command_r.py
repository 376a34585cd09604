"""Command-R and R+: attention and MLP side by side, LayerNorm without bias, neighbouring elements turn in pairs.

One norm feeds both blocks and one sum takes both, so tensor parallelism needs one all-reduce a layer, not two:
residual += attention(norm(residual)) + mlp(norm(residual)). Logits are scaled; R+ norms each head of q and k.
Source: the config and checkpoints of c4ai-command-r-v01 and c4ai-command-r-plus; the parallel block is that of Wang
and Komatsuzaki 2021, "GPT-J-6B".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import ArrayLike, NDArray

from ref.layernorm import layernorm
from ref.model.blocks import gated_mlp, gqa_shapes, lm_head, mlp_shapes
from ref.model.cache import Cache
from ref.model.fields import Config, ModelConfig, common_fields, flag, number, one_of
from ref.model.run import Run, Shapes, Trace, Weights
from ref.rope import rope

Array = NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandRConfig(ModelConfig):
    attention_bias: bool
    qk_norm: bool


def read_command_r(config: Config) -> CommandRConfig:
    """CohereForCausalLM; the defaults are those of transformers.

    Raises ValueError: a key that is missing, of the wrong kind, or asks for what is not supported, by name.
    """
    one_of(config, "hidden_act", ["silu"], "silu")
    fields = common_fields(config, max_position_embeddings=8192, rope_theta=500000.0, tie_word_embeddings=True)
    fields |= {"norm_eps": number(config, "layer_norm_eps", 1e-5), "logit_scale": number(config, "logit_scale", 0.0625)}
    return CommandRConfig(
        architecture="CohereForCausalLM",
        attention_bias=flag(config, "attention_bias", False),
        qk_norm=flag(config, "use_qk_norm", False),
        **fields,
    )


def weight_shapes(config: CommandRConfig) -> Shapes:
    """Name and shape of every tensor that the model reads."""
    hidden, bias = config.hidden_size, config.attention_bias
    shapes: Shapes = {"model.embed_tokens.weight": (config.vocab_size, hidden), "model.norm.weight": (hidden,)}
    for layer in range(config.n_layers):
        key = f"model.layers.{layer}"
        shapes[f"{key}.input_layernorm.weight"] = (hidden,)
        shapes |= gqa_shapes(config, layer, qkv_bias=bias, o_bias=bias)
        if config.qk_norm:  # each head has a weight of its own
            shapes[f"{key}.self_attn.q_norm.weight"] = (config.n_heads, config.head_dim)
            shapes[f"{key}.self_attn.k_norm.weight"] = (config.n_kv_heads, config.head_dim)
        shapes |= mlp_shapes(f"{key}.mlp", hidden, config.intermediate_size)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def command_r(
    config: CommandRConfig,
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
    residual = run.embed("model.embed_tokens")
    for layer in range(config.n_layers):
        key = f"model.layers.{layer}"
        hidden = _norm(config, run, f"{key}.input_layernorm", residual)
        attended = run.step(f"{key}.attn_out", _attention(config, run, layer, hidden, cos_sin))
        fed = run.step(f"{key}.mlp_out", gated_mlp(run, f"{key}.mlp", hidden))
        residual = run.step(f"{key}.residual", residual + (attended + fed))
    return lm_head(config, run, _norm(config, run, "model.norm", residual))


def _norm(config: CommandRConfig, run: Run, key: str, x: Array) -> Array:
    return run.step(key, layernorm(x, run.weights[f"{key}.weight"], None, config.norm_eps))


def _attention(config: CommandRConfig, run: Run, layer: int, hidden: Array, cos_sin: Array) -> Array:
    """[num_tokens, hidden_size] → [num_tokens, hidden_size]; cos_sin [num_tokens, head_dim]."""
    key, num_tokens = f"model.layers.{layer}.self_attn", len(hidden)
    q = run.linear(f"{key}.q_proj", hidden).reshape(num_tokens, config.n_heads, config.head_dim)
    k = run.linear(f"{key}.k_proj", hidden).reshape(num_tokens, config.n_kv_heads, config.head_dim)
    v = run.linear(f"{key}.v_proj", hidden).reshape(num_tokens, config.n_kv_heads, config.head_dim)
    if config.qk_norm:
        q, k = _norm(config, run, f"{key}.q_norm", q), _norm(config, run, f"{key}.k_norm", k)
    q = run.step(f"{key}.q_rope", rope(q, cos_sin, interleaved=True))
    k = run.step(f"{key}.k_rope", rope(k, cos_sin, interleaved=True))
    out = run.step(f"{key}.attention", run.attend(layer, q, k, v, config.head_dim**-0.5))
    return run.linear(f"{key}.o_proj", out.reshape(num_tokens, config.n_heads * config.head_dim))
