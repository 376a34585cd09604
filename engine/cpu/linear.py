"""Dense linear on a CPU. Checked against ref.linear by conformance."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from engine.coded8 import FP8, INT8, decode8
from engine.cpu.activation import gate_up_act
from engine.cpu.team import Team
from engine.packed4 import PACKED_GATED, unpack4
from engine.weights import LinearWeight

Float32 = NDArray[np.float32]


def prepare_dense(weight: LinearWeight) -> LinearWeight:
    """Stores the weight as weight_t [in_features, out_features], C order; of experts one axis more in front.

    OpenBLAS multiplies a few rows by that layout about a fifth faster than by [out, in] (2 cores, 2 to 32 rows).
    """
    stored = np.ascontiguousarray(np.asarray(_decoded(weight), np.float32).swapaxes(-2, -1))
    return replace(weight, format="dense", tensors={"weight_t": stored})


def _decoded(weight: LinearWeight) -> Float32:
    if weight.format == "dense":
        dense: Float32 = weight.tensors["weight"]
        return dense
    return decode8(weight.tensors) if weight.format in (INT8, FP8) else _decoded4(weight)


def _decoded4(weight: LinearWeight) -> Float32:
    """[out_features, in_features] of a weight of 4 bits (engine.packed4)."""
    gated = weight.format == PACKED_GATED
    q, scales, zeros = unpack4(weight.tensors, weight.out_features, weight.in_features, gated=gated)
    group_size = -(-weight.in_features // scales.shape[1])
    groups = np.arange(weight.in_features) // group_size
    steps = q.astype(np.float32) - zeros.astype(np.float32)[:, groups]
    decoded = steps * scales.astype(np.float32)[:, groups]
    if "order" in weight.tensors:
        decoded = decoded[:, np.argsort(weight.tensors["order"])]
    return decoded


def linear(x: Float32, weight: LinearWeight, *, team: Team) -> Float32:
    """y = x Wᵀ + bias, [num_tokens, in_features] → [num_tokens, out_features] float32.

    A weight that is also the embedding keeps its [out, in] layout ("weight"); all others have "weight_t".
    """
    stored = weight.tensors.get("weight_t")
    y = team.matmul(x, weight.tensors["weight"].T if stored is None else stored)
    if weight.bias is not None:
        y += weight.bias
    return y


def linear_gate_up_act(x: Float32, weight: LinearWeight, activation: str = "silu", *, team: Team) -> Float32:
    """gate_up_act(linear(x, weight), activation), [num_tokens, in_features] → [num_tokens, out_features / 2]."""
    return gate_up_act(linear(x, weight, team=team), activation)


def logits(x: Float32, weight: LinearWeight, *, team: Team) -> Float32:
    """linear of the head, [num_rows, hidden_size] → [num_rows, vocab_size]."""
    return linear(x, weight, team=team)
