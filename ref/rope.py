"""Rotary position embedding: a token's position as a rotation of its queries and keys.

Each head's vector is split into pairs; pair i turns by the angle position · inv_freq[i]. The dot product of a query
and a key then depends on the difference of their positions only. Source: Su et al. 2021, "RoFormer".

There are two ways to pair. Half-split (Hugging Face, NeoX) pairs element i with element i + rotary_dim / 2;
interleaved (Command-R, GPT-J, DeepSeek) pairs 2i with 2i + 1. Checkpoints differ by a permutation of rows (see
ref/quant/gguf.py), and scores do not differ at all as long as queries and keys are paired alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ref.kv_cache import kv_cache_write
from ref.numerics import round_to
from ref.rmsnorm import qk_norm
from ref.rope_scaling import llama3_inv_freq, longrope_inv_freq, yarn_inv_freq

Array = NDArray[Any]

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


def rope_inv_freq(
    kind: str,
    theta: float,
    head_dim: int,
    factor: float = 1.0,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
    original_max_position_embeddings: int = 0,
    seq_len: int = 0,
    *,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
    short_factor: Sequence[float] = (),
    long_factor: Sequence[float] = (),
) -> NDArray[np.float64]:
    """Angle per position of each pair: inv_freq[i] = theta^(−2i / head_dim), changed by the kind of scaling.

    default:  as above.
    linear:   inv_freq / factor, which is the same as dividing the positions.
    dynamic:  for a sequence longer than L₀ = original_max_position_embeddings theta grows to
              theta · (factor · seq_len / L₀ − (factor − 1))^(d / (d − 2)); up to L₀ it is default.
    llama3, yarn, longrope: llama3_inv_freq, yarn_inv_freq and longrope_inv_freq of ref/rope_scaling.py; the last two
              also have an attention factor, for rope_cos_sin.

    dynamic and longrope depend on seq_len. A sequence keeps the table that it began with.

    Args:
        head_dim: d, even; the number of elements of a head that rotate, rotary_dim where it is less than the head.
        seq_len: the number of tokens that decides the table; used by dynamic and longrope only.
    Returns:
        [head_dim / 2] float64, largest first. transformers holds these in float32, so at position p angles differ
        by up to p · 6e-8.
    Raises:
        ValueError: a kind that is not known, by name, mrope with its three positions a token among them; an odd
            head_dim; no original_max_position_embeddings where the kind needs it.
    """
    if kind not in ROPE_KINDS:
        raise ValueError(f"rope kind {kind!r} is not supported; known are {', '.join(ROPE_KINDS)}")
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"{head_dim} elements of a head cannot rotate in pairs; the number must be even and positive")
    length = original_max_position_embeddings
    if kind not in ("default", "linear") and length < 1:
        raise ValueError(f"rope kind {kind!r} needs original_max_position_embeddings, found {length}")
    if kind == "dynamic" and seq_len > length:
        theta = theta * (factor * seq_len / length - (factor - 1)) ** (head_dim / (head_dim - 2))
    inv_freq = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if kind == "linear":
        return inv_freq / factor
    if kind == "llama3":
        return llama3_inv_freq(inv_freq, factor, low_freq_factor, high_freq_factor, length)
    if kind == "yarn":
        return yarn_inv_freq(inv_freq, theta, factor, length, beta_fast, beta_slow, truncate)
    if kind == "longrope":
        return longrope_inv_freq(inv_freq, short_factor, long_factor, length, seq_len)
    return inv_freq


def rope_cos_sin(inv_freq: Array, positions: NDArray[np.integer[Any]], attention_factor: float = 1.0) -> Array:
    """Rows of the rotation table for these positions.

    Args:
        inv_freq: [rotary_dim / 2].
        positions: [num_tokens], from 0.
        attention_factor: multiplies cos and sin alike; 1 but for yarn and longrope.
    Returns:
        [num_tokens, rotary_dim]: the first half of a row is cos(position · inv_freq), the second half sin; dtype of
        inv_freq. Give float64 and round the result: in float32 the angle itself is off by position · 6e-8.
    """
    angles = positions.astype(inv_freq.dtype)[:, None] * inv_freq[None, :]  # [num_tokens, rotary_dim / 2]
    table: Array = np.concatenate([np.cos(angles), np.sin(angles)], axis=1) * inv_freq.dtype.type(attention_factor)
    return table


def rope(x: Array, cos_sin: Array, *, interleaved: bool = False) -> Array:
    """Turns each pair (a, b) into (a · cos − b · sin, b · cos + a · sin), in its place.

    Args:
        x: [num_tokens, n_heads, head_dim]; elements from rotary_dim on pass through unchanged.
        cos_sin: [num_tokens, rotary_dim], see rope_cos_sin.
        interleaved: pair i is elements 2i and 2i + 1; if not, i and i + rotary_dim / 2.
    Returns:
        [num_tokens, n_heads, head_dim], dtype of x.

    Numerics: products and sums in x's dtype, one rounding at the end.
    Edge cases: position 0 changes nothing; no tokens gives no tokens.
    """
    rotary_dim = cos_sin.shape[1]
    half = rotary_dim // 2
    cos = cos_sin[:, None, :half].astype(x.dtype)  # [num_tokens, 1, half]: one angle for all heads
    sin = cos_sin[:, None, half:].astype(x.dtype)
    firsts, seconds = slice(0, half), slice(half, rotary_dim)
    if interleaved:
        firsts, seconds = slice(0, rotary_dim, 2), slice(1, rotary_dim, 2)
    a, b = x[..., firsts], x[..., seconds]
    out = x.copy()
    out[..., firsts], out[..., seconds] = a * cos - b * sin, b * cos + a * sin
    return out


def rope_kv_write(
    q: Array,
    k: Array,
    v: Array,
    cos_sin: Array,
    slot_mapping: NDArray[np.integer[Any]],
    k_cache: Array,
    v_cache: Array,
    *,
    interleaved: bool = False,
) -> Array:
    """Rotates q and k, stores the rotated k and v in the paged cache, and returns the rotated q.

    Composed of: rope, kv_cache_write.

    Three small steps that a GPU does in one launch. A cached key keeps the rotation of its own position for ever.

    Args:
        q: [num_tokens, n_heads, head_dim].
        k, v: [num_tokens, n_kv_heads, head_dim].
        cos_sin: [num_tokens, rotary_dim].
        slot_mapping: [num_tokens], −1 = store nothing (see kv_cache_write).
        k_cache, v_cache: [num_blocks, block_size, n_kv_heads, head_dim], changed in place.
        interleaved: as in rope.
    Returns:
        [num_tokens, n_heads, head_dim], dtype of q.
    Raises:
        IndexError: see kv_cache_write.
    """
    kv_cache_write(rope(k, cos_sin, interleaved=interleaved), v, slot_mapping, k_cache, v_cache)
    return rope(q, cos_sin, interleaved=interleaved)


def qk_norm_rope_kv_write(
    q: Array,
    k: Array,
    v: Array,
    q_weight: Array,
    k_weight: Array,
    eps: float,
    cos_sin: Array,
    slot_mapping: NDArray[np.integer[Any]],
    k_cache: Array,
    v_cache: Array,
    *,
    interleaved: bool = False,
    storage: str | None = None,
) -> Array:
    """qk_norm, then rope_kv_write: all that Qwen3 does between the projections and attention, in one launch.

    Composed of: qk_norm, rope, kv_cache_write.

    Args:
        q_weight, k_weight: [head_dim], see ref.rmsnorm.qk_norm.
        the others: as in rope_kv_write.
    Returns:
        [num_tokens, n_heads, head_dim], dtype of q.
    Raises:
        IndexError: see kv_cache_write.

    Numerics: the normed vectors are not rounded before they turn; what is returned and cached is, to `storage`.
    """
    q, k = qk_norm(q, k, q_weight, k_weight, eps)
    k, v = (round_to(x, storage) for x in (rope(k, cos_sin, interleaved=interleaved), v))
    kv_cache_write(k, v, slot_mapping, k_cache, v_cache)
    return round_to(rope(q, cos_sin, interleaved=interleaved), storage)
