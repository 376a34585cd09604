"""RMSNorm on a GPU: cuda/rmsnorm.cu. Defined by ref.rmsnorm."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.errors import KernelError
from engine.kernels.check import ceil_div, require, require_contiguous, require_half, stride, type_name, width
from engine.kernels.device import Device, Instance

Array = Any

MAX_THREADS = 512
MAX_ROUNDS = 8


def row_shape(kernel: str, x: Array) -> tuple[int, int]:
    """Threads of a block and rounds of a thread, so that they cover a row of x [num_rows, size] by 16 bytes each.

    Raises:
        KernelError: the row is longer than the largest block covers.
    """
    pieces = ceil_div(x.shape[-1], width(x))
    rounds = ceil_div(pieces, MAX_THREADS)
    if rounds > MAX_ROUNDS:
        raise KernelError(
            f"{kernel}: rows of {x.shape[-1]}; at most {MAX_THREADS * MAX_ROUNDS * width(x)} are possible"
        )
    return 32 * ceil_div(ceil_div(pieces, rounds), 32), rounds


def rmsnorm(x: Array, weight: Array, eps: float, *, device: Device) -> Array:
    """x [num_tokens, hidden_size], weight [hidden_size] → [num_tokens, hidden_size], all of one type."""
    return _norm("rmsnorm", x, weight, eps, None, device)


def rmsnorm_ordered(x: Array, weight: Array, eps: float, order: Array, *, device: Device) -> Array:
    """rmsnorm, of which [:, k] is that at order[k].

    order: [hidden_size] uint16, below hidden_size; of types of 16 bits, and a multiple of 8 of them.
    """
    return _norm("rmsnorm_ordered", x, weight, eps, order, device)


def add_rmsnorm(x: Array, residual: Array, weight: Array, eps: float, *, device: Device) -> tuple[Array, Array]:
    """(normed, x + residual), as rmsnorm; the new residual is written over the old one."""
    return _add_norm("add_rmsnorm", x, residual, weight, eps, None, device)


def add_rmsnorm_ordered(
    x: Array, residual: Array, weight: Array, eps: float, order: Array, *, device: Device
) -> tuple[Array, Array]:
    """The same as rmsnorm_ordered; the new residual is in its own order."""
    return _add_norm("add_rmsnorm_ordered", x, residual, weight, eps, order, device)


def _norm(kernel: str, x: Array, weight: Array, eps: float, order: Array | None, device: Device) -> Array:
    require(kernel, "x", x, (None, None))
    require(kernel, "weight", weight, (x.shape[1],), x.dtype)
    places, shared_bytes = _places(kernel, x, order)
    y = device.empty(x.shape, x.dtype)
    if x.size:
        threads, rounds = row_shape(kernel, x)
        instance = Instance("rmsnorm", f"{kernel}<{type_name(kernel, 'x', x)}, {rounds}>")
        arguments = (x, weight, *places, y, np.int32(x.shape[1]), stride(x), np.float32(eps))
        device.launch(instance, (x.shape[0],), (threads,), arguments, shared_bytes)
    return y


def _add_norm(
    kernel: str, x: Array, residual: Array, weight: Array, eps: float, order: Array | None, device: Device
) -> tuple[Array, Array]:
    require(kernel, "x", x, (None, None))
    require(kernel, "residual", residual, x.shape, x.dtype)
    require(kernel, "weight", weight, (x.shape[1],), x.dtype)
    require_contiguous(kernel, "weight", weight)
    places, shared_bytes = _places(kernel, x, order)
    y = device.empty(x.shape, x.dtype)
    if x.size:
        threads, rounds = row_shape(kernel, x)
        instance = Instance("rmsnorm", f"{kernel}<{type_name(kernel, 'x', x)}, {rounds}>")
        arguments = (x, residual, weight, *places, y, residual, np.int32(x.shape[1]))
        strides = (stride(x), stride(residual), stride(residual))
        device.launch(instance, (x.shape[0],), (threads,), (*arguments, *strides, np.float32(eps)), shared_bytes)
    return y, residual


def _places(kernel: str, x: Array, order: Array | None) -> tuple[tuple[Array, ...], int]:
    """What an order adds to the arguments, and the shared memory that it takes.

    Raises:
        KernelError: it does not fit x.
    """
    if order is None:
        return (), 0
    require(kernel, "order", order, (x.shape[1],), np.dtype(np.uint16))
    require_contiguous(kernel, "order", order)
    require_half(kernel, "x", x)
    if x.shape[1] % width(x):
        raise KernelError(f"{kernel}: an order of {x.shape[1]} elements; expected a multiple of {width(x)}")
    return (order,), int(x.shape[1] * x.itemsize)
