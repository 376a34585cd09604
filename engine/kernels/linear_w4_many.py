"""Many tokens with weights of 4 bits in groups. Defined by grouped_linear of ref/quant/groups.py.

cuda/linear_w4_sm90.cu has the packed weight in wgmma on Hopper; elsewhere cuda/linear_w4_dequantize.cu writes the
weight out once, and the vendor's library multiplies.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.kernels.activation import FUNCTIONS, gate_up_act
from engine.kernels.check import ceil_div, type_name
from engine.kernels.device import Boxes, Device, Instance
from engine.packed4 import PACKED_GATED
from engine.weights import LinearWeight

Array = Any

LARGE_STEP = 64  # columns of a step of linear_w4_sm90
LARGE_TOKENS = 128  # of a block's half of a tile of linear_w4_sm90
LARGE_STAGES = 5
LARGE_SHARED_BYTES = LARGE_STAGES * 32768 + 65536 + 2048
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
    entry = f"linear_w4_dequantize<{kind}, {_bool(gated)}, {_bool('zeros' in tensors)}>"
    group_size = ceil_div(weight.in_features, tensors["scales"].shape[0])
    device.launch(
        Instance("linear_w4_dequantize", entry),
        (tensors["weight"].shape[1] // 2, tensors["weight"].shape[0] // 4),
        (128,),
        [tensors["weight"], tensors["scales"], tensors.get("zeros"), y, *map(np.int32, (*y.shape, group_size))],
    )
    return y


def _launch_large(kernel: str, x: Array, weight: LinearWeight, activation: str, y: Array, device: Device) -> None:
    tensors = weight.tensors
    groups, shift = step_groups(weight, LARGE_STEP)
    zeros = _bool("zeros" in tensors)
    entry = f"linear_w4_sm90<{type_name(kernel, 'x', x)}, {activation}, {zeros}, {groups}, {LARGE_STAGES}>"
    device.launch(
        Instance("linear_w4_sm90", entry),
        (device.num_sms // 2 * 2,),
        (384,),
        [
            *(Boxes(x, (LARGE_TOKENS, LARGE_STEP)), tensors["weight"], tensors["scales"], tensors.get("zeros")),
            *(weight.bias, y, *map(np.int32, (x.shape[0], weight.out_features, weight.in_features, shift))),
        ],
        shared_bytes=LARGE_SHARED_BYTES,
    )


def _is_large(y: Array, device: Device) -> bool:
    """Whether linear_w4_sm90 can write y."""
    return bool(device.has_wgmma) and y.shape[1] % 8 == 0 and y.dtype != np.float32


def step_groups(weight: LinearWeight, step: int) -> tuple[int, int]:
    """Groups of a step of so many columns, and by how many bits their index is shifted: see the kernels."""
    group_size = ceil_div(weight.in_features, weight.tensors["scales"].shape[0])
    if weight.tensors["scales"].shape[0] == 1:
        return 1, WHOLE
    groups = max(1, step // group_size)
    return groups, (group_size * groups // step).bit_length() - 1


def _bool(value: bool) -> str:
    return "true" if value else "false"
