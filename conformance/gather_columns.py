"""Cases of 4-bit weights whose groups are not of neighbouring columns (act-order): x is put in their order."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.case import HALVES, Case, Inputs, Outputs
from conformance.inputs import guarded, normal, other_tokens
from engine.ops import OpTable
from engine.packed4 import PACKED, PACKED_GATED, pack4, unpack4
from engine.weights import LinearWeight
from ref.activation import gate_up_act
from ref.numerics import round_to
from ref.quant.groups import GroupedInt, grouped_linear

Array = NDArray[Any]

FILLED_UP = "a CPU decodes weights as the file has them, and so meets none that is filled up for a rank"


@dataclass(frozen=True, slots=True)
class Shape:
    num_tokens: int
    in_features: int
    out_features: int
    group_size: int
    activation: str = ""  # of a gated weight
    op: str = "linear"
    columns: int = 0  # of x, where the weight has some of them twice, or for nothing; 0: as many as the weight


SHAPES = {
    "no-tokens": Shape(0, 128, 64, 32),
    "one-token": Shape(1, 256, 64, 128),
    "odd": Shape(3, 328, 72, 328),
    "wider-than-a-block": Shape(2, 2304, 64, 256),
    "nine-tokens": Shape(9, 192, 64, 32),
    "many-tokens": Shape(70, 256, 64, 64),
    "logits": Shape(5, 256, 72, 128, op="logits"),
    "filled-up": Shape(3, 256, 64, 32, columns=152),
    "filled-up-many-tokens": Shape(70, 256, 64, 32, columns=136),
    "gated": Shape(2, 256, 48, 64, activation="silu"),
    "gated-many-tokens": Shape(70, 256, 48, 128, activation="silu"),
}


def cases() -> list[Case]:
    """Few and many tokens, alone and with the activation of a gate behind."""
    return [_case(name, shape) for name, shape in SHAPES.items()]


def _case(name: str, shape: Shape) -> Case:
    def reference(
        x: Array, weight: Array, scales: Array, zeros: Array, order: Array, storage: str | None = None
    ) -> Outputs:
        if shape.columns:
            x, order = x[:, order], np.arange(shape.in_features)
        z = grouped_linear(x, _integers(weight, scales, zeros, order, shape), storage=storage)
        if shape.activation:
            z = gate_up_act(z if storage is None else round_to(z, storage), shape.activation)
        return {"y": z}

    def candidate(ops: OpTable, x: Array, weight: Array, scales: Array, zeros: Array, order: Array) -> Outputs:
        tensors = {"weight": weight, "scales": scales.view(np.float16), "zeros": zeros, "order": order}
        format = PACKED_GATED if shape.activation else PACKED
        stored = ops.prepare(LinearWeight(format, shape.out_features, shape.in_features, tensors))
        if shape.activation:
            return {"y": ops.linear_gate_up_act(x, stored, shape.activation)}
        return {"y": getattr(ops, shape.op)(x, stored)}

    axes = {"num_tokens": shape.num_tokens, "in_features": shape.in_features, "out_features": shape.out_features}
    return Case(
        stem="gather_columns",
        name=name,
        axes=axes | {"group_size": shape.group_size, "op": shape.op},
        make_inputs=partial(_inputs, shape=shape),
        reference=reference,
        candidate=candidate,
        disturb=partial(other_tokens, make=lambda rng, count: normal(rng, count, _columns(shape), scale=10.0)),
        storages=HALVES,
        wide=("y",) if shape.op == "logits" else (),
        skip={"cpu": FILLED_UP} if shape.columns else {},
    )


def _columns(shape: Shape) -> int:
    return shape.columns or shape.in_features


def _inputs(seed: int, shape: Shape) -> Inputs:
    """Scales are handed over as their bits: they are float16 whatever the storage type."""
    rng = np.random.default_rng(seed)
    num_groups = shape.in_features // shape.group_size
    q = rng.integers(0, 16, (shape.out_features, shape.in_features))
    scales = (rng.uniform(0.2, 1.0, (len(q), num_groups)) * shape.in_features**-0.5 / 4).astype(np.float16)
    packed = pack4(q, scales, rng.integers(0, 16, scales.shape), gated=bool(shape.activation))
    sizes = np.float32(10) ** rng.uniform(-3, 1 if shape.activation else 2, (shape.num_tokens, 1)).astype(np.float32)
    return {
        "x": guarded(normal(rng, shape.num_tokens, _columns(shape)) * sizes, last=8),
        "weight": packed["weight"],
        "scales": packed["scales"].view(np.uint16).copy(),
        "zeros": packed["zeros"],
        "order": (rng.permutation(shape.in_features) % _columns(shape)).astype(np.int32),
    }


def _integers(weight: Array, scales: Array, zeros: Array, order: Array, shape: Shape) -> GroupedInt:
    """As a checkpoint has them: columns in the order of x, the group of each in g_idx."""
    tensors = {"weight": weight, "scales": scales.view(np.float16), "zeros": zeros}
    sorted_q, by_row, zero = unpack4(tensors, shape.out_features, shape.in_features, gated=bool(shape.activation))
    q, g_idx = np.empty_like(sorted_q), np.empty(shape.in_features, np.int64)
    q[:, order] = sorted_q
    g_idx[order] = np.arange(shape.in_features) // shape.group_size
    return GroupedInt(4, q, by_row, zero, g_idx)
