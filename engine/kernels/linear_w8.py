"""Linear layers whose weights are of 8 bits. Defined by ref.quant.int8, ref.quant.fp8 and ref.quant.fp8_block.

Activations are quantized first, by the same rule for any number of tokens. cuda/linear_w8.cu streams the weights for
few tokens, and quantizes one itself; engine.kernels.linear_w8_many is for more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from engine.coded8 import COLUMNS, DTYPES, FP8, INT8, TILE, CodedActivations
from engine.errors import KernelError
from engine.kernels.activation import FUNCTIONS, gate_up_act
from engine.kernels.check import (
    ceil_div,
    is_aligned,
    literal,
    require,
    require_aligned,
    require_contiguous,
    require_half,
    stride,
    type_name,
)
from engine.kernels.device import Device, Instance
from engine.kernels.linear_w8_many import linear_w8_many, linear_w8_many_gate_up_act
from engine.kernels.quantize import CODES, kind_of, multiplies_codes, quantize_activations, quantizes_itself
from engine.weights import LinearWeight

Array = Any

FORMATS = (INT8, FP8)  # of LinearWeight
STEP = TILE  # columns of a step of linear_w8
IDLE_BYTES = 100 << 10  # of the weight that an SM may have more than others: to share a tile takes as long as they do


@dataclass(frozen=True, slots=True)
class Few:
    """Sizes of linear_w8 (cuda/linear_w8.cu)."""

    row_tiles: int
    token_tiles: int
    warps: int
    stages: int

    @property
    def rows(self) -> int:
        return 16 * self.row_tiles

    def most_rows(self, num_rows: int, device: Device) -> int:
        """Of a weight, that one SM has, if no block shares a tile."""
        return ceil_div(ceil_div(num_rows, self.rows), device.num_sms) * self.rows

    def shared_bytes(self, num_tokens: int, num_steps: int, blocks: bool, whole: bool, itemsize: int = 1) -> int:
        """blocks: scales are of blocks; whole: all of x is there, else it comes with numbers of itemsize bytes."""
        stage = (self.rows + (0 if whole else num_tokens * itemsize)) * STEP
        parts = 2 * self.warps * num_tokens * (self.rows + 4) * 4 + 16
        x = num_tokens * num_steps * STEP if whole else 0
        return self.warps * self.stages * stage + parts + x + 4 * num_tokens * (num_steps if blocks else 1)


# (most tokens, sizes), as measured on an H200 through the kernels of a layer of an 8B model. One token, µs of
# int8 and fp8: 12 warps 70.9 71.7, 8 71.7 73.0, with 5 stages 70.9 73.6, 16 with 3 71.3 72.4, 4 with 8 79.6 82.2,
# 64 rows 81.7 83.7.
CHOICES = (
    (2, Few(2, 1, 12, 4)),
    (8, Few(2, 1, 8, 3)),
    (16, Few(2, 2, 8, 3)),
    (32, Few(2, 4, 8, 2)),
)
MIN_STAGES, FEWER_WARPS = 2, (8, 4, 2, 1)
FLOAT32 = np.dtype(np.float32)
FEW_TOKENS = 32


def linear_w8(x: Array | CodedActivations, weight: LinearWeight, *, device: Device, dtype: Any = None) -> Array:
    """y = x Wᵀ + bias, [num_tokens, in_features] → [num_tokens, out_features], type of x or dtype.

    Tensors of the weight, and x in codes: see engine.coded8.
    """
    kernel = "linear_w8"
    _check(kernel, x, weight)
    dtype = x.dtype if dtype is None else dtype
    if x.shape[0] > FEW_TOKENS:
        xq, x_scale = _quantized(x, weight, device)
        return linear_w8_many(xq, x_scale, weight, device=device, dtype=dtype)
    y = device.empty((x.shape[0], weight.out_features), dtype)
    if y.size:
        _few(kernel, x, weight, "kNone", y, device)
    return y


def linear_w8_gate_up_act(
    x: Array | CodedActivations, weight: LinearWeight, activation: str, *, device: Device
) -> Array:
    """gate_up_act(linear_w8(x, weight), activation), each product rounded.

    [num_tokens, in_features] → [num_tokens, size] with size = out_features / 2.
    """
    kernel = "linear_w8_gate_up_act"
    _check(kernel, x, weight)
    if activation not in FUNCTIONS:
        raise KernelError(f"{kernel}: the activation {activation!r} has no kernel; there are {', '.join(FUNCTIONS)}")
    if weight.tensors["scale"].ndim == 2 and weight.out_features // 2 % TILE:  # a block has gates and others
        return gate_up_act(linear_w8(x, weight, device=device), activation, device=device)
    if x.shape[0] > FEW_TOKENS:
        xq, x_scale = _quantized(x, weight, device)
        return linear_w8_many_gate_up_act(xq, x_scale, weight, activation, device=device, dtype=x.dtype)
    y = device.empty((x.shape[0], weight.out_features // 2), x.dtype)
    if y.size:
        _few(kernel, x, weight, FUNCTIONS[activation], y, device)
    return y


def _quantized(x: Array | CodedActivations, weight: LinearWeight, device: Device) -> tuple[Array, Array | None]:
    """What the kernels multiply by: codes and scales, or x itself where there are no FP8 tensor cores."""
    if isinstance(x, CodedActivations):
        return x.codes, x.scales
    if not multiplies_codes(weight, device):
        return x, None
    return quantize_activations(x, kind_of(weight), device=device, input_scale=weight.tensors.get("input_scale"))


def _few(
    kernel: str, x: Array | CodedActivations, weight: LinearWeight, activation: str, y: Array, device: Device
) -> None:
    """y of linear_w8.cu, which quantizes x or finds it quantized."""
    storage = type_name(kernel, "x", x)
    if isinstance(x, CodedActivations) or not (quantizes_itself(*x.shape) and is_aligned(x)):
        x, x_scale = _quantized(x, weight, device)
    else:
        x_scale = weight.tensors.get("input_scale")
    if not multiplies_codes(weight, device):
        require_aligned(kernel, "x", x)
    launch_few(kernel, x, x_scale, weight, storage, activation, y, device)


def launch_few(
    kernel: str,
    x: Array,
    x_scale: Array | None,
    weight: LinearWeight,
    storage: str,
    activation: str,
    y: Array,
    device: Device,
) -> None:
    """Starts linear_w8. x: codes, or numbers, which it quantizes, or takes as they are without FP8 cores; x_scale:
    of the codes, or that of the checkpoint, or None. storage: the C++ type of the bias, and of what gates are rounded
    to."""
    stored, scale = weight.tensors["weight"], weight.tensors["scale"]
    num_tokens, in_features, num_steps = x.shape[0], weight.in_features, ceil_div(weight.in_features, STEP)
    decoded, blocks = not multiplies_codes(weight, device), scale.ndim == 2
    whole = x.itemsize == 2 and not decoded
    shape = (num_tokens, num_steps, blocks, whole, x.itemsize)
    few = _choose(shape, device)
    tiles = ceil_div(weight.out_features, few.rows)
    idle = few.most_rows(weight.out_features, device) - weight.out_features / device.num_sms
    split = idle * in_features > IDLE_BYTES
    units = tiles * num_steps if split else tiles
    num_blocks = min(device.num_sms, units)
    sums = np.int32 if weight.format == INT8 else np.float32
    partials = device.empty((num_blocks, 2, 8 * few.token_tiles, few.rows), sums)
    coding = "Decoded" if decoded else CODES[kind_of(weight)][0]
    bits = storage if x.itemsize == 2 else "signed char" if weight.format == INT8 else "unsigned char"
    types = f"{coding}, {bits}, {storage}, {type_name(kernel, 'y', y)}, {activation}, {literal(blocks)}"
    sizes = (num_tokens, weight.out_features, in_features, int(scale.shape[0] > 1))
    device.launch(
        Instance("linear_w8", f"linear_w8<{types}, {few.row_tiles}, {few.token_tiles}, {few.warps}, {few.stages}>"),
        (num_blocks,),
        (32 * few.warps,),
        [
            *(x, x_scale, stored, scale, weight.bias, y, partials, device.counters),
            *(*map(np.int32, sizes), np.bool_(split), *map(np.int32, divmod(units, num_blocks)), stride(x)),
        ],
        shared_bytes=few.shared_bytes(*shape),
    )


Shape = tuple[int, int, bool, bool, int]  # arguments of Few.shared_bytes


def _choose(shape: Shape, device: Device) -> Few:
    """The sizes for so many tokens, with fewer stages or warps if there is too little shared memory."""
    few = next(few for most, few in CHOICES if shape[0] <= most)
    while few.shared_bytes(*shape) > device.max_shared_bytes:
        if few.stages > MIN_STAGES:
            few = replace(few, stages=few.stages - 1)
        else:
            few = replace(few, warps=next(warps for warps in FEWER_WARPS if warps < few.warps))
    return few


def _check(kernel: str, x: Array | CodedActivations, weight: LinearWeight) -> None:
    """Raises KernelError for arrays that do not fit each other."""
    out_features, in_features = weight.out_features, weight.in_features
    if isinstance(x, CodedActivations):
        require(kernel, "x", x.codes, (None, in_features), DTYPES[weight.format])
    else:
        require(kernel, "x", x, (None, in_features))
    require_half(kernel, "x", x)
    if in_features % COLUMNS:
        raise KernelError(f"{kernel}: rows of the weight are {in_features} numbers; expected a multiple of {COLUMNS}")
    stored, scale = (weight.tensors.get(name) for name in ("weight", "scale"))
    if stored is None or scale is None:
        raise KernelError(f"{kernel}: the weight has {', '.join(weight.tensors)}; expected weight and scale")
    require(kernel, "weight", stored, (out_features, in_features), DTYPES[weight.format])
    require_contiguous(kernel, "weight", stored)
    require_aligned(kernel, "weight", stored)
    if scale.ndim == 2:
        require(kernel, "scale", scale, (ceil_div(out_features, TILE), ceil_div(in_features, TILE)), FLOAT32)
    elif scale.shape != (1,):
        require(kernel, "scale", scale, (out_features,), FLOAT32)
    require_contiguous(kernel, "scale", scale)
    if weight.bias is not None:
        require(kernel, "bias", weight.bias, (out_features,), x.dtype)
