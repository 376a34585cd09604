"""Reads .safetensors files with nothing but JSON and a memory map.

A file is: 8 bytes, the header's length N (little-endian); N bytes of JSON, name → {dtype, shape, data_offsets};
then the tensors' bytes, to which data_offsets [begin, end) refer. A big checkpoint is cut into several files with
model.safetensors.index.json, whose weight_map says which file holds which tensor.

A tensor as stored is a view of the map: nothing of it is in memory before it is looked at, and the system may take it
out again. So a model may be larger than the memory (ref/quant/stored.py).
Source: the description of the format in the safetensors project.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ref.numerics import bf16_to_float32

Array = NDArray[Any]

BF16 = np.dtype([("bf16", "<u2")])  # 16 bits that carry their meaning with them: NumPy has no such number
STORED: dict[str, DTypeLike] = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": BF16}
QUANTIZED: dict[str, DTypeLike] = {"F8_E4M3": "u1", "I8": "i1", "I32": "<i4", "I64": "<i8"}
MAX_HEADER_BYTES = 100_000_000


def is_float(tensor: Array) -> bool:
    """Whether a tensor, [...], holds floating point, BF16 too, rather than codes or integers."""
    return tensor.dtype == BF16 or bool(np.issubdtype(tensor.dtype, np.floating))


def widen(tensor: Array, dtype: DTypeLike | None = None) -> Array:
    """The tensor in dtype, shape as tensor; exact from the 16-bit types.

    Args:
        tensor: any shape, as stored.
        dtype: None: BF16 as float32, anything else as it is.

    Edge cases: a tensor of this dtype is returned itself, not a copy.
    """
    values = bf16_to_float32(tensor["bf16"]) if tensor.dtype == BF16 else tensor
    return values if dtype is None else values.astype(dtype, copy=False)


def read_checkpoint(folder: str | Path, dtype: DTypeLike | None = np.float32) -> dict[str, Array]:
    """All tensors of a folder by name, each converted to dtype (exact from bfloat16 and float16).

    Args:
        dtype: a floating type, or None: as stored, unread views of the files. Then integers are taken too, codes of
            e4m3 as uint8 (see ref/quant/fp8.py), and bfloat16 as BF16, for `widen`.
    Raises:
        FileNotFoundError: neither model.safetensors nor an index, or a file that the index names is missing.
        ValueError: a damaged file, a tensor of another type, or an index that points outside the folder.
    """
    folder = Path(folder)
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        single = folder / "model.safetensors"
        if not single.exists():
            raise FileNotFoundError(f"{folder} holds neither model.safetensors nor model.safetensors.index.json")
        return read_safetensors(single, dtype)
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is no valid index with a weight_map: {error!r}") from None
    tensors: dict[str, Array] = {}
    for file in files:
        if not isinstance(file, str) or Path(file).name != file or file in ("", ".", ".."):
            raise ValueError(f"{index} names the file {file!r}; only files beside the index are read")
        held = read_safetensors(folder / file, dtype)
        for name in (name for name, place in weight_map.items() if place == file):
            if name not in held:
                raise ValueError(f"{index} says that {file} holds the tensor {name}, but it does not")
            tensors[name] = held[name]
    return tensors


def read_safetensors(path: str | Path, dtype: DTypeLike | None = np.float32) -> dict[str, Array]:
    """All tensors of one file by name, as in read_checkpoint. Raises FileNotFoundError and ValueError as that."""
    path = Path(path)
    size = path.stat().st_size
    if size < 8:
        raise ValueError(f"{path} is damaged: {size} bytes are too few for a safetensors file")
    raw = np.memmap(path, np.uint8, mode="r")
    header_bytes = int.from_bytes(raw[:8].tobytes(), "little")
    if header_bytes > min(size - 8, MAX_HEADER_BYTES):
        raise ValueError(f"{path} is damaged: its header claims {header_bytes} bytes of a file of {size}")
    try:
        header = json.loads(raw[8 : 8 + header_bytes].tobytes())
    except ValueError as error:
        raise ValueError(f"{path} is damaged: its header is no JSON ({error})") from None
    if not isinstance(header, dict):
        raise ValueError(f"{path} is damaged: its header is a {type(header).__name__}, not names and tensors")
    known = STORED if dtype is not None else STORED | QUANTIZED
    data = raw[8 + header_bytes :].view(np.ndarray)
    views = {name: _view(path, data, name, at, known) for name, at in header.items() if name != "__metadata__"}
    return views if dtype is None else {name: np.array(widen(view), dtype) for name, view in views.items()}


def _view(path: Path, data: NDArray[np.uint8], name: str, entry: Any, known: dict[str, DTypeLike]) -> Array:
    """One tensor as stored, unread: [shape of entry], read-only."""
    match entry:
        case {"dtype": str(kind), "shape": [*shape], "data_offsets": [int(begin), int(end)]}:
            sound = all(type(size) is int and size >= 0 for size in shape)
        case _:
            sound = False
    if not sound:
        raise ValueError(f"{path} is damaged: tensor {name} is described as {entry!r}")
    if kind not in known:
        raise ValueError(f"{path}: tensor {name} is {kind}; ref reads {', '.join(known)}")
    stored = np.dtype(known[kind])
    wanted = math.prod(shape) * stored.itemsize
    if not 0 <= begin <= end <= data.size or end - begin != wanted:
        raise ValueError(
            f"{path} is damaged: tensor {name} of shape {shape} needs {wanted} bytes, but stands at "
            f"bytes {begin} to {end} of {data.size}"
        )
    return data[begin:end].view(stored).reshape(shape)
