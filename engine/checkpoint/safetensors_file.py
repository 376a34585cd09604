"""The .safetensors format, read strictly.

Eight bytes with the length of the header (little-endian), a header in JSON, then the data. The header maps a tensor's
name to {"dtype", "shape", "data_offsets": [begin, end]}, counted from the start of the data; the ranges must cover
the data without a gap, an overlap or a byte left over. Every length is checked against the size of the file before
it is used, so a hostile header costs neither memory nor time.
"""

from __future__ import annotations

import json
import math
import reprlib
from pathlib import Path
from typing import Any

from engine.checkpoint.stored_tensor import StoredTensor, regular_file_size
from engine.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000  # the cap of the format's own library
MAX_DIMENSIONS = 8  # keeps the product of a hostile shape small
LFS_POINTER = b"version https://git-lfs"
ITEM_BITS = {
    **{"BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64},
    **{"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8},
    **{"F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64},
}


def read_header(path: Path) -> dict[str, StoredTensor]:
    """All tensors of a file by name, in the order of their data.

    Raises:
        CheckpointError: the file cannot be read or breaks a rule of the format; names file and tensor.
    """
    text, data_start, data_bytes = _read_header_text(path)
    entries = _parse(path, text)
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__ must be an object of strings")
    tensors = [_tensor(path, name, entry, data_start, data_bytes) for name, entry in entries.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.num_bytes))
    position = data_start
    for tensor in tensors:
        if tensor.offset != position:
            kind = "overlap" if tensor.offset < position else "leave a hole"
            raise CheckpointError(
                f"{path}: the bytes before {tensor.name!r} {kind}: it begins at {tensor.offset - data_start}, "
                f"the tensor before it ends at {position - data_start}"
            )
        position += tensor.num_bytes
    if position != data_start + data_bytes:
        raise CheckpointError(
            f"{path}: has {data_start + data_bytes - position} bytes after the last tensor; fetch the file again"
        )
    return {tensor.name: tensor for tensor in tensors}


def _read_header_text(path: Path) -> tuple[bytes, int, int]:
    """The header's bytes, the offset of the data and its size."""
    try:
        size = regular_file_size(path)
        with open(path, "rb") as file:
            first = file.read(len(LFS_POINTER))
            if first == LFS_POINTER:
                raise CheckpointError(f"{path}: is a Git LFS pointer, not the file itself; run `git lfs pull`")
            if len(first) < 8:
                raise CheckpointError(f"{path}: has {size} bytes, too few for a safetensors file")
            length = int.from_bytes(first[:8], "little")
            if not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
                raise CheckpointError(
                    f"{path}: the header's length is {length}; expected 2 to {min(size - 8, MAX_HEADER_BYTES)} in a "
                    f"file of {size} bytes. The file is damaged or was cut short; fetch it again"
                )
            file.seek(8)
            return file.read(length), 8 + length, size - 8 - length
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for name, value in pairs:
            if name in result:
                raise ValueError(f"the name {name!r} stands there twice")
            result[name] = value
        return result

    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header cannot be read: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header must be a JSON object, found {type(header).__name__}")
    return header


def _tensor(path: Path, name: str, entry: Any, data_start: int, data_bytes: int) -> StoredTensor:
    where = f"{path}: tensor {name!r}"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise CheckpointError(f"{where} must have dtype, shape and data_offsets, found {reprlib.repr(entry)}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BITS:
        raise CheckpointError(f"{where} has the unknown dtype {dtype!r}; known are {', '.join(ITEM_BITS)}")
    if not _is_sizes(shape, MAX_DIMENSIONS):
        raise CheckpointError(
            f"{where}: shape must be a list of at most {MAX_DIMENSIONS} sizes, found {reprlib.repr(shape)}"
        )
    if not _is_sizes(offsets, 2) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= data_bytes:
        raise CheckpointError(
            f"{where}: data_offsets {reprlib.repr(offsets)} must be a begin and an end within the {data_bytes} bytes "
            "of data. The file is damaged or was cut short; fetch it again"
        )
    bits = math.prod(shape) * ITEM_BITS[dtype]
    num_bytes = offsets[1] - offsets[0]
    if bits != num_bytes * 8:
        raise CheckpointError(f"{where} has {num_bytes} bytes; {dtype} {shape} takes {-(-bits // 8)}")
    return StoredTensor(name, path, dtype, tuple(shape), data_start + offsets[0], num_bytes)


def _is_sizes(value: Any, most: int) -> bool:
    """Whether it is a list of at most so many sizes that a 64-bit integer can hold."""
    return (
        isinstance(value, list)
        and len(value) <= most
        and all(type(size) is int and 0 <= size < 2**63 for size in value)
    )
