"""Weights of 4 bits in groups, in the order in which the kernels of cuda/linear_w4*.cu read them; needs no GPU.

    weight  [row tiles, steps, 32, 4] uint32     tiles of 16 rows, a multiple of 4; steps of 64 columns, an even number
    scales  [groups, row tiles / 4, 8, 4, 2] float16
    zeros   the same, uint8; none where all are 8
    order   [in_features] int32, where columns are in another order than those of x: which of them is at each place
            (a place that fills up a group may name any, as its numbers are 0; in_features counts such places too)

A tile and step is what the 32 lanes of a warp give to tensor cores: 4 products of 16 rows by 16 columns. Word j of a
lane has its 8 numbers of product j: of row r = lane // 4 + 8 · h and column c = 16 · j + 8 · k + 2 · (lane % 4) + e at
bit 4 · (h + 2 · k) + 16 · e. The scales of rows r and r + 8 of four tiles lie beside each other.

A gated weight is that of gates and of what they are multiplied by: a tile has 8 rows of the one, then the same 8 of the
other, so that a thread has both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

ROWS, COLUMNS = 64, 128  # what the sizes are filled up to
SYMMETRIC_ZERO = 8
PACKED, PACKED_GATED = "packed4", "packed4_gated"  # formats of a LinearWeight
Layout = Literal["gptq", "awq", "rows"]  # of files: see engine.checkpoint.stored_words
GROUP_SIZES = (32, 64)  # and 128 times a power of two, or all columns


def is_group_size(group_size: int, in_features: int) -> bool:
    """Whether the kernels have groups of so many columns."""
    if group_size == in_features:
        return True
    return in_features % group_size == 0 and (
        group_size in GROUP_SIZES or (group_size % 128 == 0 and group_size & (group_size - 1) == 0)
    )


def pack4(q: Array, scales: Array, zeros: Array | None, *, gated: bool = False) -> dict[str, Array]:
    """The tensors of a weight, q [out, in] of 0 to 15, scales [out, groups], zeros the same or None where all are 8.

    gated: the first half of the rows are gates.
    """
    out_features, in_features = q.shape
    rows = packed_rows(out_features, gated)
    tiles, steps = _up(out_features, ROWS) // 16, _up(in_features, COLUMNS) // 64
    padded = np.zeros((16 * tiles, 64 * steps), np.uint32)
    padded[:out_features, :in_features] = q[rows]
    parts = padded.reshape(tiles, 2, 8, steps, 4, 2, 4, 2)  # tile, h, r, step, j, k, pair, e
    weight = np.zeros((tiles, steps, 8, 4, 4), np.uint32)  # tile, step, r, pair, j
    for h, k, e in np.ndindex(2, 2, 2):
        weight |= parts[:, h, :, :, :, k, :, e].transpose(0, 2, 1, 4, 3) << np.uint32(4 * (h + 2 * k) + 16 * e)
    tensors = {"weight": weight.reshape(tiles, steps, 32, 4), "scales": _by_tile(scales[rows], np.float16)}
    if zeros is not None:
        tensors["zeros"] = _by_tile(zeros[rows], np.uint8)
    return tensors


def word_shapes(layout: Layout, rows: int, in_features: int, groups: int) -> tuple[tuple[int, int], ...]:
    """Of the words, scales and zeros that a file has of a module of so many rows."""
    if layout == "rows":
        return (rows, in_features // 8), (rows, groups), (rows // 8, groups)
    words = (in_features // 8, rows) if layout == "gptq" else (in_features, rows // 8)
    return words, (groups, rows), (groups, rows // 8)


def blank4(out_features: int, in_features: int, group_size: int, zeros: bool) -> dict[str, Array]:
    """Tensors of a weight of zeros, which take no memory before they are touched."""
    quads, groups = _up(out_features, ROWS) // ROWS, -(-in_features // group_size)
    tensors: dict[str, Array] = {
        "weight": np.zeros((4 * quads, _up(in_features, COLUMNS) // 64, 32, 4), np.uint32),
        "scales": np.zeros((groups, quads, 8, 4, 2), np.float16),
    }
    return tensors | ({"zeros": np.zeros((groups, quads, 8, 4, 2), np.uint8)} if zeros else {})


def unpack4(
    tensors: Mapping[str, Array], out_features: int, in_features: int, *, gated: bool = False
) -> tuple[Array, Array, Array]:
    """The inverse: q [out, in] uint8, scales [out, groups] float16, zeros [out, groups] uint8."""
    tiles, steps = tensors["weight"].shape[:2]
    words = tensors["weight"].reshape(tiles, steps, 8, 4, 4)
    parts = np.zeros((tiles, 2, 8, steps, 4, 2, 4, 2), np.uint8)
    for h, k, e in np.ndindex(2, 2, 2):
        parts[:, h, :, :, :, k, :, e] = (words >> np.uint32(4 * (h + 2 * k) + 16 * e) & 15).transpose(0, 2, 1, 4, 3)
    rows = np.argsort(packed_rows(out_features, gated))
    q = parts.reshape(16 * tiles, 64 * steps)[rows, :in_features]
    scales = _by_row(tensors["scales"])[rows]
    zeros = _by_row(tensors["zeros"])[rows] if "zeros" in tensors else np.full(scales.shape, SYMMETRIC_ZERO, np.uint8)
    return q, scales, zeros


def packed_rows(out_features: int, gated: bool) -> NDArray[np.intp]:
    """Which row of the weight is at each place, [out_features]. A gated weight has 8 rows of each kind after 8."""
    rows = np.arange(out_features)
    if not gated:
        return rows
    gates, others = np.split(rows, 2)
    parts = [part[first : first + 8] for first in range(0, len(gates), 8) for part in (gates, others)]
    return np.concatenate(parts)


def _by_tile(values: Array, dtype: Any) -> Array:
    """[out, groups] → [groups, quads of tiles, 8, 4, 2]."""
    out_features, groups = values.shape
    padded = np.zeros((_up(out_features, ROWS), groups), dtype)
    padded[:out_features] = values
    return np.ascontiguousarray(padded.reshape(-1, 4, 2, 8, groups).transpose(4, 0, 3, 1, 2))


def _by_row(values: Array) -> Array:
    groups = values.shape[0]
    return values.transpose(1, 3, 4, 2, 0).reshape(-1, groups)


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
