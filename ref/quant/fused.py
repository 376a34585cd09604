"""Quantization at the edges of other operations, as fused kernels do it: one pass over memory in place of two or three.

Each is composed of the plain functions and is equal to them bit by bit; what fusion saves is writing the number in
between. `norm_quant` opens a block whose projections take 8-bit input, `dequant_add_norm` closes a block whose output
comes in integers: from an int8 matmul, or in groups of 32 from the wire of an INT8 all-reduce.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ref.numerics import round_to
from ref.quant.fp8 import fp8_quantize
from ref.quant.fp8_block import fp8_quantize_token_groups
from ref.quant.int8 import int8_quantize
from ref.rmsnorm import add_rmsnorm, rmsnorm

Array = NDArray[Any]

KINDS = ("int8", "fp8", "fp8_block")


def quantize_activations(x: Array, kind: str) -> tuple[Array, Array]:
    """Codes and scales of activations: per token ("int8", "fp8") or per token and 128 ("fp8_block").

    Composed of: int8_quantize, fp8_quantize, fp8_quantize_token_groups (one of them).

    Args:
        x: [num_tokens, n], floating.
    Returns:
        (codes [num_tokens, n] int8 or uint8, scales [num_tokens] or [num_tokens, ⌈n / 128⌉] in x's dtype).
    Raises:
        ValueError: another kind.
    """
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}; known are {', '.join(KINDS)}")
    if kind == "int8":
        return int8_quantize(x)
    return fp8_quantize(x) if kind == "fp8" else fp8_quantize_token_groups(x)


def norm_quant(x: Array, weight: Array, eps: float, kind: str, *, storage: str | None = None) -> tuple[Array, Array]:
    """quantize_activations(rmsnorm(x, weight, eps)).

    Composed of: rmsnorm, quantize_activations.

    Args:
        x: [num_tokens, hidden_size].
        weight: [hidden_size].
    Returns:
        (codes, scales), shapes and dtypes as quantize_activations gives them.
    Raises:
        ValueError: see quantize_activations.

    Numerics: storage rounds the norm before it is quantized, so that it is all one whether one kernel does both.
    """
    return quantize_activations(round_to(rmsnorm(x, weight, eps), storage), kind)


def add_norm_quant(
    x: Array, residual: Array, weight: Array, eps: float, kind: str, *, storage: str | None = None
) -> tuple[Array, Array, Array]:
    """new_residual = x + residual, then norm_quant of it.

    Composed of: norm_quant.

    Args:
        x, residual: [num_tokens, hidden_size].
        weight: [hidden_size].
    Returns:
        (codes, scales, new_residual): shapes and dtypes of the first two as quantize_activations gives them, of the
        third as residual, rounded to storage before it is normed, as the norm is before it is quantized.
    Raises:
        ValueError: see quantize_activations.
    """
    new_residual = round_to(x + residual, storage)
    codes, scales = norm_quant(new_residual, weight, eps, kind, storage=storage)
    return codes, scales, new_residual


def dequant_add_norm(
    q: NDArray[np.integer[Any]],
    scales: Array,
    residual: Array,
    weight: Array,
    eps: float,
    *,
    storage: str | None = None,
) -> tuple[Array, Array]:
    """add_rmsnorm(q · scale, residual): the end of a block whose output is in integers.

    Composed of: add_rmsnorm.

    Args:
        q: [num_tokens, hidden_size], int8 in groups or int32 sums.
        scales: [num_tokens, num_groups], a scale for each hidden_size / num_groups neighbours. An int8 matmul has
            num_groups = hidden_size and scales x_scale[:, None] · w_scale.
        residual: [num_tokens, hidden_size].
        weight: [hidden_size].
    Returns:
        (normed, new_residual), both [num_tokens, hidden_size], dtype of residual.
    Raises:
        ValueError: num_groups does not divide hidden_size.

    Numerics: q · scale and the sum are in residual's dtype; storage rounds the sum, then the norm.
    """
    if scales.shape[1] < 1 or q.shape[1] % scales.shape[1]:
        raise ValueError(f"{scales.shape[1]} groups do not divide a hidden_size of {q.shape[1]}")
    expanded = np.repeat(scales.astype(residual.dtype), q.shape[1] // scales.shape[1], axis=1)
    return add_rmsnorm(q.astype(residual.dtype) * expanded, residual, weight, eps, storage=storage)
