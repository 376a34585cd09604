"""Activation functions on a GPU: cuda/activation.cu. Defined by ref.activation."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.errors import KernelError
from engine.kernels.check import ceil_div, require, stride, type_name, width
from engine.kernels.device import Device, Instance

Array = Any

MAX_THREADS = 256
FUNCTIONS = {  # names of config.json → the kernel's
    **dict.fromkeys(("silu", "swish"), "kSilu"),
    "gelu": "kGelu",
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh"), "kGeluTanh"),
    "relu": "kRelu",
}


def act(x: Array, activation: str, *, device: Device) -> Array:
    """[num_tokens, size] → the same."""
    return _launch("act", x, x.shape[-1], activation, device)


def gate_up_act(gate_up: Array, activation: str = "silu", *, device: Device) -> Array:
    """f(gate) · up: [num_tokens, 2 · size], gate first → [num_tokens, size]."""
    return _launch("gate_up_act", gate_up, gate_up.shape[-1] // 2, activation, device)


def _launch(kernel: str, x: Array, size: int, activation: str, device: Device) -> Array:
    name = "x" if kernel == "act" else "gate_up"
    require(kernel, name, x, (None, size if kernel == "act" else 2 * size))
    if activation not in FUNCTIONS:
        raise KernelError(f"{kernel}: the activation {activation!r} has no kernel; there are {', '.join(FUNCTIONS)}")
    y = device.empty((x.shape[0], size), x.dtype)
    if y.size:
        instance = Instance("activation", f"{kernel}<{type_name(kernel, name, x)}, {FUNCTIONS[activation]}>")
        pieces = ceil_div(size, width(x))
        threads = min(MAX_THREADS, 32 * ceil_div(pieces, 32))
        grid = (x.shape[0], ceil_div(pieces, threads))
        device.launch(instance, grid, (threads,), (x, y, np.int32(size), stride(x)))
    return y
