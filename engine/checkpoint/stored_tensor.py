"""A tensor that lies in a file, and how its bytes become float32.

Safetensors and GGUF files share this: both give StoredTensors, and the loader needs no more. The block formats are
those of ggml: 32 weights along a row share a scale d (and an offset m), each a float16; w = d·q, d·(q − 8) or d·q + m.
The product is exact in float32 (11 bits by 8), so no weight is rounded save by the one addition of Q4_1.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import CheckpointError

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

BLOCK = 32  # weights that share a scale
PIECE_BYTES = 4 << 20
BLOCKS_AT_ONCE = 8192  # decoded together: 1 MiB of float32, which stays in a core's cache


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor is.

    dtype is the file's own name for it ("BF16", "Q4_1"). n_interleaved_heads is set where the rows of every head
    lie in the order 0, h, 1, h+1, … of its rotary pairs (h = half the head) and have to be put back in order.
    pitch is set where it is some columns of a larger tensor: bytes from the start of a row to that of the next.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    num_bytes: int
    n_interleaved_heads: int = 0
    pitch: int = 0

    def rows(self, rows: range) -> StoredTensor:
        """A part of the first axis; of whole heads where these are interleaved. Raises CheckpointError: see columns."""
        num_rows = self.shape[0] if self.shape else 0
        if rows == range(num_rows):
            return self
        if rows.stop > num_rows:
            raise CheckpointError(f"{self.file}: {self.name} is {list(self.shape)}, so it has no row {rows.stop - 1}")
        row_bytes = self.num_bytes // num_rows
        return replace(
            self,
            shape=(len(rows), *self.shape[1:]),
            offset=self.offset + rows.start * (self.pitch or row_bytes),
            num_bytes=len(rows) * row_bytes,
            n_interleaved_heads=self.n_interleaved_heads * len(rows) // num_rows,
        )

    def columns(self, columns: range) -> StoredTensor:
        """A part of the second of two axes; it begins and ends between blocks where weights lie in such.

        Raises:
            CheckpointError: there is no such part.
        """
        num_rows, num_columns = self.shape if len(self.shape) == 2 else (0, 0)
        if columns == range(num_columns):
            return self
        block = BLOCK if self.dtype in BLOCK_BYTES else 1
        if columns.stop > num_columns or columns.start % block or columns.stop % block:
            raise CheckpointError(
                f"{self.file}: {self.name} is {self.dtype} {list(self.shape)}; columns {columns.start} to "
                f"{columns.stop - 1} are no part of it"
                + f" of whole blocks of {block}; use a smaller --tensor-parallel-size"
                * (block > 1)
            )
        row_bytes = self.num_bytes // max(num_rows, 1)
        first, end = row_bytes * columns.start // num_columns, row_bytes * columns.stop // num_columns
        return replace(
            self,
            shape=(num_rows, len(columns)),
            offset=self.offset + first,
            num_bytes=num_rows * (end - first),
            pitch=self.pitch or row_bytes,
        )


def regular_file_size(path: Path) -> int:
    """Bytes in the file. Raises CheckpointError for a folder or a device, OSError if there is nothing."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(
            f"{path}: is {'a folder' if path.is_dir() else 'no regular file'}, expected a weight file"
        )
    return status.st_size


def read_into(tensor: StoredTensor, out: Floats) -> None:
    """Converts the tensor to float32; the file is mapped for the time of this call only.

    Args:
        tensor: its dtype is one of DECODERS.
        out: float32, C-contiguous, of the tensor's shape; overwritten.

    Raises:
        CheckpointError: the file is no longer what it was when its header was read.
    """
    raw = map_bytes(tensor)
    if tensor.n_interleaved_heads:
        raw = _in_rotary_order(raw, tensor)
    with np.errstate(over="ignore", invalid="ignore"):  # a weight may be infinite; the model's checks report it
        DECODERS[tensor.dtype](raw, out)


def map_bytes(tensor: StoredTensor) -> Bytes:
    """The tensor's bytes as they are in the file, end to end: mapped, or copied where they do not lie so.

    Raises:
        CheckpointError: the file has changed.
    """
    if not tensor.num_bytes:
        return np.empty(0, np.uint8)
    row_bytes = tensor.num_bytes // tensor.shape[0] if tensor.pitch else tensor.num_bytes
    span = tensor.pitch * (tensor.shape[0] - 1) + row_bytes if tensor.pitch else tensor.num_bytes
    try:
        found = np.memmap(tensor.file, np.uint8, "r", tensor.offset, (span,))
        if span == tensor.num_bytes:
            return found
        rows = np.lib.stride_tricks.as_strided(found, (tensor.shape[0], row_bytes), (tensor.pitch, 1), writeable=False)
        return np.array(rows).reshape(-1)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{tensor.file}: cannot read {tensor.name}, the file has changed since the start: {error}"
        ) from error


