"""Many tokens with weights of 4 bits in groups. Defined by grouped_linear of ref/quant/groups.py.

cuda/linear_w4_sm90.cu, and linear_w4_narrow_sm90.cu where there are few tiles, have the packed weight in wgmma on
Hopper; elsewhere cuda/linear_w4_dequantize.cu writes the weight out once, and the vendor's library multiplies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.kernels.activation import FUNCTIONS, gate_up_act
from engine.kernels.check import ceil_div, literal, type_name
from engine.kernels.device import Boxes, Device, Instance
from engine.packed4 import PACKED_GATED
from engine.weights import LinearWeight

Array = Any


@dataclass(frozen=True, slots=True)
class Wgmma:
    """A kernel with the packed weight in wgmma; the numbers are those of its file."""

    stem: str
    box_tokens: int  # that a block fetches
    step: int  # columns
    stages: int
    stage_bytes: int  # of shared memory
    group_bytes: int  # of each group of a step, in a stage
    other_bytes: int

    def shared_bytes(self, groups: int) -> int:
        return self.stages * (self.stage_bytes + groups * self.group_bytes) + self.other_bytes


WIDE = Wgmma("linear_w4_sm90", 128, 64, 5, 32768, 0, 67584)  # tiles of 256 tokens by 256 rows
NARROW = Wgmma("linear_w4_narrow_sm90", 64, 128, 4, 40960, 384, 34048)  # of 128 tokens
# Milliseconds of the linear layers of a 72B model on an H200, narrow tiles and wide ones: 42.9 and 58.7 for 128 tokens,
# 59.3 and 51.0 for 192, 61.1 and 53.4 for 256, 119 and 97.9 for 512. The weight decoded for the vendor's library takes
# 1.9, 1.6 and 1.4 times as long for 64, 256 and 512 tokens; for 8192, until power is the limit of both, 1854 for 1785.
NARROW_TOKENS = 128  # up to here
NARROW_OF_COLUMN = 7.25e-3  # microseconds of narrow tiles, one for each two SMs, of a column; 64 tokens and 128 alike
TILE_TOKENS, TILE_ROWS = 256, 256  # of WIDE
OUT_BYTES, GATED_OUT_BYTES = 128, 64  # a token of a box of its y
SPLITS = (4, 2)  # clusters that share a tile of the last round
PARTIALS = TILE_TOKENS * TILE_ROWS  # sums that each of them leaves to the last
LEAST_STEPS = 8  # of 64 columns, for each of them
WHOLE = 30  # by so many bits a group index is shifted where there is one group


def linear_w4_many(kernel: str, x: Array, weight: LinearWeight, y: Array, device: Device) -> None:
    """y = x Wᵀ + bias, arrays that fit each other; y may be float32."""
    if _is_large(y, device):
        _launch_large(kernel, x, weight, "kNone", y, device)
        return
    device.matmul(x, linear_w4_dequantize(weight, x.dtype, device=device), y)
    if weight.bias is not None:
        y += weight.bias


def linear_w4_many_gate_up_act(
    kernel: str, x: Array, weight: LinearWeight, activation: str, *, device: Device
) -> Array:
    """y = gate_up_act(x Wᵀ + bias), each product rounded, [num_tokens, size]; arrays that fit each other."""
    y = device.empty((x.shape[0], weight.out_features // 2), x.dtype)
    if _is_large(y, device):
        _launch_large(kernel, x, weight, FUNCTIONS[activation], y, device)
        return y
    z = device.empty((x.shape[0], weight.out_features), x.dtype)
    device.matmul(x, linear_w4_dequantize(weight, x.dtype, device=device), z)
    if weight.bias is not None:
        z += weight.bias
    return gate_up_act(z, activation, device=device)


def linear_w4_dequantize(weight: LinearWeight, dtype: Any, *, device: Device) -> Array:
    """The weight [out_features, in_features] in dtype; of a gated one all gates first."""
    y = device.empty((weight.out_features, weight.in_features), dtype)
    tensors = weight.tensors
    gated = weight.format == PACKED_GATED
    kind = type_name("linear_w4_dequantize", "dtype", y)
    entry = f"linear_w4_dequantize<{kind}, {literal(gated)}, {literal('zeros' in tensors)}>"
    group_size = ceil_div(weight.in_features, tensors["scales"].shape[0])
    device.launch(
        Instance("linear_w4_dequantize", entry),
        (tensors["weight"].shape[1] // 2, tensors["weight"].shape[0] // 4),
        (128,),
        [tensors["weight"], tensors["scales"], tensors.get("zeros"), y, *map(np.int32, (*y.shape, group_size))],
    )
    return y


def splits_of_last_round(num_tokens: int, weight: LinearWeight, device: Device) -> tuple[int, int]:
    """(how many clusters share a tile of the last round, tiles that are shared): as many as there are clusters for."""
    clusters = device.num_sms // 2
    last = ceil_div(num_tokens, TILE_TOKENS) * ceil_div(weight.out_features, TILE_ROWS) % clusters
    steps = ceil_div(weight.in_features, WIDE.step)
    found = (splits for splits in SPLITS if 0 < last * splits <= clusters and steps >= LEAST_STEPS * splits)
    splits = next(found, 1)
    return splits, last if splits > 1 else 0


def narrow_microseconds(weight: LinearWeight, device: Device) -> float:
    """Of up to NARROW_TOKENS tokens, as fitted to times of an H200, on which layers of 72B and 8B take 31 to 252."""
    rounds = ceil_div(ceil_div(weight.out_features, TILE_ROWS), device.num_sms // 2)
    return rounds * weight.in_features * NARROW_OF_COLUMN


def _launch_large(kernel: str, x: Array, weight: LinearWeight, activation: str, y: Array, device: Device) -> None:
    tensors, chosen = weight.tensors, NARROW if x.shape[0] <= NARROW_TOKENS else WIDE
    groups, shift = step_groups(weight, chosen.step)
    types = f"{type_name(kernel, 'x', x)}, {activation}, {literal('zeros' in tensors)}"
    packed = tensors["weight"], tensors["scales"], tensors.get("zeros"), weight.bias
    sizes = x.shape[0], weight.out_features, weight.in_features, shift
    if chosen is WIDE:
        splits, shared = splits_of_last_round(x.shape[0], weight, device)
        out_bytes = OUT_BYTES if activation == "kNone" else GATED_OUT_BYTES
        partials = device.empty((shared * splits, PARTIALS), np.float32)
        out = Boxes(y, (TILE_TOKENS, out_bytes // y.itemsize))
        arguments = [out, *packed, partials, device.counters, *map(np.int32, (*sizes, splits))]
    else:
        arguments = [*packed, y, *map(np.int32, sizes)]
    device.launch(
        Instance(chosen.stem, f"{chosen.stem}<{types}, {groups}, {chosen.stages}>"),
        (device.num_sms // 2 * 2,),
        (384,),
        [Boxes(x, (chosen.box_tokens, 64)), *arguments],
        shared_bytes=chosen.shared_bytes(groups),
    )


def _is_large(y: Array, device: Device) -> bool:
    """Whether the kernels with wgmma can write y."""
    return bool(device.has_wgmma) and y.shape[1] % 8 == 0 and y.dtype != np.float32


def step_groups(weight: LinearWeight, step: int) -> tuple[int, int]:
    """Groups of a step of so many columns, and by how many bits their index is shifted: see the kernels."""
    group_size = ceil_div(weight.in_features, weight.tensors["scales"].shape[0])
    if weight.tensors["scales"].shape[0] == 1:
        return 1, WHOLE
    groups = max(1, step // group_size)
    return groups, (group_size * groups // step).bit_length() - 1
