"""ref.quant.gguf: blocks by hand and against the gguf package, and the order of rotary rows."""

import math
import struct

import gguf
import numpy as np
import pytest

from ref.quant.gguf import BLOCK_BYTES, dequantize, unpermute_rope_rows
from ref.rope import rope, rope_cos_sin


def block(*floats: float, data: bytes) -> np.ndarray:
    return np.frombuffer(struct.pack(f"<{len(floats)}e", *floats) + data, np.uint8)


def test_q8_0_by_hand() -> None:
    values = dequantize("Q8_0", block(0.5, data=bytes([1, 0xFF, 0x80, 127]) + bytes(28)))
    assert values.tolist() == [0.5, -0.5, -64.0, 63.5] + [0.0] * 28
    assert values.dtype == np.float32


def test_q4_0_by_hand() -> None:
    """Byte 0 is 0x2F: value 0 from the low half, 15 − 8 = 7; value 16 from the high half, 2 − 8 = −6."""
    values = dequantize("Q4_0", block(0.25, data=bytes([0x2F]) + bytes([0x88] * 15)))
    expected = np.zeros(32)
    expected[[0, 16]] = 1.75, -1.5
    assert values.tolist() == expected.tolist()


def test_q4_1_by_hand() -> None:
    values = dequantize("Q4_1", block(0.25, -1.0, data=bytes([0x2F]) + bytes(15)))
    expected = np.full(32, -1.0)
    expected[[0, 16]] = 2.75, -0.5
    assert values.tolist() == expected.tolist()


def test_q5_0_and_q5_1_by_hand() -> None:
    """Bits 0 and 31 are set: value 0 is 15 + 16, value 31 is 2 + 16."""
    data = bytes([1, 0, 0, 0x80, 0x0F, *[0] * 14, 0x20])
    expected = np.zeros(32)
    expected[[0, 31]] = 31, 18
    assert dequantize("Q5_0", block(0.5, data=data)).tolist() == (0.5 * (expected - 16)).tolist()
    assert dequantize("Q5_1", block(0.5, -1.0, data=data)).tolist() == (0.5 * expected - 1).tolist()


def test_q2_k_by_hand() -> None:
    """Part 0 has s = 3, t = 2; byte 0 of q is 0b11_10_01_00: values 0, 32, 64, 96 are 0, 1, 2, 3; d = 2, m = 0.5."""
    data = bytes([0x23] * 16) + bytes([0b11100100]) + bytes(63)
    values = dequantize("Q2_K", np.concatenate([np.frombuffer(data, np.uint8), block(2.0, 0.5, data=b"")]))
    expected = np.full(256, -1.0)
    expected[[32, 64, 96]] = 5, 11, 17
    assert values.tolist() == expected.tolist()


def test_q4_k_by_hand() -> None:
    """s = 1 for all but part 5 (48 + 2 = 50, its high bits in byte 1), t = 0; d = 1. Value 160 is 9."""
    scales = bytes([1, 1 | 3 << 6, 1, 1, 0, 0, 0, 0, 1, 2, 1, 1])
    nibbles = bytearray(128)
    nibbles[64] = 0x97  # the third run: value 128 is 7, value 160 is 9
    values = dequantize("Q4_K", block(1.0, 1.0, data=scales + bytes(nibbles)))
    expected = np.zeros(256)
    expected[[128, 160]] = 7, 450
    assert values.tolist() == expected.tolist()


SCALES_AT = {"Q2_K": 80, "Q3_K": 108, "Q6_K": 208}  # elsewhere at the start
NUM_SCALES = {"Q8_0": 1, "Q4_0": 1, "Q5_0": 1, "Q3_K": 1, "Q6_K": 1}  # elsewhere two


@pytest.mark.parametrize("kind", BLOCK_BYTES)
def test_the_gguf_package_agrees(kind: str) -> None:
    """Bit by bit, on random bytes; only the float16 numbers are chosen, for random ones could be NaN."""
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 256, (3, 5, BLOCK_BYTES[kind]), dtype=np.uint8)
    at, width = SCALES_AT.get(kind, 0), 2 * NUM_SCALES.get(kind, 2)
    rows[:, :, at : at + width] = rng.standard_normal((3, 5, width // 2)).astype("<f2").view(np.uint8)
    rows = rows.reshape(3, -1)
    expected = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind])
    assert dequantize(kind, rows).shape == (3, 5 * (256 if kind.endswith("_K") else 32))
    assert dequantize(kind, rows).dtype == np.float32
    np.testing.assert_array_equal(dequantize(kind, rows), expected)


def test_what_cannot_be_read_is_refused() -> None:
    with pytest.raises(ValueError, match="GGUF type 'IQ4_NL' is not supported; known are Q8_0, Q4_0, Q4_1"):
        dequantize("IQ4_NL", np.zeros(210, np.uint8))
    with pytest.raises(ValueError, match="35 bytes is no whole number of Q8_0 blocks of 34"):
        dequantize("Q8_0", np.zeros((2, 35), np.uint8))


def test_rows_of_one_head_by_hand() -> None:
    """GGUF keeps the partners of a rotation side by side: rows 0 and 1 are Hugging Face's 0 and 2."""
    weight = np.array([10.0, 11, 12, 13, 20, 21, 22, 23])[:, None]
    assert unpermute_rope_rows(weight, 2).ravel().tolist() == [10, 12, 11, 13, 20, 22, 21, 23]
    assert unpermute_rope_rows(weight.ravel(), 1).tolist() == [10, 12, 20, 22, 11, 13, 21, 23]


def test_interleaved_rope_before_is_half_split_rope_after() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 8))  # two heads of 8 elements in GGUF's order
    cos_sin = rope_cos_sin(np.array([1.0, 0.5, 0.25, 0.125]), np.array([3]))
    turned = np.empty_like(x)
    for i, angle in enumerate(3 * np.array([1.0, 0.5, 0.25, 0.125])):
        a, b = x[:, 2 * i], x[:, 2 * i + 1]
        turned[:, 2 * i] = a * math.cos(angle) - b * math.sin(angle)
        turned[:, 2 * i + 1] = b * math.cos(angle) + a * math.sin(angle)
    after = rope(unpermute_rope_rows(x.ravel(), 2).reshape(1, 2, 8), cos_sin)
    np.testing.assert_allclose(after.ravel(), unpermute_rope_rows(turned.ravel(), 2), rtol=1e-15, atol=1e-15)
