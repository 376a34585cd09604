"""CPM-Ant (the line of CPM-2 and 3): scores get a bias by distance or by segment, and soft prompts come first.

Source: the OpenBMB CPM-Live project; T5 (Raffel et al. 2020) for the buckets of distance. Checked against
CpmAntForCausalLM of transformers.

Before the tokens stand prompt_length learned vectors, segment 0; tokens are segment 2. As transformers runs it, the
whole input is context: every token sees every other, later ones too, so a longer input changes all logits. A cache
fixes what is context: the prompt, read in one pass, sees itself both ways, and a token after it sees all up to itself.
So what is generated with a cache is not what a pass over the longer input would say.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ref.activation import gate_up_act
from ref.attention_biased import attention_biased_dense
from ref.embedding import embedding
from ref.model.cache import Cache
from ref.model.fields import Config, ModelConfig, RopeConfig, integer, number
from ref.model.run import Run, Shapes, Trace, Weights

Array = NDArray[Any]

PROMPT_TYPE, PROMPT_SEGMENT, TOKEN_SEGMENT = 2, 0, 2  # the prompt vectors in use, and the two segments


@dataclass(frozen=True, slots=True, kw_only=True)
class CpmAntConfig(ModelConfig):
    prompt_types: int
    prompt_length: int
    segment_types: int
    num_buckets: int
    max_distance: int


def read_cpm_ant(config: Config) -> CpmAntConfig:
    """CpmAntForCausalLM; the defaults are those of transformers. Nothing rotates, so rope stays empty.

    Raises ValueError: a key that is missing, of the wrong kind, or asks for what is not supported, by name.
    """
    n_heads = integer(config, "num_attention_heads", 32)
    eos = config.get("eos_token_id")
    return CpmAntConfig(
        architecture="CpmAntForCausalLM",
        n_layers=integer(config, "num_hidden_layers", 48),
        n_heads=n_heads,
        n_kv_heads=n_heads,
        head_dim=integer(config, "dim_head", 128),
        hidden_size=integer(config, "hidden_size", 4096),
        intermediate_size=integer(config, "dim_ff", 10240),
        vocab_size=integer(config, "vocab_size", 30720),
        max_position_embeddings=integer(config, "position_bias_max_distance", 2048),
        norm_eps=number(config, "eps", 1e-6),
        rope=RopeConfig(),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        prompt_types=integer(config, "prompt_types", 32),
        prompt_length=integer(config, "prompt_length", 32),
        segment_types=integer(config, "segment_types", 32),
        num_buckets=integer(config, "position_bias_num_buckets", 512),
        max_distance=integer(config, "position_bias_max_distance", 2048),
    )


def weight_shapes(config: CpmAntConfig) -> Shapes:
    """Name and shape of every tensor that the model reads."""
    hidden, inner, heads = config.hidden_size, config.intermediate_size, config.n_heads * config.head_dim
    shapes: Shapes = {
        "cpmant.input_embedding.weight": (config.vocab_size + config.prompt_types * config.prompt_length, hidden),
        "cpmant.segment_embedding.weight": (config.segment_types, hidden),
        "cpmant.position_bias.relative_attention_bias": (config.segment_types**2 + config.num_buckets, config.n_heads),
        "cpmant.encoder.output_layernorm.weight": (hidden,),
        "lm_head.weight": (config.vocab_size, hidden),
    }
    for layer in range(config.n_layers):
        key = f"cpmant.encoder.layers.{layer}"
        shapes |= {f"{key}.self_att.self_attention.project_{x}.weight": (heads, hidden) for x in "qkv"}
        shapes |= {
            f"{key}.self_att.layernorm_before_attention.weight": (hidden,),
            f"{key}.self_att.self_attention.attention_out.weight": (hidden, heads),
            f"{key}.ffn.layernorm_before_ffn.weight": (hidden,),
            f"{key}.ffn.ffn.w_in.w_0.weight": (inner, hidden),
            f"{key}.ffn.ffn.w_in.w_1.weight": (inner, hidden),
            f"{key}.ffn.ffn.w_out.weight": (hidden, inner),
        }
    return shapes


def cpm_ant(
    config: CpmAntConfig,
    weights: Weights,
    token_ids: ArrayLike,
    *,
    storage: str | None = None,
    trace: Trace | None = None,
    cache: Cache | None = None,
) -> Array:
    """Logits [num_tokens, vocab_size]; arguments, dtype, errors as in ref.model.llama.llama.

    Raises ValueError too for id 0, which is padding, and for a first pass with a cache that is not the whole prompt of
    cache.table_tokens tokens.
    """
    run = Run(weight_shapes(config), weights, token_ids, storage, trace, cache)
    if (run.token_ids == 0).any():
        raise ValueError("token id 0 is padding in CPM-Ant; leave it out")
    num_cached = 0 if cache is None else cache.num_cached
    if cache is not None and not num_cached and len(run.token_ids) != cache.table_tokens:
        found = f"{len(run.token_ids)} of {cache.table_tokens} tokens"
        raise ValueError(
            f"CPM-Ant reads a prompt in one pass, since its tokens see each other both ways; found {found}"
        )
    num_prompt, eps = config.prompt_length, config.norm_eps
    table = run.weights["cpmant.input_embedding.weight"]
    first = config.vocab_size + PROMPT_TYPE * num_prompt
    rows = embedding(run.token_ids, table[: config.vocab_size])
    if not num_cached:
        rows = np.concatenate([table[first : first + num_prompt], rows])  # [num_prompt + num_tokens, hidden_size]
    segments = np.full(len(rows), TOKEN_SEGMENT)
    segments[: len(rows) - len(run.token_ids)] = PROMPT_SEGMENT
    segment_rows = embedding(segments, run.weights["cpmant.segment_embedding.weight"])
    residual = run.step("cpmant.embedding", rows + segment_rows)
    for layer in range(config.n_layers):
        key = f"cpmant.encoder.layers.{layer}"
        hidden = run.rmsnorm(f"{key}.self_att.layernorm_before_attention", residual, eps)
        attended = run.step(f"layers.{layer}.attn_out", _attention(config, run, layer, hidden))
        residual = run.step(f"layers.{layer}.attn_residual", residual + attended)
        hidden = run.rmsnorm(f"{key}.ffn.layernorm_before_ffn", residual, eps)
        gate, up = run.linear(f"{key}.ffn.ffn.w_in.w_0", hidden), run.linear(f"{key}.ffn.ffn.w_in.w_1", hidden)
        inner = run.step(f"{key}.ffn.ffn.w_in", gate_up_act(np.concatenate([gate, up], axis=-1), "gelu"))
        fed = run.step(f"layers.{layer}.mlp_out", run.linear(f"{key}.ffn.ffn.w_out", inner))
        residual = run.step(f"layers.{layer}.residual", residual + fed)
    hidden = run.rmsnorm("cpmant.encoder.output_layernorm", residual[len(residual) - len(run.token_ids) :], eps)
    return run.step("logits", run.product("lm_head", hidden))


def _attention(config: CpmAntConfig, run: Run, layer: int, hidden: Array) -> Array:
    """[n, hidden_size] → [n, hidden_size], the soft prompt's rows among them in the first pass."""
    key = f"cpmant.encoder.layers.{layer}.self_att.self_attention"
    heads = (len(hidden), config.n_heads, config.head_dim)
    q, k, v = (run.linear(f"{key}.project_{x}", hidden).reshape(heads) for x in "qkv")
    prefix_len = len(hidden)
    if run.cache is not None:
        k, v = run.cache.extend(layer, k, v)
        prefix_len = config.prompt_length + run.cache.table_tokens
    bias = (bias_table(config, run), config.prompt_length, config.max_distance)
    out = attention_biased_dense(q, k, v, prefix_len, config.head_dim**-0.5, *bias)
    out = run.step(f"{key}.attention", out)
    return run.linear(f"{key}.attention_out", out.reshape(len(hidden), config.n_heads * config.head_dim))


def bias_table(config: CpmAntConfig, run: Run) -> Array:
    """The rows that are used, [num_buckets + 2, n_heads], dtype of the weights: see ref.attention_biased.position_bias.

    The checkpoint has num_buckets rows, then one for each pair (segment of the query, segment of the key).
    """
    crossings = ((TOKEN_SEGMENT, PROMPT_SEGMENT), (PROMPT_SEGMENT, TOKEN_SEGMENT))
    rows = [config.num_buckets + query * config.segment_types + key for query, key in crossings]
    return run.weights["cpmant.position_bias.relative_attention_bias"][[*range(config.num_buckets), *rows]]
