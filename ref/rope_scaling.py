"""Stretching the rotation for contexts longer than a model was first trained on: llama3, YaRN and LongRoPE.

All three turn fast pairs as before, for they tell neighbours apart, and slow ones more slowly, so that far positions
get angles that training has seen. They differ in where the line between fast and slow is drawn. YaRN and LongRoPE
also make scores larger, against a softmax that flattens over more keys: their attention factor multiplies cos and
sin of queries and keys, so scores grow by its square. It is applied once, in rope_cos_sin.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def llama3_inv_freq(
    inv_freq: Array, factor: float, low_freq_factor: float, high_freq_factor: float, length: int
) -> Array:
    """Divides slow pairs by factor, by how many full turns they make within the original context.

    With t = length · inv_freq / 2π turns: t > high_freq_factor stays, t < low_freq_factor is divided, and between
    inv_freq · ((1 − s) / factor + s) with s = (t − low) / (high − low).

    Args:
        inv_freq: [n]; unscaled.
        length: original_max_position_embeddings, in tokens.
    Returns:
        [n], dtype of inv_freq.

    Source: Grattafiori et al. 2024, "The Llama 3 Herd of Models", and the config keys of its checkpoints.
    """
    turns = length * inv_freq / (2 * math.pi)
    kept = np.clip((turns - low_freq_factor) / (high_freq_factor - low_freq_factor), 0, 1)
    scaled: Array = inv_freq * ((1 - kept) / factor + kept)
    return scaled


def yarn_inv_freq(
    inv_freq: Array,
    theta: float,
    factor: float,
    length: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
) -> Array:
    """Divides slow pairs by factor, with a straight line in the pair's number i between fast and slow.

    Pair i makes b turns in `length` tokens at i(b) = d · ln(length / (2π b)) / (2 ln theta), d = 2n. From
    low = i(beta_fast) down the list to high = i(beta_slow), s_i = clip((i − low) / (high − low), 0, 1) and the result
    is inv_freq_i · ((1 − s_i) + s_i / factor).

    Args:
        inv_freq: [n]; unscaled, of this theta.
        length: original_max_position_embeddings, in tokens.
        truncate: whether low is rounded down and high up to whole pairs first.
    Returns:
        [n], dtype of inv_freq.

    Source: Peng et al. 2023, "YaRN". The line in i, not in the number of turns, is what checkpoints were trained with.
    Edge cases: low is at least 0 and high at most d − 1 (so high may lie past the last pair). Where they meet the line
    becomes a step just behind low. Where high lies below 0, as no pair makes beta_slow turns, nothing is divided.
    """
    rotary_dim = 2 * len(inv_freq)
    low, high = (
        rotary_dim * math.log(length / (2 * math.pi * turns)) / (2 * math.log(theta))
        for turns in (beta_fast, beta_slow)
    )
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001
    slow = np.clip((np.arange(len(inv_freq)) - low) / (high - low), 0, 1)  # [n]: 0 fast, 1 slow
    scaled: Array = inv_freq * ((1 - slow) + slow / factor)
    return scaled


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """m(s) = 0.1 · s · ln(factor) + 1; 1 where factor ≤ 1, as nothing is stretched. Source: Peng et al. 2023."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def yarn_attention_factor(factor: float, mscale: float = 1.0, mscale_all_dim: float = 0.0) -> float:
    """What YaRN multiplies cos and sin by: m(mscale) / m(mscale_all_dim), with m of yarn_mscale.

    With neither key in the config, as in Qwen, that is 0.1 · ln(factor) + 1. DeepSeek sets both: what rotates is
    scaled by the quotient here, and all scores, also of the part that does not rotate, by m(mscale_all_dim)² in
    ref.mla.mla_sm_scale. An attention_factor in the config stands above this function.

    Edge cases: one key of the two alone is taken with the other's default, as in DeepSeek's code; transformers
    ignores it then.
    Source: Peng et al. 2023, "YaRN"; DeepSeek-AI 2024, "DeepSeek-V2" (mscale and mscale_all_dim of its config).
    """
    return yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)


def longrope_inv_freq(
    inv_freq: Array, short_factor: Sequence[float], long_factor: Sequence[float], length: int, seq_len: int
) -> Array:
    """Divides each pair by a number of its own, found by search: inv_freq_i / f_i.

    f is short_factor for sequences of up to `length` tokens, long_factor for longer ones. The choice is made once a
    sequence, since keys in the cache are rotated already and two tables must not meet in one softmax.

    Args:
        inv_freq: [n]; unscaled.
        short_factor, long_factor: n numbers each.
        length: original_max_position_embeddings, in tokens.
        seq_len: tokens of the sequence when the table is chosen.
    Returns:
        [n], dtype of inv_freq.
    Raises:
        ValueError: the list in use has another length than inv_freq.

    Source: Ding et al. 2024, "LongRoPE".
    """
    name, factors = ("long_factor", long_factor) if seq_len > length else ("short_factor", short_factor)
    if len(factors) != len(inv_freq):
        raise ValueError(
            f"{name} of longrope has {len(factors)} numbers; {len(inv_freq)} pairs rotate, one is for each"
        )
    scaled: Array = inv_freq / np.asarray(factors, inv_freq.dtype)
    return scaled


def longrope_attention_factor(max_position_embeddings: int, original_max_position_embeddings: int) -> float:
    """What LongRoPE multiplies cos and sin by, with both lists: sqrt(1 + ln(max / original) / ln(original)).

    An attention_factor in the config stands above it; a factor in the config takes the place of max / original.
    Edge cases: 1 where max ≤ original.
    Source: the code published with Phi-3 (Abdin et al. 2024, "Phi-3 Technical Report"), which took up "LongRoPE".
    """
    stretch = max_position_embeddings / original_max_position_embeddings
    return 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(original_max_position_embeddings))
