"""The smallest complete engine: one sequence, a paged KV cache, one token at a time.

prefill: run the whole prompt through the model once, which fills the cache and gives the logits of its last token.
decode:  pick a token, run it alone (its keys and values join the cache), and so on. Attention reads the past from
         the cache, so a step costs one token's arithmetic; the answer is that of ref.model.llama.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ref.activation import gate_up_act
from ref.attention import attention_prefill
from ref.config import LlamaConfig
from ref.embedding import embedding
from ref.kv_cache import kv_cache_slots
from ref.linear import linear
from ref.model.llama import select_weights
from ref.rmsnorm import add_rmsnorm, rmsnorm
from ref.rope import rope_cos_sin, rope_inv_freq, rope_kv_write
from ref.sampling import greedy, sample

Array = NDArray[Any]
Weights = Mapping[str, Array]


def generate(
    config: LlamaConfig,
    weights: Weights,
    prompt_ids: Sequence[int],
    max_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    uniforms: Sequence[float] = (),
    ignore_eos: bool = False,
    block_size: int = 16,
) -> list[int]:
    """Up to max_tokens new token ids, an end-of-sequence id included if one is met.

    temperature 0 is greedy. Otherwise uniforms [max_tokens], numbers from [0, 1), decide the draws, so the result is
    a function of the arguments alone. With dynamic rope the prompt's length chooses the table, for good: keys in the
    cache are rotated already and cannot follow a later change.
    Raises ValueError for an empty prompt, an id outside the vocabulary, or weights that do not fit config.
    """
    if not prompt_ids:
        raise ValueError("prompt_ids is empty: give at least one token, such as the begin-of-text id")
    weights = select_weights(config, weights)
    cache = new_cache(config, len(prompt_ids) + max_tokens, block_size, weights["model.norm.weight"].dtype)
    inv_freq = rope_inv_freq(**asdict(config.rope), head_dim=config.head_dim, seq_len=len(prompt_ids))

    new_ids: list[int] = []
    pending, num_cached = np.array(prompt_ids, np.int64), 0  # tokens that are not in the cache yet, and how many are
    while len(new_ids) < max_tokens:
        logits = forward(config, weights, pending, num_cached, cache, inv_freq)[-1:]  # [1, vocab_size]
        if temperature == 0:
            next_id = int(greedy(logits)[0])
        else:
            uniform = uniforms[len(new_ids)]
            next_id = int(sample(logits, [temperature], [top_k], [top_p], [min_p], [uniform])[0])
        new_ids.append(next_id)
        if next_id in config.eos_token_ids and not ignore_eos:
            break
        num_cached += len(pending)
        pending = np.array([next_id], np.int64)
    return new_ids


def new_cache(config: LlamaConfig, num_tokens: int, block_size: int, dtype: np.dtype[Any]) -> dict[str, Array]:
    """Room for num_tokens: "k" and "v" [n_layers, num_blocks, block_size, n_kv_heads, head_dim], and "block_table".

    The table [1, num_blocks] runs backwards, for any order must do.
    """
    num_blocks = -(-num_tokens // block_size)
    shape = (config.n_layers, num_blocks, block_size, config.n_kv_heads, config.head_dim)
    block_table = np.arange(num_blocks)[None, ::-1]
    return {"k": np.zeros(shape, dtype), "v": np.zeros(shape, dtype), "block_table": block_table}


def forward(
    config: LlamaConfig,
    weights: Weights,
    token_ids: NDArray[np.int64],
    num_cached: int,
    cache: Mapping[str, Array],
    inv_freq: Array,
) -> Array:
    """Runs the next tokens of the sequence, adds them to the cache: [num_tokens] → [num_tokens, vocab_size].

    The same code does prefill (many tokens, nothing cached), a chunk of a prompt, and decode (one token).
    """
    num_tokens, head_dim, eps = len(token_ids), config.head_dim, config.rms_norm_eps
    positions = np.arange(num_cached, num_cached + num_tokens)
    cos_sin = rope_cos_sin(inv_freq, positions)
    slot_mapping = kv_cache_slots(cache["block_table"][0], positions, cache["k"].shape[2])
    cu_seqlens_q, seq_lens = np.array([0, num_tokens]), np.array([num_cached + num_tokens])

    def project(name: str, x: Array) -> Array:
        return linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    residual = embedding(token_ids, weights["model.embed_tokens.weight"])
    hidden = rmsnorm(residual, weights["model.layers.0.input_layernorm.weight"], eps)
    for layer in range(config.n_layers):
        attn, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        q, k, v = (
            project(f"{attn}.{p}", hidden).reshape(num_tokens, -1, head_dim) for p in ("q_proj", "k_proj", "v_proj")
        )
        k_cache, v_cache = cache["k"][layer], cache["v"][layer]
        q = rope_kv_write(q, k, v, cos_sin, slot_mapping, k_cache, v_cache)
        out = attention_prefill(
            q, k_cache, v_cache, cache["block_table"], cu_seqlens_q, seq_lens, head_dim**-0.5, config.sliding_window
        )
        attended = project(f"{attn}.o_proj", out.reshape(num_tokens, -1))
        post_norm = weights[f"model.layers.{layer}.post_attention_layernorm.weight"]
        hidden, residual = add_rmsnorm(attended, residual, post_norm, eps)
        gate_up = np.concatenate([project(f"{mlp}.gate_proj", hidden), project(f"{mlp}.up_proj", hidden)], axis=-1)
        mlp_out = project(f"{mlp}.down_proj", gate_up_act(gate_up))
        is_last = layer == config.n_layers - 1
        next_norm = "model.norm" if is_last else f"model.layers.{layer + 1}.input_layernorm"
        hidden, residual = add_rmsnorm(mlp_out, residual, weights[f"{next_norm}.weight"], eps)
    return project("model.embed_tokens" if config.tie_word_embeddings else "lm_head", hidden)
