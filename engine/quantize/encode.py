"""From a weight to the tensors that hold it, by ref.quant's definitions.

Scales are rounded to their stored type before a weight is rounded by them. A scale of 0, which some readers refuse,
becomes 1: its numbers are all 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.quantize.methods import BITS, METHODS, SHARES, Settings
from ref.numerics import bf16_bits, round_to
from ref.quant.awq import awq_pack
from ref.quant.compressed_tensors import ct_pack
from ref.quant.fp8 import BLOCK, FP8_MAX
from ref.quant.gptq import gptq_pack
from ref.quant.groups import GroupedInt, group_index, grouped_quantize, grouped_round
from ref.quant.int8 import INT8_MAX, int8_quantize_static

Array = NDArray[Any]
Module = dict[str, Array]  # the tensors of a linear layer, by the last part of their names

STORAGE = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}  # safetensors' word: ref's
BF16_EXPONENT = 0x7F80  # all of its bits are set in what is not finite
AT_ONCE = 1 << 18  # numbers of a weight that are rounded together: what NumPy makes on the way stays in a cache


@dataclass(frozen=True, slots=True)
class Layout:
    """A tensor's type, in safetensors' words, and shape."""

    dtype: str
    shape: tuple[int, ...]


def layout(settings: Settings, scales: str, out_features: int, in_features: int) -> dict[str, Layout]:
    """The tensors of a module by the last part of their names; scales: from scale_dtype."""
    method = METHODS[settings.method]
    groups = in_features // _size(settings, in_features) if method.has_groups else 0
    per_word = 32 // BITS
    match method.packing:
        case "int8":
            return {
                "weight": Layout("I8", (out_features, in_features)),
                "weight_scale": Layout(scales, (out_features, 1)),
            }
        case "fp8" | "fp8_tensor":
            shape = (out_features, 1) if method.packing == "fp8" else (1,)
            tensors = {"weight": Layout("F8_E4M3", (out_features, in_features)), "weight_scale": Layout(scales, shape)}
            return tensors | ({"input_scale": Layout("F32", (1,))} if method.static else {})
        case "fp8_block":
            tiles = (math.ceil(out_features / BLOCK), math.ceil(in_features / BLOCK))
            return {
                "weight": Layout("F8_E4M3", (out_features, in_features)),
                "weight_scale_inv": Layout(scales, tiles),
            }
        case "gptq":
            return {
                "qweight": Layout("I32", (in_features // per_word, out_features)),
                "qzeros": Layout("I32", (groups, out_features // per_word)),
                "scales": Layout(scales, (groups, out_features)),
                "g_idx": Layout("I32", (in_features,)),
            }
        case "awq":
            return {
                "qweight": Layout("I32", (in_features, out_features // per_word)),
                "qzeros": Layout("I32", (groups, out_features // per_word)),
                "scales": Layout(scales, (groups, out_features)),
            }
        case "ct4":
            tensors = {
                "weight_packed": Layout("I32", (out_features, math.ceil(in_features / per_word))),
                "weight_scale": Layout(scales, (out_features, groups)),
                "weight_shape": Layout("I64", (2,)),
            }
            if not settings.symmetric:
                tensors["weight_zero_point"] = Layout("I32", (math.ceil(out_features / per_word), groups))
            return tensors
        case _:
            return {"weight": Layout("BF16", (out_features, in_features))}


def quantize_weight(
    settings: Settings,
    scales: str,
    weight: NDArray[np.float32],
    grouped: GroupedInt | None = None,
    input_absmax: float = 0.0,
) -> Module:
    """The tensors of a module; those of bfloat16 as uint16, their bits.

    Args:
        scales: from scale_dtype.
        weight: [out_features, in_features].
        grouped: where GPTQ found the integers, these; its scales are such as the checkpoint holds.
        input_absmax: of the layer's input, where the scale of activations is static.
    """
    method = METHODS[settings.method]
    match method.packing:
        case "int8":
            return _by_rows(weight, lambda rows: _int8(rows, scales))
        case "fp8":
            return _by_rows(weight, lambda rows: _fp8(rows, scales))
        case "fp8_tensor":
            absmax = np.abs(weight).max(initial=0)
            stored, scale = _stored_scale(np.float32(absmax / FP8_MAX).reshape(1), scales)
            module = _by_rows(weight, lambda rows: {"weight": fp8_codes(rows / scale)})
            static = {"input_scale": np.array([input_absmax / FP8_MAX or 1.0], np.float32)} if method.static else {}
            return module | {"weight_scale": stored} | static
        case "fp8_block":
            return _by_rows(weight, _fp8_block)
        case "gptq" | "awq" | "ct4":
            if grouped is None:
                grouped = _round_groups(settings, scales, weight)
            return _pack(settings, scales, grouped)
        case _:
            return _by_rows(weight, lambda rows: {"weight": bf16_bits(rows)})


def _by_rows(weight: Array, quantize: Callable[[Array], Module]) -> Module:
    """Rows, in numbers that tiles divide, each for itself; what comes out is joined along them."""
    step = max(BLOCK, AT_ONCE // max(weight.shape[1], 1) // BLOCK * BLOCK)
    parts = [quantize(weight[first : first + step]) for first in range(0, weight.shape[0], step)]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _stored_scale(scale: Array, dtype: str) -> tuple[Array, NDArray[np.float32]]:
    """A scale as stored, and its value; what is too small for the type is a scale of zeros."""
    value = np.asarray(round_to(scale.astype(np.float32), STORAGE[dtype]), np.float32)
    value = np.where(value > 0, value, np.float32(1))
    return to_stored(value, dtype), value


def to_stored(values: Array, dtype: str) -> Array:
    """Numbers in a type of safetensors: bfloat16 as uint16, its bits."""
    if dtype == "BF16":
        return bf16_bits(values)
    return values.astype(np.float16 if dtype == "F16" else np.float32)


def is_finite(stored: Array) -> bool:
    """Whether to_stored, or quantize_weight, gave numbers that are finite."""
    if stored.dtype == np.uint16:
        return bool(np.all(stored & np.uint16(BF16_EXPONENT) != BF16_EXPONENT))
    return bool(np.isfinite(stored).all())


def _int8(weight: Array, scales: str) -> Module:
    stored, scale = _stored_scale(_absmax(weight) / np.float32(INT8_MAX), scales)
    return {"weight": int8_quantize_static(weight, scale), "weight_scale": stored}


def _fp8(weight: Array, scales: str) -> Module:
    stored, scale = _stored_scale(_absmax(weight) / np.float32(FP8_MAX), scales)
    return {"weight": fp8_codes(weight / scale), "weight_scale": stored}


def _fp8_block(weight: Array) -> Module:
    """A scale for each tile of 128 rows and columns, the last ones cut short."""
    rows, columns = (range(0, size, BLOCK) for size in weight.shape)
    absmax = np.maximum.reduceat(np.maximum.reduceat(np.abs(weight), rows, axis=0), columns, axis=1)
    _, scale = _stored_scale(absmax / np.float32(FP8_MAX), "F32")
    spread = np.repeat(np.repeat(scale, BLOCK, 0)[: weight.shape[0]], BLOCK, 1)[:, : weight.shape[1]]
    return {"weight": fp8_codes(weight / spread), "weight_scale_inv": scale}


def _absmax(weight: Array) -> Array:
    """Of each row, [rows, 1]."""
    absmax: Array = np.max(np.abs(weight), axis=1, keepdims=True, initial=0)
    return absmax


def fp8_codes(x: Array) -> NDArray[np.uint8]:
    """ref.quant.fp8.fp8_encode of finite float32, by its bits: seconds for what takes minutes by a table.

    From 2⁻⁶ up the code is the exponent and three bits of the mantissa; the 20 bits below round, half to even, and may
    carry into the exponent. Below, a code is a multiple of 2⁻⁹.
    """
    magnitude = np.minimum(np.abs(x), np.float32(FP8_MAX))
    bits = magnitude.view(np.uint32)
    normal = ((bits + np.uint32(0x7FFFF) + (bits >> 20 & 1)) >> 20) - np.uint32((127 - 7) << 3)
    codes = np.where(magnitude < 2.0**-6, np.rint(magnitude * np.float32(512)).astype(np.uint32), normal)
    return (codes | np.signbit(x) * np.uint32(0x80)).astype(np.uint8)


def _round_groups(settings: Settings, scales: str, weight: Array) -> GroupedInt:
    """Round to nearest."""
    g_idx = group_index(weight.shape[1], settings.group_size)
    shares = SHARES if settings.symmetric else (1.0,)

    def round_rows(rows: Array) -> Module:
        found = grouped_quantize(rows, BITS, settings.group_size, symmetric=settings.symmetric, shares=shares)
        _, scale = _stored_scale(found.scales, scales)
        rounded = grouped_round(rows, BITS, scale, found.zeros, g_idx)
        return {"q": rounded.q, "scales": rounded.scales, "zeros": rounded.zeros}

    return GroupedInt(BITS, **_by_rows(weight, round_rows), g_idx=g_idx)


def _pack(settings: Settings, scales: str, grouped: GroupedInt) -> Module:
    packing = METHODS[settings.method].packing
    if packing == "gptq":
        return gptq_pack(grouped)
    if packing == "awq":
        return awq_pack(grouped)
    module = ct_pack(grouped, symmetric=settings.symmetric)
    module["weight_scale"] = to_stored(grouped.scales, scales)
    return module


def _size(settings: Settings, in_features: int) -> int:
    return in_features if settings.group_size == -1 else settings.group_size
