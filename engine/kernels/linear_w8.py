"""Linear layers whose weights are of 8 bits. Defined by ref.quant.int8, ref.quant.fp8 and ref.quant.fp8_block.

Activations are quantized first, by the same rule for any number of tokens. cuda/linear_w8.cu streams the weights for few
tokens; engine.kernels.linear_w8_many is for more.
"""

from __future__ import annotations

from typing import Any

from engine.errors import KernelError
from engine.kernels.activation import FUNCTIONS
from engine.kernels.device import Device
from engine.kernels.linear_w8_many import linear_w8_many, linear_w8_many_gate_up_act
from engine.kernels.quantize import FP8, FP8_BLOCK, INT8, quantize_activations
from engine.weights import LinearWeight

Array = Any

FORMATS = ("int8", "fp8")  # of LinearWeight
FEW_TOKENS = 0  # up to here linear_w8.cu


def linear_w8(x: Array, weight: LinearWeight, *, device: Device, dtype: Any = None) -> Array:
    """y = x Wᵀ + bias, [num_tokens, in_features] → [num_tokens, out_features], type of x or dtype.

    The weight's tensors: "weight" [out_features, in_features], int8 for format "int8", uint8 for "fp8"; "scale" float32
    [out_features], for fp8 also [1] or [⌈out_features / 128⌉, ⌈in_features / 128⌉]; "input_scale" float32 [1] if
    activations have a fixed scale.
    """
    dtype = x.dtype if dtype is None else dtype
    xq, x_scale = _quantized(x, weight, device)
    return linear_w8_many(xq, x_scale, weight, device=device, dtype=dtype)


def linear_w8_gate_up_act(x: Array, weight: LinearWeight, activation: str, *, device: Device) -> Array:
    """gate_up_act(linear_w8(x, weight), activation), each product rounded.

    [num_tokens, in_features] → [num_tokens, size] with size = out_features / 2.
    """
    if activation not in FUNCTIONS:
        raise KernelError(
            f"linear_w8_gate_up_act: the activation {activation!r} has no kernel; there are {', '.join(FUNCTIONS)}"
        )
    xq, x_scale = _quantized(x, weight, device)
    return linear_w8_many_gate_up_act(xq, x_scale, weight, activation, device=device, dtype=x.dtype)


def _quantized(x: Array, weight: LinearWeight, device: Device) -> tuple[Array, Array | None]:
    """What the kernels multiply by: codes and scales, or x itself where there are no FP8 tensor cores."""
    if weight.format == "fp8" and not device.has_fp8:
        return x, None
    scale = weight.tensors["scale"]
    kind = INT8 if weight.format == "int8" else FP8_BLOCK if scale.ndim == 2 else FP8
    return quantize_activations(x, kind, device=device, input_scale=weight.tensors.get("input_scale"))
