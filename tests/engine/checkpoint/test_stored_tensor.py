"""engine.checkpoint.stored_tensor: bytes become float32 exactly."""

from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest

from engine.checkpoint import stored_tensor
from engine.checkpoint.stored_tensor import BLOCK_BYTES, DECODERS, StoredTensor, read_into


def read(path: Path, raw: bytes, dtype: str, shape: tuple[int, ...], offset: int = 0, heads: int = 0) -> np.ndarray:
    path.write_bytes(bytes(offset) + raw)
    out = np.full(shape, np.nan, np.float32)
    read_into(StoredTensor("t", path, dtype, shape, offset, len(raw), heads), out)
    return out


def every_half() -> np.ndarray:
    return np.arange(2**16, dtype=np.uint16)


def test_every_f16_and_bf16(tmp_path: Path):
    """All 65536 bit patterns, infinities and NaN too; never one type read as the other."""
    bits = every_half()
    f16 = read(tmp_path / "t", bits.tobytes(), "F16", (256, 256)).ravel()
    bf16 = read(tmp_path / "t", bits.tobytes(), "BF16", (256, 256)).ravel()
    np.testing.assert_array_equal(f16, bits.view(np.float16).astype(np.float32))
    np.testing.assert_array_equal(bf16, bits.view(ml_dtypes.bfloat16).astype(np.float32))


def test_f32_keeps_its_bits_at_any_offset(tmp_path: Path):
    values = np.array([1.5, -0.0, np.inf, 1e-45, 3e38, np.nan], np.float32)
    for offset in (0, 1, 4097):
        found = read(tmp_path / "t", values.tobytes(), "F32", (2, 3), offset)
        assert np.array_equal(found.ravel().view(np.uint32), values.view(np.uint32))


def half(value: float) -> bytes:
    return np.float16(value).tobytes()


def test_blocks_by_hand(tmp_path: Path):
    """d = 0.5, m = −3; weight j in the low half of byte j, weight j + 16 in the high half."""
    nibbles = bytes([0x10 * (15 - j) + j for j in range(16)])
    q = np.array([*range(16), *range(15, -1, -1)], np.float32)
    path = tmp_path / "t"
    np.testing.assert_array_equal(read(path, half(0.5) + nibbles, "Q4_0", (1, 32))[0], 0.5 * (q - 8))
    np.testing.assert_array_equal(read(path, half(0.5) + half(-3) + nibbles, "Q4_1", (1, 32))[0], 0.5 * q - 3)
    signed = np.arange(-128, 128, 8, dtype=np.int8)
    np.testing.assert_array_equal(read(path, half(0.5) + signed.tobytes(), "Q8_0", (1, 32))[0], 0.5 * signed)


@pytest.mark.parametrize("dtype", BLOCK_BYTES)
@pytest.mark.parametrize("num_blocks", [1, 3, stored_tensor.BLOCKS_AT_ONCE, stored_tensor.BLOCKS_AT_ONCE + 1])
def test_blocks_equal_those_of_the_gguf_package(tmp_path: Path, dtype: str, num_blocks: int):
    """Bit by bit, any bytes with finite scales, across the border of a piece."""
    blocks = np.random.default_rng(0).integers(0, 256, (num_blocks, BLOCK_BYTES[dtype]), np.uint8)
    blocks[:, 1] &= 0xBF  # takes the top bit of the exponent of d: below 2, so never infinite
    blocks[:, 3] &= 0xBF  # the same of m in Q4_1
    found = read(tmp_path / "t", blocks.tobytes(), dtype, (num_blocks, 32))
    wanted = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[dtype])
    assert np.array_equal(found.view(np.uint32), wanted.view(np.uint32))


def test_an_infinite_scale_is_passed_on_without_a_warning(tmp_path: Path):
    found = read(tmp_path / "t", half(np.inf) + bytes([0x98] * 16), "Q4_0", (1, 32))
    assert np.isnan(found[0, 0])  # infinity times 0
    assert found[0, 16] == np.inf


@pytest.mark.parametrize("dtype", DECODERS)
def test_empty_tensors(tmp_path: Path, dtype: str):
    assert read(tmp_path / "t", b"", dtype, (0, 32)).shape == (0, 32)


@pytest.mark.parametrize("dtype", ["F32", "Q8_0"])
def test_interleaved_rows_are_put_in_order(tmp_path: Path, dtype: str):
    """Two heads of six rows that lie in the order 0 3 1 4 2 5."""
    wanted = np.repeat(np.arange(12, dtype=np.float32)[:, None], 32, 1)
    stored = wanted[[0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]]
    raw = stored if dtype == "F32" else gguf.quants.quantize(stored * 127, gguf.GGMLQuantizationType.Q8_0)
    found = read(tmp_path / "t", raw.tobytes(), dtype, (12, 32), heads=2)
    np.testing.assert_array_equal(found if dtype == "F32" else found / 127, wanted)
