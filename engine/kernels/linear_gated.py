"""linear_gate_up_act of many tokens on Hopper, in one kernel: cuda/linear_gated_sm90.cu. Defined by ref.linear."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.kernels.check import is_aligned, type_name
from engine.kernels.device import Boxes, Device, Instance
from engine.weights import LinearWeight

Array = Any

TOKENS, OUTS = 256, 128  # of a tile that two blocks share
BOX = (128, 64)
STAGES = 3
SHARED_BYTES = STAGES * 49152 + 66816
MIN_TILES = 13.5  # for two SMs: with fewer, SMs wait too long for the last of them


def suits(x: Array, weight: LinearWeight, device: Device) -> bool:
    """Whether the kernel can read these, and is quicker than the vendor's library with gate_up_act behind it."""
    if not device.has_wgmma or weight.bias is not None or x.dtype.name == "float32":
        return False
    size = weight.out_features // 2
    if size % 8 or x.shape[1] % 8 or not is_aligned(x):
        return False
    return bool(x.shape[0] * size >= MIN_TILES * (device.num_sms // 2) * TOKENS * OUTS)


def launch_gated(x: Array, weight: Array, y: Array, activation: str, device: Device) -> None:
    """y = f(gate) · up. activation: its name in cuda/include/activation.cuh."""
    entry = f"linear_gated_sm90<{type_name('linear_gate_up_act', 'x', x)}, {activation}, {STAGES}>"
    device.launch(
        Instance("linear_gated_sm90", entry),
        (device.num_sms // 2 * 2,),
        (384,),
        [Boxes(x, BOX), Boxes(weight, BOX), y, *map(np.int32, (*y.shape, x.shape[1]))],
        shared_bytes=SHARED_BYTES,
    )
