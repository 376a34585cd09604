"""Many tokens with weights of 4 bits in groups and activations of 8 bits a token. Defined by ref.quant.w4a8.

cuda/linear_w4a8_sm90.cu turns the packed weight into 8-bit operands of wgmma, in registers. Elsewhere activations are
rounded to their codes and multiplied as floating point, by which nothing is won: it is there to be the same function.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.kernels.activation import FUNCTIONS
from engine.kernels.check import CODE_TYPES, ceil_div, literal, type_name
from engine.kernels.device import Boxes, Device, Instance
from engine.kernels.linear_w4_many import linear_w4_many, linear_w4_many_gate_up_act, step_groups
from engine.kernels.linear_w8_many import dequantized
from engine.kernels.quantize import PAIRED, quantize_activations
from engine.weights import LinearWeight

Array = Any

# A layer of 72B on an H200: as quick as linear_w4_sm90 for 256 tokens, 1.25 times for 384, 1.45 for 2048.
MIN_TOKENS = 256
STEP = 128  # columns of a step of linear_w4a8_sm90
TOKENS = 128  # of a product
CLUSTER = 2  # blocks
ROWS = 256  # of a weight, of a tile
STAGES = {1: 6, 2: 4}  # by the products a warpgroup has
IDLE = 0.5  # of the SMs that tiles with two products would leave without work, where one is quicker


def is_worth_it(x: Array, weight: LinearWeight) -> bool:
    """Whether these activations are to be quantized."""
    return bool(weight.activations) and x.shape[0] >= MIN_TOKENS


def linear_w4a8(kernel: str, x: Array, weight: LinearWeight, y: Array, device: Device) -> None:
    """y = x Wᵀ + bias, x quantized per token as the weight says; arrays that fit each other; y may be float32."""
    if _suits(weight, y, device):
        _launch(x, weight, "kNone", y, device)
        return
    linear_w4_many(kernel, _rounded(x, weight.activations, device), weight, y, device)


def linear_w4a8_gate_up_act(kernel: str, x: Array, weight: LinearWeight, activation: str, *, device: Device) -> Array:
    """y = gate_up_act(x Wᵀ + bias), each product rounded, [num_tokens, size]; arrays that fit each other."""
    y = device.empty((x.shape[0], weight.out_features // 2), x.dtype)
    if not _suits(weight, y, device):
        x = _rounded(x, weight.activations, device)
        return linear_w4_many_gate_up_act(kernel, x, weight, activation, device=device)
    _launch(x, weight, FUNCTIONS[activation], y, device)
    return y


def _suits(weight: LinearWeight, y: Array, device: Device) -> bool:
    """Whether linear_w4a8_sm90 can read the weight and write y."""
    return bool(device.has_wgmma) and y.shape[1] % 8 == 0 and weight.in_features % PAIRED == 0 and y.dtype != np.float32


def _subtiles(y: Array, weight: LinearWeight, groups: int, device: Device) -> int:
    """Two products, the quicker form, unless there are too few tiles for it.

    With more than a group in a step there are too few registers. 256 tokens of 8192 rows on an H200: half the SMs.
    """
    tiles = ceil_div(y.shape[0], 2 * TOKENS) * ceil_div(weight.out_features, ROWS)
    return 1 if groups > 1 or tiles <= IDLE * (device.num_sms // CLUSTER) else 2


def _rounded(x: Array, kind: str, device: Device) -> Array:
    """x as its codes say it."""
    codes, scales = quantize_activations(x, kind, device=device)
    return dequantized(codes, scales, (1, ceil_div(x.shape[1], STEP) * STEP), x.dtype, device)


def _launch(x: Array, weight: LinearWeight, activation: str, y: Array, device: Device) -> None:
    codes, x_scale = quantize_activations(x, weight.activations, device=device, pairs=True)
    tensors, (groups, shift) = weight.tensors, step_groups(weight, STEP)
    subtiles = _subtiles(y, weight, groups, device)
    stages = STAGES[subtiles]
    types = f"{type_name('linear_w4a8_sm90', 'y', y)}, {CODE_TYPES[codes.dtype]}, {activation}"
    device.launch(
        Instance(
            "linear_w4a8_sm90",
            f"linear_w4a8_sm90<{types}, {literal('zeros' in tensors)}, {groups}, {subtiles}, {stages}>",
        ),
        (device.num_sms // CLUSTER * CLUSTER,),
        (384,),
        [
            *(Boxes(codes, (TOKENS // CLUSTER * subtiles, STEP)), x_scale),
            *(tensors["weight"], tensors["scales"], tensors.get("zeros"), weight.bias, y),
            *map(np.int32, (x.shape[0], weight.out_features, weight.in_features, shift)),
        ],
        shared_bytes=(stages * subtiles * 16 + 34) << 10,
    )
