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

    seq_len matters for the kinds "dynamic", "ntk_alpha" and "longrope" only, beyond the original length (see
    RopeTable.rope_len).
    """
    theta = rope.theta
    if rope.kind == "ntk_alpha" and seq_len > rope.original_max_position_embeddings:  # ref.model.qwen1.ntk_alpha
        alpha = 2.0 ** (_doublings(rope, seq_len) + 1) - 1.0
        theta *= alpha ** (head_dim / (head_dim - 2))
    if rope.kind == "dynamic" and seq_len > rope.original_max_position_embeddings:
        growth = rope.factor * seq_len / rope.original_max_position_embeddings - (rope.factor - 1.0)
        theta *= growth ** (head_dim / (head_dim - 2))
    freq: Float64 = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.kind == "linear":
        return freq / rope.factor
    if rope.kind == "llama3":
        return _llama3(freq, rope)
    if rope.kind == "yarn":
        return _yarn(freq, rope)
    if rope.kind == "longrope":
        is_long = seq_len > rope.original_max_position_embeddings
        factors = np.array(rope.long_factor if is_long else rope.short_factor, np.float64)
        return freq / factors
    return freq


def _doublings(rope: RopeConfig, seq_len: int) -> int:
    """How often the original length must be doubled until it holds seq_len tokens."""
    return math.ceil(math.log2(seq_len / rope.original_max_position_embeddings))


def _llama3(freq: Float64, rope: RopeConfig) -> Float64:
    """Short wavelengths stay, long ones are stretched by factor, those between go over smoothly (Llama 3.1)."""
    wavelength = 2.0 * math.pi / freq
    turns = rope.original_max_position_embeddings / wavelength
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)  # 0: fully stretched, 1: unchanged
    return (1.0 - smooth) * freq / rope.factor + smooth * freq


def _yarn(freq: Float64, rope: RopeConfig) -> Float64:
    """Fast pairs stay, slow ones are stretched by factor, with a line in the pair's number between (Peng et al. 2023).

    A pair makes more than beta_fast turns within the original length if it is fast, fewer than beta_slow if slow.
    """
    pairs_per_log = len(freq) / math.log(rope.theta)
    length = rope.original_max_position_embeddings / (2.0 * math.pi)
    low = pairs_per_log * math.log(length / rope.beta_fast)
    high = pairs_per_log * math.log(length / rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0.0), min(high, 2.0 * len(freq) - 1.0)
    width = high - low or 0.001
    slow = np.clip((np.arange(len(freq)) - low) / width, 0.0, 1.0)
    scaled: Float64 = freq * (1.0 - slow) + freq / rope.factor * slow
    return scaled


class RopeTable:
    """cos_sin rows by position, and by the length that a sequence chose its table with.

    table [max_model_len, head_dim] float32 has the rows of rope_len 0.
    """

    def __init__(self, rope: RopeConfig, head_dim: int, max_model_len: int) -> None:
        self._rope = rope
        self._head_dim = head_dim
        self._inv_freq = inv_freq(rope, head_dim)
        self.table = self._cos_sin(np.arange(max_model_len), self._inv_freq)

    def rope_len(self, num_prompt: int) -> int:
        """The table of a sequence, chosen once by its prompt's length and kept through preemption; 0 = the usual.

        Prompts with the same number may share cached keys, so all that use longrope's long list have the same, and
        with ntk_alpha all that need as many doublings.
        """
        original = self._rope.original_max_position_embeddings
        if num_prompt <= original:
            return 0
        if self._rope.kind == "ntk_alpha":
            return original << _doublings(self._rope, num_prompt)
        return {"dynamic": num_prompt, "longrope": original + 1}.get(self._rope.kind, 0)

    def rows(self, positions: NDArray[np.int32], token_rope_lens: NDArray[np.int32]) -> NDArray[np.float32]:
        """cos_sin [num_tokens, head_dim] float32, cosines in the first half, for positions [num_tokens]."""
        rows = self.table[positions]
        if token_rope_lens.any():
            for rope_len in np.unique(token_rope_lens[token_rope_lens > 0]).tolist():
                mine = token_rope_lens == rope_len
                rows[mine] = self._cos_sin(positions[mine], inv_freq(self._rope, self._head_dim, rope_len))
        return rows

    def _cos_sin(self, positions: NDArray[np.integer], freq: Float64) -> NDArray[np.float32]:
        angles = positions[:, None].astype(np.float64) * freq
        table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
        return (self._rope.attention_factor * table).astype(np.float32)
