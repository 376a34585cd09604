"""Rotary position embedding: a token's position as a rotation of its queries and keys.

Each head's vector is split into pairs; pair i turns by the angle position · inv_freq[i]. The dot product of a query
and a key then depends on the difference of their positions only. Source: Su et al. 2021, "RoFormer".

Pairing here is half-split (Hugging Face, NeoX): element i is paired with element i + rotary_dim / 2. The other
convention, interleaved, pairs 2i with 2i + 1; checkpoints differ by a permutation of rows (see ref/quant/gguf.py).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ref.kv_cache import kv_cache_write

Array = NDArray[Any]

ROPE_KINDS = ("default", "linear", "dynamic", "llama3")


def rope_inv_freq(
    kind: str,
    theta: float,
    head_dim: int,
    factor: float = 1.0,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
    original_max_position_embeddings: int = 0,
    seq_len: int = 0,
) -> NDArray[np.float64]:
    """Angle per position of each pair: inv_freq[i] = theta^(−2i / head_dim), changed by the kind of scaling.

    default: as above.
    linear:  inv_freq / factor, which is the same as dividing the positions.
    dynamic: for a sequence longer than L₀ = original_max_position_embeddings theta grows to
             theta · (factor · seq_len / L₀ − (factor − 1))^(d / (d − 2)); up to L₀ it is default.
    llama3:  by wavelength λ = 2π / inv_freq. Short waves (λ < L₀ / high_freq_factor) stay, long ones
             (λ > L₀ / low_freq_factor) are divided by factor; between, a straight line in L₀ / λ joins the two.

    Args:
        head_dim: d, even; the number of elements of a head that rotate.
        seq_len: the number of tokens that decides the table; used by dynamic only.
    Returns:
        [head_dim / 2] float64, largest first. transformers holds these in float32, so at position p angles differ
        by up to p · 6e-8.
    Raises:
        ValueError: a kind that is not known, by name.
    """
    if kind not in ROPE_KINDS:
        raise ValueError(f"rope kind {kind!r} is not supported; known are {', '.join(ROPE_KINDS)}")
    length = original_max_position_embeddings
    if kind == "dynamic" and seq_len > length:
        theta = theta * (factor * seq_len / length - (factor - 1)) ** (head_dim / (head_dim - 2))
    inv_freq = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if kind == "linear":
        return inv_freq / factor
    if kind == "llama3":
        return np.array([_llama3_scale(f, factor, low_freq_factor, high_freq_factor, length) for f in inv_freq])
    return inv_freq


def _llama3_scale(freq: float, factor: float, low: float, high: float, length: int) -> float:
    turns = length * freq / (2 * math.pi)  # full turns within the original context, L₀ / λ
    if turns > high:
        return freq
    if turns < low:
        return freq / factor
    kept = (turns - low) / (high - low)  # 0 at the low edge, 1 at the high one
    return (1 - kept) * freq / factor + kept * freq


def rope_cos_sin(inv_freq: Array, positions: NDArray[np.integer[Any]]) -> Array:
    """Rows of the rotation table for these positions.

    Args:
        inv_freq: [rotary_dim / 2].
        positions: [num_tokens], from 0.
    Returns:
        [num_tokens, rotary_dim]: the first half of a row is cos(position · inv_freq), the second half sin; dtype of
        inv_freq. Give float64 and round the result: in float32 the angle itself is off by position · 6e-8.
    """
    angles = positions.astype(inv_freq.dtype)[:, None] * inv_freq[None, :]  # [num_tokens, rotary_dim / 2]
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1)


def rope(x: Array, cos_sin: Array) -> Array:
    """Turns each half-split pair (a, b) into (a · cos − b · sin, b · cos + a · sin).

    Args:
        x: [num_tokens, n_heads, head_dim]; elements from rotary_dim on pass through unchanged.
        cos_sin: [num_tokens, rotary_dim], see rope_cos_sin.
    Returns:
        [num_tokens, n_heads, head_dim], dtype of x.

    Numerics: products and sums in x's dtype, one rounding at the end.
    Edge cases: position 0 changes nothing; no tokens gives no tokens.
    """
    rotary_dim = cos_sin.shape[1]
    half = rotary_dim // 2
    cos = cos_sin[:, None, :half].astype(x.dtype)  # [num_tokens, 1, half]: one angle for all heads
    sin = cos_sin[:, None, half:].astype(x.dtype)
    first, second = x[..., :half], x[..., half:rotary_dim]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, x[..., rotary_dim:]], axis=-1)


def rope_kv_write(
    q: Array, k: Array, v: Array, cos_sin: Array, slot_mapping: NDArray[np.integer[Any]], k_cache: Array, v_cache: Array
) -> Array:
    """Rotates q and k, stores the rotated k and v in the paged cache, and returns the rotated q.

    Three small steps that a GPU does in one launch. A cached key keeps the rotation of its own position for ever.

    Args:
        q: [num_tokens, n_heads, head_dim].
        k, v: [num_tokens, n_kv_heads, head_dim].
        cos_sin: [num_tokens, rotary_dim].
        slot_mapping: [num_tokens], −1 = store nothing (see kv_cache_write).
        k_cache, v_cache: [num_blocks, block_size, n_kv_heads, head_dim], changed in place.
    Returns:
        [num_tokens, n_heads, head_dim], dtype of q.
    """
    kv_cache_write(rope(k, cos_sin), v, slot_mapping, k_cache, v_cache)
    return rope(q, cos_sin)
