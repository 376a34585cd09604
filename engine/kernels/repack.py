"""4-bit weights of a file in the order of engine.packed4: cuda/repack4.cu. Defined by pack4 over ref.quant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.errors import KernelError
from engine.kernels.check import ceil_div, literal, require, require_contiguous, type_name
from engine.kernels.device import Device, Instance
from engine.packed4 import COLUMNS, ROWS, Layout, word_shapes

Array = Any

MAX_PARTS = 3
LAYOUTS = {"gptq": "kGptq", "awq": "kAwq", "rows": "kRows"}


@dataclass(frozen=True, slots=True)
class Part:
    """A module: words and zeros int32, scales of a floating type, each contiguous."""

    rows: int
    words: Array
    scales: Array
    zeros: Array | None


def repack4(
    layout: Layout,
    parts: Sequence[Part],
    in_features: int,
    group_size: int,
    *,
    device: Device,
    zero_offset: int = 0,
    gated: bool = False,
    order: Array | None = None,
    row_order: Array | None = None,
) -> dict[str, Array]:
    """The tensors weight and scales, and zeros if the parts have them; of up to three parts. Arguments are those of
    StoredWords (engine.checkpoint.stored_words), arrays on the device."""
    kernel, groups = "repack4", in_features // group_size
    _check(layout, parts, in_features, groups, gated)
    out_features = sum(part.rows for part in parts)
    quads, steps = ceil_div(out_features, ROWS), ceil_div(in_features, COLUMNS) * 2
    none: list[None] = [None] * (MAX_PARTS - len(parts))
    rows = [np.int32(part.rows) for part in parts] + [np.int32(0)] * len(none)
    orders = {"order": (order, in_features), "row_order": (row_order, int(rows[0]))}
    for name, (array, size) in orders.items():
        if array is not None:
            require(kernel, name, array, (size,), np.int32)
            require_contiguous(kernel, name, array)
    weight = device.empty((4 * quads, steps, 32, 4), np.uint32)
    options = f"{LAYOUTS[layout]}, {literal(gated)}"
    device.launch(
        Instance(kernel, f"repack4<{options}>"),
        (steps, quads),
        (128,),
        [*(part.words for part in parts), *none, *rows, order, row_order, weight, np.int32(in_features)],
    )
    scales = device.empty((groups, quads, 8, 4, 2), np.float16)
    zeros = None if parts[0].zeros is None else device.empty(scales.shape, np.uint8)
    device.launch(
        Instance(kernel, f"repack4_groups<{options}, {type_name(kernel, 'scales', parts[0].scales)}>"),
        (quads, groups),
        (64,),
        [
            *(part.scales for part in parts),
            *none,
            *(part.zeros for part in parts),
            *none,
            *(*rows, row_order, scales, zeros, np.int32(zero_offset)),
        ],
    )
    return {"weight": weight, "scales": scales} | ({} if zeros is None else {"zeros": zeros})


def blank_part(layout: Layout, rows: int, in_features: int, groups: int, scales: Any, zeros: bool) -> Part:
    """Of zeros, which take no memory before they are touched."""
    words, of_scales, of_zeros = word_shapes(layout, rows, in_features, groups)
    return Part(
        rows, np.zeros(words, np.int32), np.zeros(of_scales, scales), np.zeros(of_zeros, np.int32) if zeros else None
    )


def _check(layout: Layout, parts: Sequence[Part], in_features: int, groups: int, gated: bool) -> None:
    """Raises KernelError for parts that do not fit each other or the kernel."""
    kernel = "repack4"
    if not 1 <= len(parts) <= MAX_PARTS or (gated and [part.rows for part in parts] != [parts[0].rows] * 2):
        raise KernelError(
            f"{kernel}: parts of {[part.rows for part in parts]} rows; expected 1 to 3, or 2 alike if gated"
        )
    if groups > 65535:
        raise KernelError(f"{kernel}: {groups} groups; a grid has up to 65535")
    for part in parts:
        rows = part.rows
        if rows % 8 or in_features % 8:
            raise KernelError(f"{kernel}: a weight {[rows, in_features]}; expected multiples of 8")
        words, scales, zeros = word_shapes(layout, rows, in_features, groups)
        require(kernel, "words", part.words, words, np.int32)
        require(kernel, "scales", part.scales, scales)
        if part.scales.dtype != parts[0].scales.dtype or (part.zeros is None) != (parts[0].zeros is None):
            raise KernelError(f"{kernel}: the parts have scales of different types, or only some have zeros")
        arrays = {"words": part.words, "scales": part.scales}
        if part.zeros is not None:
            require(kernel, "zeros", part.zeros, zeros, np.int32)
            arrays["zeros"] = part.zeros
        for name, array in arrays.items():
            require_contiguous(kernel, name, array)
