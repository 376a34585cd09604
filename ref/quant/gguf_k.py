"""GGUF's K types: super-blocks of 256 values whose own scales are quantized as well.

A super-block has a float16 d (and for Q2_K, Q4_K, Q5_K a float16 m), and small integers s (and t) for each part of 16
or 32 values. Bytes of one, in order:

    Q2_K   84: 16 × (s low nibble, t high nibble), 64 of 2-bit q, d, m     value = d · s · q − m · t       parts of 16
    Q3_K  110: 32 of high bits, 64 of 2-bit q, 12 of 6-bit s, d            value = d · (s − 32) · (q − 4)  parts of 16
    Q4_K  144: d, m, 12 of 6-bit s and t, 128 of nibbles                   value = d · s · q − m · t       parts of 32
    Q5_K  176: d, m, 12 of 6-bit s and t, 32 of high bits, 128 of nibbles  value = d · s · q − m · t       parts of 32
    Q6_K  210: 128 of nibbles, 64 of 2 high bits, 16 × int8 s, d           value = d · s · (q − 32)        parts of 16

Bits of q are laid out in planes: a run of bytes holds the lowest bits of as many neighbouring values, the next bits of
the values that follow, and so on; `_planes` reads them. Source: ggml's block_q2_K to block_q6_K.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]
Bytes = NDArray[np.uint8]

K_VALUES = 256
K_BLOCK_BYTES = {"Q2_K": 84, "Q3_K": 110, "Q4_K": 144, "Q5_K": 176, "Q6_K": 210}


def half(two_bytes: Bytes) -> Float32:
    """[num_blocks, 2] uint8 → [num_blocks, 1] float32, exact."""
    return np.ascontiguousarray(two_bytes).view("<f2").astype(np.float32)


def _planes(packed: Bytes, bits: int, run: int) -> Bytes:
    """[num_blocks, n] → [num_blocks, n · 8 / bits]: of each run of bytes first all lowest bits, then the next ones."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    values = (packed.reshape(len(packed), -1, 1, run) >> shifts) & np.uint8(2**bits - 1)
    return values.reshape(len(packed), -1)


def _scaled(
    scale: Float32, q: NDArray[np.signedinteger | np.unsignedinteger], offset: Float32 | None = None
) -> Float32:
    """scale · q − offset, with scale and offset [num_blocks, parts] and q [num_blocks, 256]."""
    parts = q.reshape(len(q), scale.shape[1], -1).astype(np.float32)
    values = scale[:, :, None] * parts
    if offset is not None:
        values = values - offset[:, :, None]
    return values.reshape(len(q), -1)


def _six_bit_pairs(packed: Bytes) -> tuple[Float32, Float32]:
    """12 bytes → eight s and eight t of 6 bits, [num_blocks, 8] each.

    Bytes 0–3 hold s[0:4] and bytes 4–7 t[0:4] in their low six bits; bytes 8–11 hold the low nibbles of s[4:8] and,
    above them, of t[4:8], whose two high bits are at the top of bytes 0–3 and 4–7.
    """
    a, b, c = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    s = np.concatenate([a & 63, (c & 15) | (a >> 6 << 4)], axis=1)
    t = np.concatenate([b & 63, (c >> 4) | (b >> 6 << 4)], axis=1)
    return s.astype(np.float32), t.astype(np.float32)


def q2_k(blocks: Bytes) -> Float32:
    """[num_blocks, 84] uint8 → [num_blocks, 256] float32."""
    parts, d, m = blocks[:, :16], half(blocks[:, 80:82]), half(blocks[:, 82:84])
    s, t = (parts & 15).astype(np.float32), (parts >> 4).astype(np.float32)
    return _scaled(d * s, _planes(blocks[:, 16:80], 2, 32), m * t)


def q3_k(blocks: Bytes) -> Float32:
    """[num_blocks, 110] uint8 → [num_blocks, 256] float32.

    The high bit is stored the other way round: q = low bits + 4 · high bit, less 4. Scale i has its low nibble in byte
    i mod 8 (high half for i ≥ 8), its two high bits in byte 8 + i mod 4.
    """
    high, low, packed, d = blocks[:, :32], blocks[:, 32:96], blocks[:, 96:108], half(blocks[:, 108:110])
    q = (_planes(low, 2, 32) | _planes(high, 1, 32) << 2).astype(np.int8) - 4
    s = _planes(packed[:, :8], 4, 8) | _planes(packed[:, 8:], 2, 4) << 4
    return _scaled(d * (s.astype(np.float32) - 32), q)


def q4_k(blocks: Bytes) -> Float32:
    """[num_blocks, 144] uint8 → [num_blocks, 256] float32."""
    d, m = half(blocks[:, :2]), half(blocks[:, 2:4])
    s, t = _six_bit_pairs(blocks[:, 4:16])
    return _scaled(d * s, _planes(blocks[:, 16:], 4, 32), m * t)


def q5_k(blocks: Bytes) -> Float32:
    """[num_blocks, 176] uint8 → [num_blocks, 256] float32."""
    d, m = half(blocks[:, :2]), half(blocks[:, 2:4])
    s, t = _six_bit_pairs(blocks[:, 4:16])
    return _scaled(d * s, _planes(blocks[:, 48:], 4, 32) | _planes(blocks[:, 16:48], 1, 32) << 4, m * t)


def q6_k(blocks: Bytes) -> Float32:
    """[num_blocks, 210] uint8 → [num_blocks, 256] float32."""
    low, high, d = blocks[:, :128], blocks[:, 128:192], half(blocks[:, 208:210])
    q = (_planes(low, 4, 64) | _planes(high, 2, 32) << 4).astype(np.int8) - 32
    s = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    return _scaled(d * s, q)
