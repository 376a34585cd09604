"""The GGUF format (versions 2 and 3, little-endian), read strictly and in one pass.

Magic "GGUF", version, number of tensors, number of metadata pairs; the pairs; the tensors' names, dimensions
(innermost first), types and offsets; padding to the alignment; the data. Strings and arrays carry their length first.
The `gguf` package has a reader too, but makes an array object of every vocabulary entry: seconds for the header of a
small model, where this takes a tenth of one. Lengths are checked against the size of the file before they are used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from engine.checkpoint.stored_tensor import BLOCK, BLOCK_BYTES, StoredTensor, regular_file_size
from engine.errors import CheckpointError

MAX_DIMENSIONS = 4
STRING, ARRAY = 8, 9
SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
TYPE_NAMES = {
    **{0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K"},
    **{12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S"},
    **{20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"},
    **{29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0"},
}
LAYOUTS = {  # weights in a block, bytes of a block; of the types that can be read
    **{"F32": (1, 4), "F16": (1, 2), "BF16": (1, 2)},
    **{name: (BLOCK, block_bytes) for name, block_bytes in BLOCK_BYTES.items()},
}


@dataclass(frozen=True, slots=True)
class GgufFile:
    """Metadata as plain Python values and the tensors under the file's own names, shapes outermost first.

    A tensor of a type that cannot be read has num_bytes 0; the loader refuses it by name if it is wanted.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]


def gguf_metadata(path: Path) -> dict[str, Any]:
    """The metadata of a GGUF file: strings, integers, floats, booleans and lists of them by key.

    Raises:
        CheckpointError: the file cannot be read or breaks the format.
    """
    return read_gguf(path).metadata


def read_gguf(path: Path) -> GgufFile:
    """Reads everything but the weights.

    Raises:
        CheckpointError: the file cannot be read, is cut short or breaks the format; names file and tensor.
    """
    try:
        size = regular_file_size(path)
        with open(path, "rb", buffering=1 << 20) as file:
            return _read(_Cursor(path, file, size))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error


class _Cursor:
    """Reads values one after the other and never past the end of the file."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self.path = path
        self.file = file
        self.size = size
        self.position = 0

    def error(self, text: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {text}")

    def take(self, num_bytes: int) -> bytes:
        if num_bytes > self.size - self.position:
            raise self.error(
                f"wants {num_bytes} bytes at {self.position} of {self.size}; the file is damaged or was cut short, "
                "fetch it again"
            )
        data = self.file.read(num_bytes)
        if len(data) != num_bytes:
            raise self.error("became shorter while it was read")
        self.position += num_bytes
        return data

    def u32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def u64(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def string(self) -> str:
        at = self.position
        data = self.take(self.u64())
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"the text at byte {at} is not UTF-8: {error}") from error

    def value(self, value_type: int, key: str) -> Any:
        if value_type == STRING:
            return self.string()
        if value_type != ARRAY:
            return self.scalars(value_type, 1, key)[0]
        item_type, count = self.u32(), self.u64()
        if item_type == STRING:
            if count > (self.size - self.position) // 8:
                raise self.error(f"{key} claims {count} texts, more than the file can hold")
            return [self.string() for _ in range(count)]
        return self.scalars(item_type, count, key)

    def scalars(self, value_type: int, count: int, key: str) -> list[Any]:
        if value_type not in SCALARS:
            raise self.error(f"{key} has a value of type {value_type}, which is unknown or nested")
        dtype = np.dtype(SCALARS[value_type])
        values: list[Any] = np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()
        return values


def _read(cursor: _Cursor) -> GgufFile:
    if cursor.take(4) != b"GGUF":
        raise cursor.error("is not a GGUF file (it does not begin with GGUF)")
    version = cursor.u32()
    if version not in (2, 3):
        what = "is big-endian" if version & 0xFFFF == 0 else f"has GGUF version {version}"
        raise cursor.error(f"{what}; versions 2 and 3 in little-endian can be read")
    num_tensors, num_pairs = cursor.u64(), cursor.u64()
    metadata: dict[str, Any] = {}
    for _ in range(num_pairs):
        key = cursor.string()
        if key in metadata:
            raise cursor.error(f"has the key {key!r} twice")
        metadata[key] = cursor.value(cursor.u32(), key)
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise cursor.error(f"general.alignment is {alignment!r}; it must be a power of two")
    listed: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(num_tensors):
        name = cursor.string()
        if name in listed:
            raise cursor.error(f"has the tensor {name!r} twice")
        listed[name] = _read_tensor_info(cursor, name)
    data_start = -(-cursor.position // alignment) * alignment
    tensors = {
        name: _stored(cursor, name, shape, type_id, data_start + offset)
        for name, (shape, type_id, offset) in listed.items()
    }
    return GgufFile(cursor.path, metadata, tensors)


def _read_tensor_info(cursor: _Cursor, name: str) -> tuple[tuple[int, ...], int, int]:
    """Shape (outermost first), type and offset from the start of the data."""
    num_dimensions = cursor.u32()
    if num_dimensions > MAX_DIMENSIONS:
        raise cursor.error(f"tensor {name!r} has {num_dimensions} dimensions; at most {MAX_DIMENSIONS} are allowed")
    dimensions = [cursor.u64() for _ in range(num_dimensions)]
    return tuple(reversed(dimensions)), cursor.u32(), cursor.u64()


def _stored(cursor: _Cursor, name: str, shape: tuple[int, ...], type_id: int, offset: int) -> StoredTensor:
    dtype = TYPE_NAMES.get(type_id, f"type {type_id}")
    if dtype not in LAYOUTS:
        return StoredTensor(name, cursor.path, dtype, shape, offset, 0)
    block, block_bytes = LAYOUTS[dtype]
    row = shape[-1] if shape else 1
    if row % block:
        raise cursor.error(f"tensor {name!r} has rows of {row}, no multiple of the {block} weights of {dtype}")
    num_bytes = math.prod(shape) // block * block_bytes
    if offset + num_bytes > cursor.size:
        raise cursor.error(
            f"tensor {name!r} ends at byte {offset + num_bytes} but the file has {cursor.size}; it was cut short, "
            "fetch it again"
        )
    return StoredTensor(name, cursor.path, dtype, shape, offset, num_bytes)
