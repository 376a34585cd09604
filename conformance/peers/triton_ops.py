"""A kernel in Triton as a function of our op table; GPU only."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from conformance.peers.torch_ops import array_like, tensor

Array = Any


@triton.jit
def _rmsnorm(x, weight, y, x_stride, size, eps, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    at = tl.arange(0, block)
    values = tl.load(x + row * x_stride + at, mask=at < size, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values, axis=0) / size + eps)
    weights = tl.load(weight + at, mask=at < size, other=0.0).to(tl.float32)
    tl.store(y + row * size + at, values * scale * weights, mask=at < size)


def rmsnorm(x: Array, weight: Array, eps: float) -> Array:
    rows = tensor(x)
    y = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    if y.numel():
        block = triton.next_power_of_2(rows.shape[1])
        _rmsnorm[(rows.shape[0],)](rows, tensor(weight), y, rows.stride(0), rows.shape[1], eps, block=block)
    return array_like(y, x)
