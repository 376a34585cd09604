"""Activations in 8 bits on a GPU, alone or behind a norm: cuda/quantize.cu. Defined by ref.quant.fused."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.coded8 import FP8, INT8, CodedActivations
from engine.errors import KernelError
from engine.kernels.check import ceil_div, literal, require, require_contiguous, require_half, stride, type_name
from engine.kernels.device import Argument, Device, Instance
from engine.kernels.rmsnorm import add_rmsnorm, rmsnorm, row_shape
from engine.weights import LinearWeight

Array = Any

FP8_BLOCK = "fp8_block"  # a kind of ref.quant.fused, as INT8 and FP8 are
GROUP = 128  # neighbours of a token with a scale of their own, in fp8_block
PAIRED = 16  # columns whose codes go together, in pairs
OWN_TOKENS, OWN_NUMBERS = 1, 16384  # see quantizes_itself
CODES = {INT8: ("signed char", np.int8), FP8: ("e4m3", np.uint8), FP8_BLOCK: ("e4m3", np.uint8)}


def quantize_activations(
    x: Array, kind: str, *, device: Device, input_scale: Array | None = None, pairs: bool = False
) -> tuple[Array, Array]:
    """Codes and scales: x [num_tokens, n] → (int8 or uint8 [num_tokens, n], float32 [num_tokens]).

    Of kind "fp8_block" the scales are [num_tokens, ⌈n / 128⌉].

    Args:
        input_scale: float32 [1], of the checkpoint; the scale of every token then. None: found anew for each.
        pairs: the codes of every 16 columns in the order 0, 8, 1, 9 … 7, 15, as linear_w4a8_sm90 reads them; n is a
            multiple of 16 then.
    """
    kernel = "quantize"
    if pairs and x.shape[1] % PAIRED:
        raise KernelError(f"{kernel}: {x.shape[1]} columns in pairs; expected a multiple of {PAIRED}")
    codes, scales = _answer(kernel, x, kind, input_scale, device)
    arguments = (x, codes, scales, input_scale, np.int32(x.shape[1]), stride(x))
    _launch(kernel, x, kind, arguments, device, f", {literal(pairs)}")
    return codes, scales


def kind_of(weight: LinearWeight) -> str:
    """How activations of a layer of 8 bits are quantized: a name of ref.quant.fused."""
    return FP8_BLOCK if weight.tensors["scale"].ndim == 2 else weight.format


def norm_quant(x: Array, weight: Array, eps: float, into: LinearWeight, *, device: Device) -> Array | CodedActivations:
    """rmsnorm(x, weight, eps) as the layer takes it: quantized, bit by bit as the layer itself would, or as it is."""
    if not _takes_codes(into, x, device):
        return rmsnorm(x, weight, eps, device=device)
    kernel, kind, input_scale = "rmsnorm_quantize", kind_of(into), into.tensors.get("input_scale")
    require(kernel, "weight", weight, (x.shape[1],), x.dtype)
    codes, scales = _answer(kernel, x, kind, input_scale, device)
    sizes = (np.int32(x.shape[1]), stride(x), np.float32(eps))
    _launch(kernel, x, kind, (x, weight, codes, scales, input_scale, *sizes), device)
    return CodedActivations(codes, scales, x.dtype)


def add_norm_quant(
    x: Array, residual: Array, weight: Array, eps: float, into: LinearWeight, *, device: Device
) -> tuple[Array | CodedActivations, Array]:
    """(norm_quant(x + residual), x + residual); the new residual is written over the old one."""
    if not _takes_codes(into, x, device):
        return add_rmsnorm(x, residual, weight, eps, device=device)
    kernel, kind, input_scale = "add_rmsnorm_quantize", kind_of(into), into.tensors.get("input_scale")
    require(kernel, "residual", residual, x.shape, x.dtype)
    require(kernel, "weight", weight, (x.shape[1],), x.dtype)
    codes, scales = _answer(kernel, x, kind, input_scale, device)
    sizes = (np.int32(x.shape[1]), stride(x), stride(residual), stride(residual), np.float32(eps))
    _launch(kernel, x, kind, (x, residual, weight, codes, scales, input_scale, residual, *sizes), device)
    return CodedActivations(codes, scales, x.dtype), residual


def multiplies_codes(weight: LinearWeight, device: Device) -> bool:
    """Whether tensor cores multiply codes like the weight's."""
    return weight.format != FP8 or device.has_fp8


def quantizes_itself(num_tokens: int, in_features: int) -> bool:
    """Whether linear_w8 quantizes so few numbers itself: quicker than a kernel for it, or a norm that does it too."""
    return num_tokens <= OWN_TOKENS and num_tokens * in_features <= OWN_NUMBERS


def _takes_codes(into: LinearWeight, x: Array, device: Device) -> bool:
    return multiplies_codes(into, device) and not quantizes_itself(*x.shape)


def _answer(kernel: str, x: Array, kind: str, input_scale: Array | None, device: Device) -> tuple[Array, Array]:
    """Room for codes and scales. Raises KernelError for what the kernels do not take."""
    require(kernel, "x", x, (None, None))
    if kind not in CODES:
        raise KernelError(f"{kernel}: the kind is {kind!r}; there are {', '.join(CODES)}")
    if input_scale is not None:
        require(kernel, "input_scale", input_scale, (1,), np.dtype(np.float32))
        require_contiguous(kernel, "input_scale", input_scale)
        if kind == FP8_BLOCK:
            raise KernelError(f"{kernel}: an input_scale, and groups that have scales of their own")
    num_tokens, size = x.shape
    shape = (num_tokens, ceil_div(size, GROUP)) if kind == FP8_BLOCK else (num_tokens,)
    return device.empty(x.shape, CODES[kind][1]), device.empty(shape, np.float32)


def _launch(kernel: str, x: Array, kind: str, arguments: tuple[Argument, ...], device: Device, more: str = "") -> None:
    require_half(kernel, "x", x)
    if not x.size:
        return
    threads, rounds = row_shape(kernel, x)
    entry = f"{kernel}<{CODES[kind][0]}, {literal(kind == FP8_BLOCK)}, {type_name(kernel, 'x', x)}, {rounds}{more}>"
    device.launch(Instance("quantize", entry), (x.shape[0],), (threads,), arguments)
