"""Linear layers whose weights are of 8 bits. Defined by ref.quant.int8, ref.quant.fp8 and ref.quant.fp8_block.

Activations are quantized first, by the same rule for any number of tokens. cuda/linear_w8.cu streams the weights for few
tokens, and quantizes very few itself; engine.kernels.linear_w8_many is for more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.coded8 import COLUMNS, DTYPES, FP8, INT8, TILE
from engine.errors import KernelError
from engine.kernels.activation import FUNCTIONS
from engine.kernels.check import ceil_div, is_aligned, require, require_aligned, require_contiguous, stride, type_name
from engine.kernels.device import Device, Instance
from engine.kernels.linear_w8_many import linear_w8_many, linear_w8_many_gate_up_act
from engine.kernels.quantize import CODES, FP8_BLOCK, quantize_activations
from engine.weights import LinearWeight

Array = Any

FORMATS = (INT8, FP8)  # of LinearWeight
STEP = TILE  # columns of a step of linear_w8
WHOLE = 0.9  # how much of all blocks' time must be used if none shares a tile


@dataclass(frozen=True, slots=True)
class Few:
    """Sizes of linear_w8 (cuda/linear_w8.cu)."""

    row_tiles: int
    token_tiles: int
    warps: int
    stages: int
    blocks_per_sm: int

    @property
    def rows(self) -> int:
        return 16 * self.row_tiles

    def shared_bytes(self, num_tokens: int, row_scales: int, num_steps: int) -> int:
        """row_scales: of blocks in a stage, 0 if there are none. num_steps: of a token that the kernel quantizes, else 0."""
        copied = 0 if num_steps else num_tokens
        stage = (self.rows + copied) * STEP + (ceil_div(row_scales + copied, 4) * 16 if row_scales else 0)
        parts = 2 * self.warps * 8 * self.token_tiles * (self.rows + 4) * 4 + 16
        scales = 4 * num_tokens * (num_steps if row_scales else 1)
        return self.warps * self.stages * stage + parts + (num_tokens * num_steps * STEP + scales if num_steps else 0)


# (most tokens, sizes, and those for the 99 KiB that a block has on most cards)
CHOICES = (
    (8, Few(1, 1, 8, 5, 1), Few(1, 1, 8, 4, 1)),
    (16, Few(1, 2, 8, 4, 1), Few(1, 2, 8, 2, 1)),
    (32, Few(2, 4, 8, 2, 1), Few(2, 4, 4, 2, 1)),
)
OWN_BYTES = 32 << 10  # most codes of all tokens that the kernel makes itself; more are made before it
OWN_TOKENS = 2
FEW_TOKENS = 32


def linear_w8(x: Array, weight: LinearWeight, *, device: Device, dtype: Any = None) -> Array:
    """y = x Wᵀ + bias, [num_tokens, in_features] → [num_tokens, out_features], type of x or dtype.

    Tensors of the weight: see engine.coded8.
    """
    kernel = "linear_w8"
    _check(kernel, x, weight)
    dtype = x.dtype if dtype is None else dtype
    if x.shape[0] > FEW_TOKENS:
        xq, x_scale = _quantized(x, weight, device)
        return linear_w8_many(xq, x_scale, weight, device=device, dtype=dtype)
    y = device.empty((x.shape[0], weight.out_features), dtype)
    if y.size:
        _launch(kernel, x, weight, "kNone", y, device)
    return y


def linear_w8_gate_up_act(x: Array, weight: LinearWeight, activation: str, *, device: Device) -> Array:
    """gate_up_act(linear_w8(x, weight), activation), each product rounded.

    [num_tokens, in_features] → [num_tokens, size] with size = out_features / 2.
    """
    kernel = "linear_w8_gate_up_act"
    _check(kernel, x, weight)
    if activation not in FUNCTIONS:
        raise KernelError(f"{kernel}: the activation {activation!r} has no kernel; there are {', '.join(FUNCTIONS)}")
    if x.shape[0] > FEW_TOKENS:
        xq, x_scale = _quantized(x, weight, device)
        return linear_w8_many_gate_up_act(xq, x_scale, weight, activation, device=device, dtype=x.dtype)
    y = device.empty((x.shape[0], weight.out_features // 2), x.dtype)
    if y.size:
        _launch(kernel, x, weight, FUNCTIONS[activation], y, device)
    return y


def _quantized(x: Array, weight: LinearWeight, device: Device) -> tuple[Array, Array | None]:
    """What the kernels multiply by: codes and scales, or x itself where there are no FP8 tensor cores."""
    if weight.format == FP8 and not device.has_fp8:
        return x, None
    return quantize_activations(x, _kind(weight), device=device, input_scale=weight.tensors.get("input_scale"))


def _kind(weight: LinearWeight) -> str:
    """How activations are quantized: a name of ref.quant.fused."""
    return FP8_BLOCK if weight.tensors["scale"].ndim == 2 else weight.format


def _launch(kernel: str, x: Array, weight: LinearWeight, activation: str, y: Array, device: Device) -> None:
    stored, scale = weight.tensors["weight"], weight.tensors["scale"]
    num_tokens, in_features, num_steps = x.shape[0], weight.in_features, ceil_div(weight.in_features, STEP)
    storage, out = type_name(kernel, "x", x), type_name(kernel, "y", y)
    owns = num_tokens <= OWN_TOKENS and num_tokens * in_features <= OWN_BYTES and is_aligned(x)
    x_scale = weight.tensors.get("input_scale")
    if not owns:
        x, x_scale = quantize_activations(x, _kind(weight), device=device, input_scale=x_scale)
    coding, dtype = CODES[_kind(weight)]
    bits = storage if owns else {np.int8: "signed char", np.uint8: "unsigned char"}[dtype]

    gated, blocks = activation != "kNone", scale.ndim == 2
    choices = next(sizes for most, *sizes in CHOICES if num_tokens <= most)
    shared = [
        few.shared_bytes(num_tokens, (1 + gated) * few.row_tiles * blocks, num_steps * owns) for few in choices
    ]
    few, shared_bytes = next(
        (pair for pair in zip(choices, shared, strict=True) if _fits(*pair, device)), (choices[-1], shared[-1])
    )
    tiles = ceil_div(y.shape[1], few.rows // (1 + gated))
    room = few.blocks_per_sm * device.num_sms
    unit = num_steps if tiles / (ceil_div(tiles, room) * room) >= WHOLE else 1
    num_blocks = min(room, tiles * num_steps // unit)
    sums = np.int32 if weight.format == INT8 else np.float32
    partials = device.empty((num_blocks, 2, 8 * few.token_tiles, few.rows), sums)
    types = f"{coding}, {bits}, {storage}, {out}, {activation}, {'true' if blocks else 'false'}"
    sizes = (num_tokens, weight.out_features, in_features, int(scale.shape[0] > 1), unit)
    device.launch(
        Instance("linear_w8", f"linear_w8<{types}, {few.row_tiles}, {few.token_tiles}, {few.warps}, {few.stages}>"),
        (num_blocks,),
        (32 * few.warps,),
        [
            *(x, x_scale, stored, scale, weight.bias, y, partials, device.counters),
            *(*map(np.int32, sizes), stride(x)),
        ],
        shared_bytes=shared_bytes,
    )


def _fits(few: Few, shared_bytes: int, device: Device) -> bool:
    """An SM has 1 KiB more than a block, and each block takes 1 KiB of it."""
    return shared_bytes <= (device.max_shared_bytes + 1024) // few.blocks_per_sm - 1024


def _check(kernel: str, x: Array, weight: LinearWeight) -> None:
    """Raises KernelError for arrays that do not fit each other."""
    out_features, in_features = weight.out_features, weight.in_features
    require(kernel, "x", x, (None, in_features))
    if in_features % COLUMNS:
        raise KernelError(f"{kernel}: rows of the weight are {in_features} numbers; expected a multiple of {COLUMNS}")
    stored, scale = (weight.tensors.get(name) for name in ("weight", "scale"))
    if stored is None or scale is None:
        raise KernelError(f"{kernel}: the weight has {', '.join(weight.tensors)}; expected weight and scale")
    require(kernel, "weight", stored, (out_features, in_features), DTYPES[weight.format])
    require_contiguous(kernel, "weight", stored)
    require_aligned(kernel, "weight", stored)
    if scale.ndim == 2:
        require(kernel, "scale", scale, (ceil_div(out_features, TILE), ceil_div(in_features, TILE)), np.float32)
    elif scale.shape != (1,):
        require(kernel, "scale", scale, (out_features,), np.float32)
    require_contiguous(kernel, "scale", scale)
    if weight.bias is not None:
        require(kernel, "bias", weight.bias, (out_features,), x.dtype)
