"""Many tokens with weights of 4 bits in groups and activations of 8 bits a token. Defined by ref.quant.w4a8.

cuda/linear_w4a8_sm90.cu turns the packed weight into 8-bit operands of wgmma, in registers. Elsewhere activations are
rounded to their codes and multiplied as floating point, by which nothing is won: it is there to be the same function.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.coded8 import FP8, INT8
from engine.kernels.activation import FUNCTIONS
from engine.kernels.check import CODE_TYPES, ceil_div, literal, type_name
from engine.kernels.device import Boxes, Device, Instance
from engine.kernels.linear_w4_many import (
    TILE_TOKENS,
    linear_w4_many,
    linear_w4_many_gate_up_act,
    splits_of_last_round,
    step_groups,
)
from engine.kernels.linear_w8_many import dequantized
from engine.kernels.quantize import PAIRED, quantize_activations
from engine.weights import LinearWeight

Array = Any

MIN_TOKENS = 256
STEP = 128  # columns of a step of linear_w4a8_sm90
TOKENS = 128  # of a product
CLUSTER = 2  # blocks
ROWS = 256  # of a weight, of a tile
STAGES = {1: 6, 2: 4}  # by the products a warpgroup has


@dataclass(frozen=True, slots=True)
class Pace:
    """Microseconds: of a round of tiles, one for each two SMs, of 8192 columns; and of what is no round."""

    of_round: float
    rest: float


# Fitted to times of an H200, 120 of each: linear layers of 72B, of its halves and of 8B, 192 to 2048 tokens, with
# quantization. What they choose is within 3 % of the quickest of all three (4 % once in 220), and on layers of
# 72B from 256 tokens on never slower than activations of 16 bits.
PACES = {INT8: {1: Pace(45.2, 6.5), 2: Pace(75.6, 3.4)}, FP8: {1: Pace(50.3, 6.3), 2: Pace(69.3, 3.7)}}  # by products
PACE_16, SHARING = Pace(88.0, 2.0), 10.0  # SHARING: of tiles, in the last round
COLUMNS = 8192
LEAST_COLUMNS = 4096  # of those that were timed; weights with fewer are multiplied by codes from MIN_TOKENS on
GAIN = 0.96  # of the time with 16 bits, at most: codes cost accuracy


def is_worth_it(x: Array, weight: LinearWeight, device: Device) -> bool:
    """Whether these activations are to be quantized: that is asked for, and quicker where it was timed."""
    if not weight.activations or x.shape[0] < MIN_TOKENS:
        return False
    if not device.has_wgmma or weight.in_features < LEAST_COLUMNS:
        return True
    products, rounds = _quicker(x.shape[0], weight, device)
    pace = PACES[weight.activations][products]
    with_codes = rounds * pace.of_round * weight.in_features / COLUMNS + pace.rest
    return with_codes <= GAIN * _microseconds_16(x.shape[0], weight, device)


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


def _quicker(num_tokens: int, weight: LinearWeight, device: Device) -> tuple[int, int]:
    """(products of a warpgroup, rounds of tiles) that take the least time.

    With more than a group in a step there are too few registers for two products.
    """
    most, row_tiles = 1 if step_groups(weight, STEP)[0] > 1 else 2, ceil_div(weight.out_features, ROWS)
    clusters, paces = device.num_sms // CLUSTER, PACES[weight.activations]
    rounds = {n: ceil_div(ceil_div(num_tokens, n * TOKENS) * row_tiles, clusters) for n in paces if n <= most}
    return min(rounds.items(), key=lambda found: found[1] * paces[found[0]].of_round)


def _microseconds_16(num_tokens: int, weight: LinearWeight, device: Device) -> float:
    """Of linear_w4_sm90, whose last round's tiles are shared by clusters that had none."""
    clusters = device.num_sms // CLUSTER
    tiles = ceil_div(num_tokens, TILE_TOKENS) * ceil_div(weight.out_features, ROWS)
    splits, shared = splits_of_last_round(num_tokens, weight, device)
    rounds = (tiles - shared) // clusters + 1 / splits if shared else ceil_div(tiles, clusters)
    return rounds * PACE_16.of_round * weight.in_features / COLUMNS + PACE_16.rest + (SHARING if shared else 0)


def _rounded(x: Array, kind: str, device: Device) -> Array:
    """x as its codes say it."""
    codes, scales = quantize_activations(x, kind, device=device)
    return dequantized(codes, scales, (1, ceil_div(x.shape[1], STEP) * STEP), x.dtype, device)


def _launch(x: Array, weight: LinearWeight, activation: str, y: Array, device: Device) -> None:
    codes, x_scale = quantize_activations(x, weight.activations, device=device, pairs=True)
    tensors, (groups, shift) = weight.tensors, step_groups(weight, STEP)
    subtiles, _ = _quicker(x.shape[0], weight, device)
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
