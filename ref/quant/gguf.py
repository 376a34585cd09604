"""Blocks of GGUF files to float32, and the order in which GGUF keeps the rows of q and k.

A row is cut into blocks of 32 values that share a float16 scale d (little-endian). Bytes of one block:

    Q8_0  34: d, then 32 × int8 q           value[j] = d · q[j]
    Q4_0  18: d, then 16 bytes of nibbles   value[j] = d · (n[j] − 8)
    Q4_1  20: d, float16 m, then 16 bytes   value[j] = d · n[j] + m

Nibbles are not in pairs of neighbours: byte j holds value j in its low half and value j + 16 in its high half.
Source: ggml's block_q8_0, block_q4_0, block_q4_1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]
Bytes = NDArray[np.uint8]

BLOCK_VALUES = 32
BLOCK_BYTES = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}


def dequantize(kind: str, blocks: Bytes) -> Float32:
    """[..., num_blocks · bytes of a block] uint8 → [..., num_blocks · 32] float32.

    Args:
        kind: "Q8_0", "Q4_0" or "Q4_1".
    Raises:
        ValueError: another kind, or a row that is no whole number of blocks.

    Numerics: the formula in float32, which holds d · q exactly (11 by 8 bits); Q4_1 rounds once, at the sum.
    """
    if kind not in BLOCK_BYTES:
        raise ValueError(f"GGUF type {kind!r} is not supported; known are {', '.join(BLOCK_BYTES)}")
    block_bytes = BLOCK_BYTES[kind]
    if blocks.shape[-1] % block_bytes:
        raise ValueError(f"a row of {blocks.shape[-1]} bytes is no whole number of {kind} blocks of {block_bytes}")
    rows = blocks.shape[:-1]
    per_block = np.ascontiguousarray(blocks).reshape(-1, block_bytes)
    formula: dict[str, Callable[[Bytes], Float32]] = {"Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1}
    num_values = blocks.shape[-1] // block_bytes * BLOCK_VALUES
    return formula[kind](per_block).reshape(*rows, num_values)


def _half(two_bytes: Bytes) -> Float32:
    """[num_blocks, 2] uint8 → [num_blocks, 1] float32, exact."""
    return np.ascontiguousarray(two_bytes).view("<f2").astype(np.float32)


def _nibbles(packed: Bytes) -> Float32:
    """[num_blocks, 16] uint8 → [num_blocks, 32] from 0 to 15: all low halves, then all high halves."""
    return np.concatenate([packed & 0x0F, packed >> 4], axis=1).astype(np.float32)


def _q8_0(blocks: Bytes) -> Float32:
    q = np.ascontiguousarray(blocks[:, 2:]).view(np.int8).astype(np.float32)
    return _half(blocks[:, :2]) * q


def _q4_0(blocks: Bytes) -> Float32:
    return _half(blocks[:, :2]) * (_nibbles(blocks[:, 2:]) - 8)


def _q4_1(blocks: Bytes) -> Float32:
    return _half(blocks[:, :2]) * _nibbles(blocks[:, 4:]) + _half(blocks[:, 2:4])


def unpermute_rope_rows(weight: NDArray[Any], n_heads: int) -> NDArray[Any]:
    """Rows of q_proj or k_proj from GGUF's order for Llama (interleaved rope) to Hugging Face's (half-split).

    Within a head, GGUF row 2i + h is Hugging Face row h · head_dim / 2 + i, with h 0 or 1: the two partners of a
    rotation, neighbours there, half a head apart here.

    Args:
        weight: [n_heads · head_dim, ...]; n_heads is n_kv_heads for k_proj. A bias [n_heads · head_dim] works too.
    Returns:
        the same shape.
    """
    head_dim = weight.shape[0] // n_heads
    pairs = weight.reshape(n_heads, head_dim // 2, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)
