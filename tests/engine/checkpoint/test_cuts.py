"""engine.checkpoint.stored_tensor: parts of tensors are what slices of the whole are, and no other bytes are read."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.checkpoint.stored_tensor import BLOCK_BYTES, StoredTensor, map_bytes, open_bytes, read_into
from engine.errors import CheckpointError

OFFSET = 7


def tensor(folder: Path, dtype: str, shape: tuple[int, int], raw: bytes, heads: int = 0) -> StoredTensor:
    path = folder / "t"
    path.write_bytes(b"\xff" * OFFSET + raw + b"\xff" * 5)
    return StoredTensor("t", path, dtype, shape, OFFSET, len(raw), heads)


def numbers(part: StoredTensor) -> np.ndarray:
    out = np.full(part.shape, np.nan, np.float32)
    read_into(part, out)
    return out


@st.composite
def parts(draw: st.DrawFn, size: int, unit: int = 1) -> range:
    start = draw(st.integers(0, size // unit - 1))
    return range(unit * start, unit * draw(st.integers(start + 1, size // unit)))


@given(parts(6), parts(10), st.booleans())
def test_a_part_is_the_slice(
    tmp_path_factory: pytest.TempPathFactory, rows: range, columns: range, turned: bool
) -> None:
    values = np.arange(60, dtype=np.float32).reshape(6, 10)
    whole = tensor(tmp_path_factory.mktemp("t"), "F32", (6, 10), values.tobytes())
    part = whole.columns(columns).rows(rows) if turned else whole.rows(rows).columns(columns)
    expected = values[rows.start : rows.stop, columns.start : columns.stop]
    assert part.num_bytes == expected.nbytes
    np.testing.assert_array_equal(numbers(part), expected)
    assert map_bytes(part).tobytes() == expected.tobytes()
    with open_bytes(part) as fill:
        for first in range(0, part.num_bytes, 13):  # pieces that end within rows
            piece = np.zeros(min(13, part.num_bytes - first), np.uint8)
            fill(piece, first)
            assert piece.tobytes() == expected.tobytes()[first : first + 13]


@pytest.mark.parametrize("dtype", BLOCK_BYTES)
def test_blocks_are_cut_between(tmp_path: Path, dtype: str) -> None:
    raw = np.random.default_rng(0).integers(0, 64, 6 * 4 * BLOCK_BYTES[dtype], np.uint8).tobytes()
    whole = tensor(tmp_path, dtype, (6, 128), raw)
    expected = numbers(whole)
    np.testing.assert_array_equal(numbers(whole.rows(range(2, 5)).columns(range(32, 96))), expected[2:5, 32:96])
    for columns in (range(0, 16), range(8, 32)):
        with pytest.raises(CheckpointError, match=f"{dtype}.*no part of it of whole blocks of 32"):
            whole.columns(columns)


def test_interleaved_heads_are_cut_between(tmp_path: Path) -> None:
    values = np.arange(48, dtype=np.float32).reshape(12, 4)
    whole = tensor(tmp_path, "F32", (12, 4), values.tobytes(), heads=3)
    np.testing.assert_array_equal(numbers(whole.rows(range(4, 12))), numbers(whole)[4:])
    np.testing.assert_array_equal(numbers(whole.rows(range(4, 8)).columns(range(1, 3))), numbers(whole)[4:8, 1:3])


def test_what_a_tensor_has_not_is_refused(tmp_path: Path) -> None:
    whole = tensor(tmp_path, "F32", (6, 10), bytes(240))
    with pytest.raises(CheckpointError, match=r"t is \[6, 10\], so it has no row 6"):
        whole.rows(range(3, 7))
    with pytest.raises(CheckpointError, match=r"columns 5 to 10 are no part"):
        whole.columns(range(5, 11))
    with pytest.raises(CheckpointError, match="are no part"):
        replace(whole, shape=(60,)).columns(range(0, 5))


def test_a_part_of_a_file_that_was_cut_short(tmp_path: Path) -> None:
    part = tensor(tmp_path, "F32", (6, 10), bytes(240)).columns(range(5, 10))
    part.file.write_bytes(bytes(200))
    with pytest.raises(CheckpointError, match="has changed since the start"):
        map_bytes(part)
    with pytest.raises(CheckpointError, match="has changed since the start"), open_bytes(part) as fill:
        fill(np.zeros(part.num_bytes, np.uint8), 0)
