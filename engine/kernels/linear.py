"""Dense linear layers on a GPU: cuda/linear.cu for few rows, the vendor's library for many. Defined by ref.linear."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.kernels.check import ceil_div, require, stride, type_name
from engine.kernels.device import Device, Instance
from engine.weights import LinearWeight

Array = Any

SKINNY_TOKENS = 16  # up to here cuda/linear.cu is used


def linear(x: Array, weight: LinearWeight, *, device: Device) -> Array:
    """y = x Wᵀ + bias, [num_tokens, in_features] → [num_tokens, out_features], type of x."""
    stored = weight.tensors["weight"]
    require("linear", "x", x, (None, weight.in_features), stored.dtype)
    y = device.empty((x.shape[0], weight.out_features), x.dtype)
    if not y.size:
        return y
    if x.shape[0] <= SKINNY_TOKENS and weight.in_features % 8 == 0 and x.dtype.name != "float32":
        _skinny(x, stored, weight.bias, y, device)
    else:
        device.matmul(x, stored, y)
        if weight.bias is not None:
            y += weight.bias
    return y


def logits(x: Array, weight: LinearWeight, *, device: Device) -> Array:
    """linear, rounded to nothing: [num_rows, hidden_size] → [num_rows, vocab_size] float32."""
    require("logits", "x", x, (None, weight.in_features), weight.tensors["weight"].dtype)
    y = device.empty((x.shape[0], weight.out_features), np.float32)
    if y.size:
        device.matmul(x, weight.tensors["weight"], y)
        if weight.bias is not None:
            y += weight.bias
    return y


def _skinny(x: Array, weight: Array, bias: Array | None, y: Array, device: Device) -> None:
    num_tokens, (out_features, in_features) = x.shape[0], weight.shape
    token_tiles = 1 if num_tokens <= 8 else 2
    row_tiles, unroll, warps = _shape(out_features, in_features, token_tiles, device.num_sms)
    type_ = type_name("linear", "x", x)
    device.launch(
        Instance("linear", f"linear_skinny<{type_}, {row_tiles}, {token_tiles}, {unroll}>"),
        (ceil_div(out_features, 16 * row_tiles),),
        (32 * warps,),
        [x, weight, bias, y, *map(np.int32, (num_tokens, out_features, in_features, stride(x)))],
        shared_bytes=4 * warps * 16 * row_tiles * 8 * token_tiles,
    )


def _shape(out_features: int, in_features: int, token_tiles: int, num_sms: int) -> tuple[int, int, int]:
    """(row tiles of a block, steps in flight, warps), as measured on an H200 over the shapes of an 8B model."""
    if token_tiles == 2:
        return 1, 4, 8
    blocks = ceil_div(out_features, 16)
    if blocks > 16 * num_sms:  # many: wide blocks of few warps
        return 2, 2, 4
    if blocks > 2 * num_sms:
        return (2, 4, 8) if blocks <= 3 * num_sms else (1, 4, 8)
    return 1, 4, 16  # few: all warps that a block may have
