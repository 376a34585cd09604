"""Layers of 4-bit integers in groups as their files have them, and how NumPy packs them: see engine.packed4.

layout  words of q            of zeros              scales         bits of a word
gptq    [in / 8, out]         [groups, out / 8]     [groups, out]  8 neighbours along in; of zeros along out
awq     [in, out / 8]         [groups, out / 8]     [groups, out]  8 neighbours along out, in the order of AWQ
rows    [out, in / 8]         [out / 8, groups]     [out, groups]  8 neighbours along in; of zeros along out
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from engine.checkpoint.stored_tensor import StoredTensor, map_bytes
from engine.packed4 import SYMMETRIC_ZERO, Layout, pack4, word_shapes
from ref.quant.awq import ORDER
from ref.quant.groups import unpack_words

Array = NDArray[Any]

BITS = 4
TYPES: dict[str, np.dtype[Any]] = {
    "I32": np.dtype(np.int32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
}


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A module of a layer."""

    rows: int
    words: StoredTensor
    scales: StoredTensor
    zeros: StoredTensor | None  # None: all are 8


@dataclass(frozen=True, slots=True)
class ReadPart:
    """The same as arrays, of the rows and columns that the layer has, in its order."""

    rows: int
    words: Array
    scales: Array
    zeros: Array | None


@dataclass(frozen=True, slots=True)
class StoredWords:
    """A layer. Its parts are alike, and have zeros all or none. Of a rank they may have more columns of words than the
    layer, and more rows: order and row_order then say which are the layer's."""

    layout: Layout
    parts: tuple[StoredPart, ...]
    in_features: int
    group_size: int
    zero_offset: int  # to be added to stored zeros, modulo 16
    gated: bool
    order: NDArray[np.int32] | None = None  # [in_features], the column at each place; None: its own
    row_order: NDArray[np.int32] | None = None  # [rows of a half], of gates and of the others; None: as they are
    # which group of the parts each group is of, and then order has -1 where a group is filled up; None: its own
    groups: NDArray[np.int32] | None = None

    @property
    def is_picked(self) -> bool:
        """Whether its parts have more than the layer."""
        rows = self.row_order is not None and len(self.row_order) < self.parts[0].rows
        shapes = word_shapes(self.layout, self.parts[0].rows, self.in_features, 1)
        return rows or self.groups is not None or tuple(self.parts[0].words.shape) != shapes[0]


def mapped(tensor: StoredTensor) -> Array:
    """Its numbers as they lie in the file, of one of TYPES."""
    found: Array = map_bytes(tensor).view(TYPES[tensor.dtype]).reshape(tensor.shape)
    return found


def integers_of(stored: StoredWords) -> tuple[Array, Array, Array]:
    """q [out, in] uint8, scales [out, groups] as stored, zeros [out, groups] uint8: groups are neighbours, and rows in
    their order."""
    parts = stored.parts
    q = np.concatenate([_numbers(stored, part) for part in parts])
    scales = np.concatenate([_scales(stored, part) for part in parts])
    zeros = np.concatenate([_zeros(stored, part) for part in parts])
    if stored.order is not None:
        q = q[:, stored.order]
    if stored.groups is not None:
        scales, zeros = scales[:, stored.groups], zeros[:, stored.groups]
        if stored.order is not None:
            q = np.where(stored.order < 0, zeros.repeat(stored.group_size, 1), q)
    if stored.row_order is not None:
        rows = np.concatenate([stored.row_order, stored.row_order + len(q) // 2])
        q, scales, zeros = q[rows], scales[rows], zeros[rows]
    return q, scales, zeros


def pick(stored: StoredWords) -> list[ReadPart]:
    """The parts with no more than the layer has, in its order of rows, columns and groups."""
    rows = np.arange(stored.parts[0].rows) if stored.row_order is None else stored.row_order
    along_rows, along_columns = (0, 1) if stored.layout == "rows" else (1, 0)  # axes of words, scales and zeros
    parts = []
    for part in stored.parts:
        words = mapped(part.words)
        if stored.order is not None:
            words = _pick_numbers(words, stored.order, along_columns, _filling(stored, part))
        if stored.row_order is not None:
            words = words.take(rows, along_rows)
        scales = mapped(part.scales).take(rows, along_rows)
        zeros = None if part.zeros is None else _pick_numbers(mapped(part.zeros), rows, along_rows)
        if stored.groups is not None:
            scales = scales.take(stored.groups, along_columns)
            zeros = None if zeros is None else zeros.take(stored.groups, along_columns)
        parts.append(ReadPart(len(rows), words, scales, zeros))
    return parts


def _filling(stored: StoredWords, part: StoredPart) -> Array | None:
    """What stands for 0 at each place that order leaves empty, [places, rows]."""
    if stored.groups is None or stored.order is None:
        return None
    empty = np.flatnonzero(stored.order < 0)
    return _zeros(stored, part)[:, stored.groups[empty // stored.group_size]].T


def _pick_numbers(words: Array, order: NDArray[Any], axis: int, filling: Array | None = None) -> Array:
    """Words of the numbers at these places of an axis along which 8 are in a word, the first in the lowest bits; of
    those of filling in their order where a place is -1."""
    found = np.moveaxis(words.view(np.uint32), axis, 0)
    made = np.zeros((len(order) // 8, found.shape[1]), np.uint32)
    rank = np.cumsum(order < 0) - 1  # among the empty places
    for place in range(8):
        numbers, empty = order[place::8], order[place::8] < 0
        shifts = (4 * (numbers % 8)).astype(np.uint32)[:, None]
        picked = found[numbers // 8] >> shifts & np.uint32(15)
        if filling is not None:
            picked[empty] = filling[rank[place::8][empty]]
        made |= picked << np.uint32(4 * place)
    return np.ascontiguousarray(np.moveaxis(made, 0, axis)).view(np.int32)


def pack_words(stored: StoredWords) -> dict[str, Array]:
    """The tensors of engine.packed4, what kernels that pack are held to."""
    q, scales, zeros = integers_of(stored)
    has_zeros = stored.parts[0].zeros is not None
    return pack4(q, scales.astype(np.float16), zeros if has_zeros else None, gated=stored.gated)


def _numbers(stored: StoredWords, part: StoredPart) -> Array:
    """[rows, in_features] uint8."""
    words = mapped(part.words)
    if stored.layout == "rows":
        return unpack_words(words, BITS, axis=1)
    if stored.layout == "awq":
        return unpack_words(words, BITS, axis=1, order=ORDER).T
    return unpack_words(words, BITS, axis=0).T


def _scales(stored: StoredWords, part: StoredPart) -> Array:
    """[rows, groups]."""
    return mapped(part.scales) if stored.layout == "rows" else mapped(part.scales).T


def _zeros(stored: StoredWords, part: StoredPart) -> Array:
    """[rows, groups] uint8."""
    if part.zeros is None:
        return np.full(_scales(stored, part).shape, SYMMETRIC_ZERO, np.uint8)
    if stored.layout == "rows":
        return unpack_words(mapped(part.zeros), BITS, axis=0)
    found = unpack_words(mapped(part.zeros), BITS, axis=1, order=ORDER if stored.layout == "awq" else None).T
    return found + np.uint8(stored.zero_offset) & np.uint8(15)
