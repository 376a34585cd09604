"""Activations in 8 bits on a GPU: cuda/quantize.cu. Defined by ref.quant.fused."""

from __future__ import annotations

from typing import Any

from engine.errors import KernelError
from engine.kernels.device import Device

Array = Any

INT8, FP8, FP8_BLOCK = "int8", "fp8", "fp8_block"  # kinds of ref.quant.fused
BLOCK = 128  # neighbours of a token with a scale of their own, in fp8_block


def quantize_activations(
    x: Array, kind: str, *, device: Device, input_scale: Array | None = None
) -> tuple[Array, Array]:
    """Codes and scales: x [num_tokens, n] → (int8 or uint8 [num_tokens, n], float32 [num_tokens]).

    Of kind "fp8_block" the scales are [num_tokens, ⌈n / 128⌉].

    Args:
        input_scale: float32 [1], of the checkpoint; the scale of every token then. None: found anew for each.
    """
    raise KernelError("quantize_activations: there is no kernel for it yet")
