"""Linear layers whose weights are of 8 bits, for many tokens. Defined by ref.quant.int8, ref.quant.fp8, ref.quant.fp8_block."""

from __future__ import annotations

from typing import Any

from engine.errors import KernelError
from engine.kernels.device import Device
from engine.weights import LinearWeight

Array = Any


def linear_w8_many(x: Array, x_scale: Array | None, weight: LinearWeight, *, device: Device, dtype: Any) -> Array:
    """y = x Wᵀ + bias in dtype, [num_tokens, in_features] → [num_tokens, out_features].

    Args:
        x: int8 or uint8 codes, of the weight's kind; or bfloat16 or float16, for an fp8 weight alone.
        x_scale: float32 [num_tokens], [num_tokens, ⌈in_features / 128⌉] for a weight in blocks; None: x is in floating
            point.
    Raises:
        KernelError: no kernel of ours does it.
    """
    raise KernelError(f"linear_w8_many: {x.shape[0]} tokens; there is no kernel for so many yet")


def linear_w8_many_gate_up_act(
    x: Array, x_scale: Array | None, weight: LinearWeight, activation: str, *, device: Device, dtype: Any
) -> Array:
    """gate_up_act of the above, each product rounded to dtype: [num_tokens, out_features / 2]."""
    raise KernelError(f"linear_w8_many: {x.shape[0]} tokens; there is no kernel for so many yet")
