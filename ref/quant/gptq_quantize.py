"""GPTQ: rounding a weight one input at a time, and letting the inputs that follow make up for the error.

What matters is the output, ‖x Wᵀ − x Qᵀ‖², not the weight. Its second derivative is the same for every output row:
H = 2 Σ x xᵀ over calibration tokens. Rounding input i of a row leaves an error e; the best that the remaining inputs
can do is to move by −e · H⁻¹[i, rest] / H⁻¹[i, i], with the inverse of H over the inputs that are left. All those
inverses stand in one Cholesky factor: with H⁻¹ = Uᵀ U, U upper, row i of U is that row of H⁻¹ divided by its root, so

    e = (w[i] − q[i]) / U[i, i]          w[j] −= e · U[i, j]   for j > i

Inputs are taken in blocks only so that memory is passed over less often. act_order takes the inputs with the largest
diagonal of H first, which is what g_idx records. Source: Frantar et al. 2022, "GPTQ", algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ref.numerics import round_to
from ref.quant.groups import GroupedInt, group_index, grouped_quantize

Array = NDArray[Any]


def gptq_hessian(x: Array) -> Array:
    """2 Σ x xᵀ: calibration activations [num_tokens, in] → [in, in], same dtype."""
    hessian: Array = 2 * x.T @ x
    return hessian


def gptq_quantize(
    weight: Array,
    hessian: Array,
    bits: int,
    group_size: int,
    *,
    symmetric: bool = True,
    act_order: bool = False,
    damp: float = 0.01,
    block: int = 128,
    storage: str | None = None,
    shares: Sequence[float] = (1.0,),
) -> GroupedInt:
    """A weight in grouped integers whose output error on the calibration tokens is small.

    Args:
        weight: [out, in].
        hessian: [in, in], from gptq_hessian.
        bits, group_size, symmetric, shares: as in grouped_quantize.
        act_order: inputs in the order of falling diagonal of hessian.
        damp: this share of the mean diagonal is added to the diagonal, so that the inverse exists.
        block: inputs that are finished before their error reaches those beyond.
        storage: the type of scales in a checkpoint; they are rounded to it before a weight is.
    Raises:
        ValueError: group_size does not divide in; bits are not 4 or 8; hessian has another shape.

    Numerics: in float64. A group's scale and zero are those of round to nearest, of the weights as they stand when
    its first input is reached.
    Edge cases: an input that was always zero has its weights set to zero.
    """
    out_features, in_features = weight.shape
    if hessian.shape != (in_features, in_features):
        raise ValueError(f"hessian has shape {list(hessian.shape)}; the weight's {in_features} inputs ask for as many")
    groups = group_index(in_features, group_size)
    size = in_features // (int(groups[-1]) + 1)
    order = np.argsort(-np.diag(hessian), kind="stable") if act_order else np.arange(in_features)
    w, upper = _prepare(weight.astype(np.float64)[:, order], hessian.astype(np.float64)[np.ix_(order, order)], damp)
    q = np.zeros((out_features, in_features), np.uint8)
    scales, zeros = (
        np.zeros((out_features, in_features // size)),
        np.zeros((out_features, in_features // size), np.uint8),
    )
    for begin in range(0, in_features, block):
        end = min(begin + block, in_features)
        errors = np.zeros((out_features, end - begin))
        for i in range(begin, end):
            if i % size == 0:  # what earlier blocks owe to this group is paid; within a block it may be owed still
                ahead = w[:, i : i + size].copy()
                ahead[:, max(end - i, 0) :] -= errors @ upper[begin:end, end : i + size]
                found = grouped_quantize(ahead, bits, -1, symmetric=symmetric, shares=shares)
                scales[:, groups[i], None] = round_to(found.scales, storage)
                zeros[:, groups[i], None] = found.zeros
            scale, zero = scales[:, groups[i]], zeros[:, groups[i]].astype(np.float64)
            steps = np.rint(w[:, i] / np.where(scale > 0, scale, 1)) * (scale > 0) + zero
            q[:, i] = np.clip(steps, 0, 2**bits - 1)
            errors[:, i - begin] = (w[:, i] - (q[:, i] - zero) * scale) / upper[i, i]
            w[:, i:end] -= errors[:, i - begin, None] * upper[i, i:end]
        w[:, end:] -= errors @ upper[begin:end, end:]
    back = np.argsort(order)
    return GroupedInt(bits, q[:, back], scales, zeros, groups[back])


def _prepare(w: Array, hessian: Array, damp: float) -> tuple[Array, Array]:
    """The weight without dead inputs, and U, upper triangular, with H⁻¹ = Uᵀ U."""
    dead = np.diag(hessian) == 0
    hessian = hessian + np.diag(dead.astype(np.float64))
    hessian = hessian + np.eye(len(hessian)) * damp * np.mean(np.diag(hessian))
    upper: Array = np.linalg.cholesky(np.linalg.inv(hessian)).T
    return np.where(dead, 0, w), upper
