"""Cosines and sines of the rotary embedding, made on the host once a model or once a sequence.

The formulas are those of ref.rope, which conformance compares these tables with; angles are taken in float64.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from engine.config import RopeConfig

Float64 = NDArray[np.float64]


def inv_freq(rope: RopeConfig, head_dim: int, seq_len: int = 0) -> Float64:
    """Angle per position of each pair of dimensions, [head_dim/2] float64.

    seq_len matters for kind "dynamic" only, beyond the length where scaling begins (see RopeTable.rope_len).
    """
    theta = rope.theta
    if rope.kind == "dynamic" and seq_len > rope.original_max_position_embeddings:
        growth = rope.factor * seq_len / rope.original_max_position_embeddings - (rope.factor - 1.0)
        theta *= growth ** (head_dim / (head_dim - 2))
    freq: Float64 = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.kind == "linear":
        return freq / rope.factor
    if rope.kind == "llama3":
        return _llama3(freq, rope)
    return freq


def _llama3(freq: Float64, rope: RopeConfig) -> Float64:
    """Short wavelengths stay, long ones are stretched by factor, those between go over smoothly (Llama 3.1)."""
    wavelength = 2.0 * math.pi / freq
    turns = rope.original_max_position_embeddings / wavelength
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)  # 0: fully stretched, 1: unchanged
    return (1.0 - smooth) * freq / rope.factor + smooth * freq


class RopeTable:
    """cos_sin rows by position, and by the length that a sequence chose its table with."""

    def __init__(self, rope: RopeConfig, head_dim: int, max_model_len: int) -> None:
        self._rope = rope
        self._head_dim = head_dim
        self._inv_freq = inv_freq(rope, head_dim)
        self._table = self._cos_sin(np.arange(max_model_len), self._inv_freq)

    def rope_len(self, num_prompt: int) -> int:
        """The table of a sequence, chosen once by its prompt's length and kept through preemption; 0 = the usual."""
        scaled = self._rope.kind == "dynamic" and num_prompt > self._rope.original_max_position_embeddings
        return num_prompt if scaled else 0

    def rows(self, positions: NDArray[np.int32], token_rope_lens: NDArray[np.int32]) -> NDArray[np.float32]:
        """cos_sin [num_tokens, head_dim] float32, cosines in the first half, for positions [num_tokens]."""
        rows = self._table[positions]
        if token_rope_lens.any():
            for rope_len in np.unique(token_rope_lens[token_rope_lens > 0]).tolist():
                mine = token_rope_lens == rope_len
                rows[mine] = self._cos_sin(positions[mine], inv_freq(self._rope, self._head_dim, rope_len))
        return rows

    def _cos_sin(self, positions: NDArray[np.integer], freq: Float64) -> NDArray[np.float32]:
        angles = positions[:, None].astype(np.float64) * freq
        table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
        return (self._rope.attention_factor * table).astype(np.float32)
