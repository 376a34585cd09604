"""Blocks of GGUF files to float32, and the order in which GGUF keeps the rows of q and k.

A row is cut into blocks of 32 values that share a float16 scale d (little-endian). Bytes of one block:

    Q8_0  34: d, then 32 × int8 q           value[j] = d · q[j]
    Q4_0  18: d, then 16 bytes of nibbles   value[j] = d · (n[j] − 8)
    Q4_1  20: d, float16 m, then 16 bytes   value[j] = d · n[j] + m
    Q5_0  22: d, 32 bits h, then 16 bytes   value[j] = d · (n[j] + 16 · h[j] − 16)
    Q5_1  24: d, m, h, then 16 bytes        value[j] = d · (n[j] + 16 · h[j]) + m

Nibbles are not in pairs of neighbours: byte j holds value j in its low half and value j + 16 in its high half. h[j] is
bit j of a little-endian uint32. The K types have blocks of 256 values, see ref/quant/gguf_k.py.
Source: ggml's block_q8_0, block_q4_0, block_q4_1, block_q5_0, block_q5_1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ref.quant.gguf_k import K_BLOCK_BYTES, K_VALUES, half, q2_k, q3_k, q4_k, q5_k, q6_k

Float32 = NDArray[np.float32]
Bytes = NDArray[np.uint8]

BLOCK_VALUES = 32
BLOCK_BYTES = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24} | K_BLOCK_BYTES


def dequantize(kind: str, blocks: Bytes) -> Float32:
    """[..., num_blocks · bytes of a block] uint8 → [..., num_blocks · 32] float32; 256 in place of 32 for the K types.

    Args:
        kind: "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K" or "Q6_K".
    Raises:
        ValueError: another kind, or a row that is no whole number of blocks.

    Numerics: the formula in float32, which holds d · q exactly (11 by 8 bits); Q4_1 and Q5_1 round once, at
    the sum; the K types keep d · s and m · t in float32 (exact: 11 by 6 or 8 bits), and round the product and the sum.
    """
    if kind not in BLOCK_BYTES:
        raise ValueError(f"GGUF type {kind!r} is not supported; known are {', '.join(BLOCK_BYTES)}")
    block_bytes = BLOCK_BYTES[kind]
    if blocks.shape[-1] % block_bytes:
        raise ValueError(f"a row of {blocks.shape[-1]} bytes is no whole number of {kind} blocks of {block_bytes}")
    rows = blocks.shape[:-1]
    per_block = np.ascontiguousarray(blocks).reshape(-1, block_bytes)
    num_values = blocks.shape[-1] // block_bytes * (K_VALUES if kind in K_BLOCK_BYTES else BLOCK_VALUES)
    return FORMULAS[kind](per_block).reshape(*rows, num_values)


def _nibbles(packed: Bytes) -> Float32:
    """[num_blocks, 16] uint8 → [num_blocks, 32] from 0 to 15: all low halves, then all high halves."""
    return np.concatenate([packed & 0x0F, packed >> 4], axis=1).astype(np.float32)


def _q8_0(blocks: Bytes) -> Float32:
    q = np.ascontiguousarray(blocks[:, 2:]).view(np.int8).astype(np.float32)
    return half(blocks[:, :2]) * q


def _q4_0(blocks: Bytes) -> Float32:
    return half(blocks[:, :2]) * (_nibbles(blocks[:, 2:]) - 8)


def _q4_1(blocks: Bytes) -> Float32:
    return half(blocks[:, :2]) * _nibbles(blocks[:, 4:]) + half(blocks[:, 2:4])


def _fifth_bits(four_bytes: Bytes) -> Float32:
    """[num_blocks, 4] uint8 → [num_blocks, 32], 0 or 16."""
    return np.unpackbits(four_bytes, axis=1, bitorder="little").astype(np.float32) * 16


def _q5_0(blocks: Bytes) -> Float32:
    return half(blocks[:, :2]) * (_nibbles(blocks[:, 6:]) + _fifth_bits(blocks[:, 2:6]) - 16)


def _q5_1(blocks: Bytes) -> Float32:
    return half(blocks[:, :2]) * (_nibbles(blocks[:, 8:]) + _fifth_bits(blocks[:, 4:8])) + half(blocks[:, 2:4])


FORMULAS: dict[str, Callable[[Bytes], Float32]] = {
    **{"Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1},
    **{"Q2_K": q2_k, "Q3_K": q3_k, "Q4_K": q4_k, "Q5_K": q5_k, "Q6_K": q6_k},
}


def unpermute_rope_rows(weight: NDArray[Any], n_heads: int) -> NDArray[Any]:
    """Rows of q_proj or k_proj from GGUF's order for Llama (interleaved rope) to Hugging Face's (half-split).

    Within a head, GGUF row 2i + h is Hugging Face row h · head_dim / 2 + i, with h 0 or 1: the two partners of a
    rotation, neighbours there, half a head apart here.

    Args:
        weight: [n_heads · head_dim, ...]; n_heads is n_kv_heads for k_proj. A bias [n_heads · head_dim] works too.
    Returns:
        the same shape and dtype.
    """
    head_dim = weight.shape[0] // n_heads
    pairs = weight.reshape(n_heads, head_dim // 2, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)