@contextmanager
def open_bytes(tensor: StoredTensor) -> Iterator[Callable[[Bytes, int], None]]:
    """A function that fills a buffer with the tensor's bytes from an offset on; several threads may call it at once.

    Raises:
        CheckpointError: the file has changed.
    """
    try:
        with open(tensor.file, "rb", buffering=0) as file:
            row_bytes = tensor.num_bytes // tensor.shape[0] if tensor.pitch else tensor.num_bytes

            def fill(part: Bytes, first: int) -> None:
                done = 0
                while done < part.size:
                    row, place = divmod(first + done, row_bytes)
                    size = min(part.size - done, row_bytes - place)
                    begin = tensor.offset + row * tensor.pitch + place
                    found = os.preadv(file.fileno(), [part[done : done + size].data], begin)
                    if not found:
                        raise OSError("it is shorter")
                    done += found

            yield fill
    except OSError as error:
        raise CheckpointError(
            f"{tensor.file}: cannot read {tensor.name}, the file has changed since the start: {error}"
        ) from error


def pieces(tensor: StoredTensor) -> Iterator[Bytes]:
    """Its bytes in order, PIECE_BYTES at a time, each until the next: in a core's cache, and no page is mapped.

    Raises:
        CheckpointError: the file has changed.
    """
    buffer = np.empty(min(PIECE_BYTES, tensor.num_bytes), np.uint8)
    with open_bytes(tensor) as fill:
        for first in range(0, tensor.num_bytes, PIECE_BYTES):
            part = buffer[: tensor.num_bytes - first]
            fill(part, first)
            yield part


def _in_rotary_order(raw: Bytes, tensor: StoredTensor) -> Bytes:
    """Rows of each head from (pair, half) to (half, pair) order; works on bytes, so for any format.

    llama.cpp's rope turns neighbouring rows 2i and 2i+1, that of Hugging Face rows i and i + head_dim/2.
    """
    n_pairs = tensor.shape[0] // tensor.n_interleaved_heads // 2
    return raw.reshape(tensor.n_interleaved_heads, n_pairs, 2, -1).swapaxes(1, 2).reshape(-1)


def _decode_f32(raw: Bytes, out: Floats) -> None:
    out[...] = raw.view("<f4").reshape(out.shape)


def _decode_f16(raw: Bytes, out: Floats) -> None:
    out[...] = raw.view("<f2").reshape(out.shape)


def _decode_bf16(raw: Bytes, out: Floats) -> None:
    bits = out.view(np.uint32)
    bits[...] = raw.view("<u2").reshape(out.shape)
    np.left_shift(bits, 16, out=bits)


def _decode_blocks(block_bytes: int, decode: Callable[[Bytes, Floats], None]) -> Callable[[Bytes, Floats], None]:
    def decode_all(raw: Bytes, out: Floats) -> None:
        blocks, weights = raw.reshape(-1, block_bytes), out.reshape(-1, BLOCK)
        for first in range(0, len(blocks), BLOCKS_AT_ONCE):
            decode(blocks[first : first + BLOCKS_AT_ONCE], weights[first : first + BLOCKS_AT_ONCE])

    return decode_all


def _half(blocks: Bytes, at: int) -> Floats:
    """The float16 at byte `at` of every block: [num_blocks, 1]."""
    return blocks[:, at : at + 2].view("<f2").astype(np.float32)


def _nibbles(packed: Bytes, weights: Floats) -> None:
    """Byte j holds weight j in its low half and weight j + 16 in its high half."""
    weights[:, :16] = packed & 15
    weights[:, 16:] = packed >> 4


def _q8_0(blocks: Bytes, weights: Floats) -> None:
    np.multiply(blocks[:, 2:].view(np.int8), _half(blocks, 0), out=weights)


def _q4_0(blocks: Bytes, weights: Floats) -> None:
    _nibbles(blocks[:, 2:], weights)
    weights -= 8
    weights *= _half(blocks, 0)


def _q4_1(blocks: Bytes, weights: Floats) -> None:
    _nibbles(blocks[:, 4:], weights)
    weights *= _half(blocks, 0)
    weights += _half(blocks, 2)


BLOCK_BYTES = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}
DECODERS: dict[str, Callable[[Bytes, Any], None]] = {
    "F32": _decode_f32,
    "F16": _decode_f16,
    "BF16": _decode_bf16,
    "Q8_0": _decode_blocks(BLOCK_BYTES["Q8_0"], _q8_0),
    "Q4_0": _decode_blocks(BLOCK_BYTES["Q4_0"], _q4_0),
    "Q4_1": _decode_blocks(BLOCK_BYTES["Q4_1"], _q4_1),
}
