"""Linear layers with weights of 8 bits, for many tokens. Defined by ref.quant.int8, ref.quant.fp8, ref.quant.fp8_block.

cuda/linear_w8_sm90.cu multiplies codes in wgmma on Hopper. Elsewhere the vendor's library multiplies: int8 by its
integer product, and cuda/linear_w8_scale.cu scales the sums; fp8 as floating point, which holds codes exactly, made by
cuda/linear_w8_dequantize.cu.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from engine.coded8 import DTYPES, TILE
from engine.kernels.activation import FUNCTIONS, gate_up_act
from engine.kernels.check import CODE_TYPES, ceil_div, is_aligned, require, require_contiguous, type_name
from engine.kernels.device import Boxes, Device, Instance
from engine.weights import LinearWeight

Array = Any

STEP = 128  # columns of a step of linear_w8_sm90
ROWS = 64  # of a product of it
OUTS = 128  # rows of the weight of a block; with a gate half are gates
CLUSTER = 2  # blocks
STAGES = {1: 6, 2: 4}  # by the products a warpgroup has
COLUMNS = 1024  # of a block of linear_w8_dequantize and linear_w8_scale
UNIT = 4  # the vendor's integer product takes sizes that are multiples of it


def linear_w8_many(x: Array, x_scale: Array | None, weight: LinearWeight, *, device: Device, dtype: Any) -> Array:
    """y = x Wᵀ + bias in dtype, [num_tokens, in_features] → [num_tokens, out_features].

    Args:
        x: int8 or uint8 codes, of the weight's kind; or bfloat16 or float16, for an fp8 weight alone.
        x_scale: float32 [num_tokens], [num_tokens, ⌈in_features / 128⌉] for a weight in blocks; None: x is in floating
            point.
    Raises:
        KernelError: arrays that do not fit each other.
    """
    _check(x, x_scale, weight)
    y = device.empty((x.shape[0], weight.out_features), dtype)
    if not y.size:
        return y
    if x_scale is not None and _suits(x, weight, y, device):
        _launch(x, x_scale, weight, "kNone", y, device)
        return y
    scale = weight.tensors["scale"]
    if x_scale is not None and scale.ndim == 1:
        _scaled(_sums(x, weight.tensors["weight"], device), x_scale, weight, y, device)
        return y
    number = ml_dtypes.bfloat16 if y.dtype == np.float32 else y.dtype
    numbers = x if x_scale is None else dequantized(x, x_scale, (1, TILE), number, device)
    scale_rows = TILE if scale.ndim == 2 else ceil_div(weight.out_features, scale.shape[0])
    scale_columns = TILE if scale.ndim == 2 else ceil_div(weight.in_features, TILE) * TILE
    stored = dequantized(weight.tensors["weight"], scale, (scale_rows, scale_columns), numbers.dtype, device)
    device.matmul(numbers, stored, y)
    if weight.bias is not None:
        y += weight.bias
    return y


def linear_w8_many_gate_up_act(
    x: Array, x_scale: Array | None, weight: LinearWeight, activation: str, *, device: Device, dtype: Any
) -> Array:
    """gate_up_act of the above, each product rounded to dtype: [num_tokens, out_features / 2]."""
    y = device.empty((x.shape[0], weight.out_features // 2), dtype)
    if x_scale is not None and y.size and _suits(x, weight, y, device):
        _check(x, x_scale, weight)
        _launch(x, x_scale, weight, FUNCTIONS[activation], y, device)
        return y
    return gate_up_act(linear_w8_many(x, x_scale, weight, device=device, dtype=dtype), activation, device=device)


def _check(x: Array, x_scale: Array | None, weight: LinearWeight) -> None:
    """Raises KernelError for arrays that do not fit each other."""
    kernel, stored = "linear_w8_many", weight.tensors["weight"]
    out_features, in_features = weight.out_features, weight.in_features
    require(kernel, "weight", stored, (out_features, in_features), DTYPES[weight.format])
    require_contiguous(kernel, "weight", stored)
    require(kernel, "x", x, (None, in_features), None if x_scale is None else stored.dtype)
    scale, blocks = weight.tensors["scale"], ceil_div(in_features, TILE)
    tiles = ceil_div(out_features, TILE), blocks
    shape: tuple[int, ...] = tiles if scale.ndim == 2 else (1 if scale.shape[0] == 1 else out_features,)
    require(kernel, "scale", scale, shape, np.float32)
    require_contiguous(kernel, "scale", scale)
    if x_scale is not None:
        require(kernel, "x_scale", x_scale, (x.shape[0], blocks) if scale.ndim == 2 else (x.shape[0],), np.float32)
        require_contiguous(kernel, "x_scale", x_scale)
        require_contiguous(kernel, "x", x)


def _suits(x: Array, weight: LinearWeight, y: Array, device: Device) -> bool:
    """Whether linear_w8_sm90 can read these and write y."""
    size, gated = y.shape[1], y.shape[1] != weight.out_features
    if not device.has_wgmma or y.dtype == np.float32 or weight.in_features % 16 or size % 8:
        return False
    if gated and weight.tensors["scale"].ndim == 2 and size % (OUTS // 2):
        return False
    return is_aligned(x) and is_aligned(weight.tensors["weight"])


def _launch(x: Array, x_scale: Array, weight: LinearWeight, activation: str, y: Array, device: Device) -> None:
    stored, scale = weight.tensors["weight"], weight.tensors["scale"]
    subtiles = _subtiles(y, activation != "kNone", device)
    stages = STAGES[subtiles]
    scales = "kBlocks" if scale.ndim == 2 else "kOuter"
    types = f"{type_name('linear_w8_sm90', 'y', y)}, {CODE_TYPES[stored.dtype]}, {scales}, {activation}"
    device.launch(
        Instance("linear_w8_sm90", f"linear_w8_sm90<{types}, {subtiles}, {stages}>"),
        (device.num_sms // CLUSTER * CLUSTER,),
        (384,),
        [
            *(Boxes(x, (ROWS * subtiles, STEP)), Boxes(stored, (ROWS, STEP)), x_scale, scale, weight.bias, y),
            *map(np.int32, (*y.shape, x.shape[1], scale.shape[0] != 1)),
        ],
        shared_bytes=(stages * (subtiles + 1) * 16 + 34) << 10,
    )


def _subtiles(y: Array, gated: bool, device: Device) -> int:
    """The larger tiles, unless the smaller ones leave fewer SMs idle at the end."""
    pairs, clusters = ceil_div(y.shape[1], CLUSTER * (OUTS // 2 if gated else OUTS)), device.num_sms // CLUSTER
    rounds = {subtiles: ceil_div(ceil_div(y.shape[0], 2 * ROWS * subtiles) * pairs, clusters) for subtiles in STAGES}
    return 2 if 2 * rounds[2] <= rounds[1] else 1


def _sums(x: Array, weight: Array, device: Device) -> Array:
    """x · weightᵀ of codes, not scaled: [num_tokens, out_features], int32 or float32."""
    shape = x.shape[0], weight.shape[0]
    if x.dtype == np.int8 and not (x.shape[1] % UNIT or weight.shape[0] % UNIT):
        sums = device.empty(shape, np.int32)
        device.matmul(x, weight, sums)
        return sums
    sums = device.empty(shape, np.float32)
    x, weight = (dequantized(codes, None, (1, STEP), ml_dtypes.bfloat16, device) for codes in (x, weight))
    device.matmul(x, weight, sums)
    return sums


def _scaled(sums: Array, x_scale: Array, weight: LinearWeight, y: Array, device: Device) -> None:
    """y = sums · x_scale · scale + bias."""
    kernel, scale = "linear_w8_scale", weight.tensors["scale"]
    bias_type = type_name(kernel, "bias", y if weight.bias is None else weight.bias)
    sum_type = "int" if sums.dtype == np.int32 else "float"
    device.launch(
        Instance(kernel, f"{kernel}<{type_name(kernel, 'y', y)}, {bias_type}, {sum_type}>"),
        (y.shape[0], ceil_div(y.shape[1], COLUMNS)),
        (128,),
        [sums, x_scale, scale, weight.bias, y, np.int32(y.shape[1]), np.int32(scale.shape[0] != 1)],
    )


def dequantized(codes: Array, scale: Array | None, per_scale: tuple[int, int], dtype: Any, device: Device) -> Array:
    """codes · scale in dtype, [rows, size]; a scale holds for so many rows and columns."""
    kernel = "linear_w8_dequantize"
    y = device.empty(codes.shape, dtype)
    device.launch(
        Instance(kernel, f"{kernel}<{type_name(kernel, 'y', y)}, {CODE_TYPES[codes.dtype]}>"),
        (codes.shape[0], ceil_div(codes.shape[1], COLUMNS)),
        (128,),
        [codes, scale, y, *map(np.int32, (codes.shape[1], *per_scale))],
    )
    return y
