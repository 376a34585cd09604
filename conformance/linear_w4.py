"""Cases of linear layers with weights of 4 bits in groups, alone and with the activation of a gate behind it."""

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


@dataclass(frozen=True, slots=True)
class Shape:
    num_tokens: int
    in_features: int
    out_features: int
    group_size: int  # −1: all columns
    zeros: bool = False
    bias: bool = False
    activation: str = ""  # of a gated weight
    op: str = "linear"


SHAPES = {
    "no-tokens": Shape(0, 128, 64, 128),
    "one-token": Shape(1, 256, 192, 128),
    "one-token-zeros": Shape(1, 256, 192, 128, zeros=True, bias=True),
    "odd": Shape(3, 328, 72, -1, zeros=True),  # neither whole tiles of rows nor whole steps of columns
    "groups-32": Shape(5, 224, 80, 32, zeros=True, bias=True),
    "groups-64": Shape(8, 448, 64, 64, zeros=True),
    "groups-256": Shape(2, 768, 128, 256, zeros=True),
    "one-group": Shape(4, 512, 64, -1),
    "nine-tokens": Shape(9, 384, 136, 128, zeros=True),
    "sixteen-tokens": Shape(16, 256, 64, 64),
    "seventeen-tokens": Shape(17, 256, 104, 128, bias=True),
    "splits": Shape(6, 1664, 64, 128, zeros=True),  # of a kernel: in_features shared by several blocks
    "long": Shape(2, 12288, 64, 128, zeros=True),  # more of a block's steps than are ever under way
    "splits-32": Shape(30, 1152, 128, 32, zeros=True),
    "forty-tokens": Shape(40, 256, 72, 128),
    "many-tokens": Shape(100, 384, 136, 128, zeros=True, bias=True),
    "many-tokens-32": Shape(70, 160, 64, 32, zeros=True),
    "tiles-of-tokens": Shape(300, 1152, 520, 128, zeros=True, bias=True),
    "wide-tiles": Shape(900, 192, 2320, 64, zeros=True, bias=True),  # enough of them for most SMs of a large GPU
    "wide-tiles-32": Shape(900, 160, 2320, 32),
    "shared-tiles": Shape(300, 2048, 1040, 128, zeros=True, bias=True),  # each by four clusters of a large GPU
    "shared-tiles-32": Shape(520, 1120, 1048, 32),  # by two
    "logits-one-token": Shape(1, 256, 200, 128, op="logits"),
    "logits-many-tokens": Shape(66, 256, 72, 64, zeros=True, op="logits"),
    "gated-no-tokens": Shape(0, 128, 64, 128, activation="silu"),
    "gated-one-token": Shape(1, 256, 96, 128, activation="silu"),
    "gated-odd": Shape(3, 328, 80, -1, zeros=True, bias=True, activation="gelu_new"),
    "gated-splits": Shape(12, 1664, 64, 128, zeros=True, bias=True, activation="silu"),
    "gated-seventeen-tokens": Shape(17, 256, 144, 64, activation="silu"),
    "gated-many-tokens": Shape(80, 256, 144, 128, zeros=True, bias=True, activation="silu"),
    "gated-tiles-of-tokens": Shape(520, 640, 592, 128, activation="silu"),
    "gated-last-round": Shape(3900, 1024, 1168, 128, bias=True, activation="silu"),  # whole tiles, then shared ones
    "gated-wide-tiles": Shape(1030, 256, 2080, 128, zeros=True, bias=True, activation="silu"),
}


def cases() -> list[Case]:
    """Every shape: few and many tokens, each group size, with and without zeros."""
    return [_case(name, shape) for name, shape in SHAPES.items()]


def _case(name: str, shape: Shape) -> Case:
    gated, out_features, in_features = bool(shape.activation), shape.out_features, shape.in_features

    def reference(
        x: Array, weight: Array, scales: Array, zeros: Array | None, bias: Array | None, storage: str | None = None
    ) -> Outputs:
        z = grouped_linear(x, _integers(weight, scales, zeros, shape), bias, storage=storage)
        if gated:
            z = gate_up_act(z if storage is None else round_to(z, storage), shape.activation)
        return {"y": z}

    def candidate(
        ops: OpTable, x: Array, weight: Array, scales: Array, zeros: Array | None, bias: Array | None
    ) -> Outputs:
        tensors = {"weight": weight, "scales": scales.view(np.float16)} | ({} if zeros is None else {"zeros": zeros})
        format = PACKED_GATED if gated else PACKED
        stored = ops.prepare(LinearWeight(format, out_features, in_features, tensors, bias))
        if gated:
            return {"y": ops.linear_gate_up_act(x, stored, shape.activation)}
        return {"y": getattr(ops, shape.op)(x, stored)}

    axes: dict[str, Any] = {"num_tokens": shape.num_tokens, "in_features": in_features, "out_features": out_features}
    return Case(
        stem="linear_w4",
        name=name,
        axes=axes | {"group_size": shape.group_size, "zeros": shape.zeros, "bias": shape.bias, "op": shape.op},
        make_inputs=partial(_inputs, shape=shape),
        reference=reference,
        candidate=candidate,
        disturb=partial(other_tokens, make=lambda rng, count: normal(rng, count, in_features, scale=10.0)),
        storages=HALVES,
        wide=("y",) if shape.op == "logits" else (),
    )


def _inputs(seed: int, shape: Shape) -> Inputs:
    """Scales are handed over as their bits: they are float16 whatever the storage type."""
    rng = np.random.default_rng(seed)
    out_features, in_features = shape.out_features, shape.in_features
    num_groups = 1 if shape.group_size == -1 else -(-in_features // shape.group_size)
    q = rng.integers(0, 16, (out_features, in_features))
    scales = (rng.uniform(0.2, 1.0, (out_features, num_groups)) * in_features**-0.5 / 4).astype(np.float16)
    zeros = rng.integers(0, 16, scales.shape) if shape.zeros else None
    packed = pack4(q, scales, zeros, gated=bool(shape.activation))
    sizes = np.float32(10) ** rng.uniform(-3, 1 if shape.activation else 2, (shape.num_tokens, 1)).astype(np.float32)
    return {
        "x": guarded(normal(rng, shape.num_tokens, in_features) * sizes, last=8),
        "weight": packed["weight"],
        "scales": packed["scales"].view(np.uint16).copy(),
        "zeros": packed.get("zeros"),
        "bias": normal(rng, out_features) if shape.bias else None,
    }


def _integers(weight: Array, scales: Array, zeros: Array | None, shape: Shape) -> GroupedInt:
    tensors = {"weight": weight, "scales": scales.view(np.float16)} | ({} if zeros is None else {"zeros": zeros})
    q, by_row, zero = unpack4(tensors, shape.out_features, shape.in_features, gated=bool(shape.activation))
    size = shape.in_features if shape.group_size == -1 else shape.group_size
    return GroupedInt(4, q, by_row, zero, np.arange(shape.in_features) // size)
