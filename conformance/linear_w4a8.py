"""Cases of linear layers with weights of 4 bits in groups and activations of 8 bits, with and without a gate.

Activations are such that their codes hold them exactly, as in conformance.linear_w8.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.case import HALVES, Case, Inputs, Outputs
from conformance.inputs import guarded, normal, other_tokens
from engine.coded8 import FP8, INT8
from engine.ops import OpTable
from engine.packed4 import PACKED, PACKED_GATED, pack4, unpack4
from engine.weights import ActivationKind, LinearWeight
from ref.activation import gate_up_act
from ref.numerics import round_to
from ref.quant.fp8 import FP8_MAX, fp8_decode, fp8_encode
from ref.quant.groups import GroupedInt
from ref.quant.int8 import INT8_MAX
from ref.quant.w4a8 import w4a8_linear

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Shape:
    num_tokens: int
    in_features: int
    out_features: int
    group_size: int  # −1: all columns
    kind: ActivationKind = INT8
    zeros: bool = False
    bias: bool = False
    activation: str = ""  # of a gated weight


SHAPES = {
    "one-token": Shape(1, 256, 192, 128),  # too few to be worth it
    "many-tokens": Shape(300, 512, 136, 128, bias=True),
    "many-tokens-zeros": Shape(257, 384, 136, 128, zeros=True),
    "many-tokens-fp8": Shape(300, 512, 136, 128, FP8, zeros=True, bias=True),
    "odd": Shape(259, 336, 72, -1, zeros=True),  # neither whole tiles of rows nor whole steps of columns
    "odd-fp8": Shape(259, 336, 72, -1, FP8),
    "groups-32": Shape(256, 224, 80, 32, zeros=True, bias=True),
    "groups-64-fp8": Shape(256, 448, 64, 64, FP8, zeros=True),
    "groups-256": Shape(384, 768, 128, 256, zeros=True),
    "wide-tiles": Shape(900, 256, 2320, 128, zeros=True, bias=True),  # enough of them for most SMs of a large GPU
    "wide-tiles-fp8": Shape(900, 256, 2320, 128, FP8),
    "gated-wide-tiles": Shape(1030, 256, 2080, 128, zeros=True, bias=True, activation="silu"),
    "gated": Shape(300, 384, 144, 128, zeros=True, bias=True, activation="silu"),
    "gated-odd-fp8": Shape(270, 336, 80, -1, FP8, bias=True, activation="gelu_new"),
}


def cases() -> list[Case]:
    """Every shape: both kinds of codes, each group size, with and without zeros."""
    return [_case(name, shape) for name, shape in SHAPES.items()]


def _case(name: str, shape: Shape) -> Case:
    gated = bool(shape.activation)

    def reference(
        x: Array, weight: Array, scales: Array, zeros: Array | None, bias: Array | None, storage: str | None = None
    ) -> Outputs:
        z = w4a8_linear(x, _integers(_tensors(weight, scales, zeros), shape), bias, kind=shape.kind)
        if gated:
            z = gate_up_act(z if storage is None else round_to(z, storage), shape.activation)
        return {"y": z}

    def candidate(
        ops: OpTable, x: Array, weight: Array, scales: Array, zeros: Array | None, bias: Array | None
    ) -> Outputs:
        format, tensors = PACKED_GATED if gated else PACKED, _tensors(weight, scales, zeros)
        stored = LinearWeight(format, shape.out_features, shape.in_features, tensors, bias, shape.kind)
        if gated:
            return {"y": ops.linear_gate_up_act(x, ops.prepare(stored), shape.activation)}
        return {"y": ops.linear(x, ops.prepare(stored))}

    axes: dict[str, Any] = {name: getattr(shape, name) for name in ("num_tokens", "in_features", "out_features")}
    return Case(
        stem="linear_w4a8",
        name=name,
        axes=axes | {"group_size": shape.group_size, "kind": shape.kind, "zeros": shape.zeros, "bias": shape.bias},
        make_inputs=partial(_inputs, shape=shape),
        reference=reference,
        candidate=candidate,
        disturb=partial(other_tokens, make=partial(_activations, shape=shape)),
        storages=HALVES,
    )


def _tensors(weight: Array, scales: Array, zeros: Array | None) -> dict[str, Array]:
    """Of engine.packed4; scales are handed over as their bits: they are float16 whatever the storage type."""
    return {"weight": weight, "scales": scales.view(np.float16)} | ({} if zeros is None else {"zeros": zeros})


def _inputs(seed: int, shape: Shape) -> Inputs:
    rng = np.random.default_rng(seed)
    out_features, in_features = shape.out_features, shape.in_features
    num_groups = 1 if shape.group_size == -1 else -(-in_features // shape.group_size)
    q = rng.integers(0, 16, (out_features, in_features))
    scales = (rng.uniform(0.2, 1.0, (out_features, num_groups)) * in_features**-0.5 / 4).astype(np.float16)
    zeros = rng.integers(0, 16, scales.shape) if shape.zeros else None
    packed = pack4(q, scales, zeros, gated=bool(shape.activation))
    return {
        "x": guarded(_activations(rng, shape.num_tokens, shape), last=8),
        "weight": packed["weight"],
        "scales": packed["scales"].view(np.uint16).copy(),
        "zeros": packed.get("zeros"),
        "bias": normal(rng, out_features) if shape.bias else None,
    }


def _activations(rng: np.random.Generator, num_tokens: int, shape: Shape) -> Array:
    """[num_tokens, in_features] that codes hold exactly: codes times a power of two, one of them the largest."""
    most = INT8_MAX if shape.kind == INT8 else FP8_MAX
    x = np.clip(normal(rng, num_tokens, shape.in_features, scale=most / 4), -most, most)
    x = np.rint(x) if shape.kind == INT8 else fp8_decode(fp8_encode(x))
    x[np.arange(num_tokens), rng.integers(0, shape.in_features, num_tokens)] = most
    return x * np.exp2(rng.integers(-10, -4, (num_tokens, 1))).astype(np.float32)


def _integers(tensors: dict[str, Array], shape: Shape) -> GroupedInt:
    q, scales, zeros = unpack4(tensors, shape.out_features, shape.in_features, gated=bool(shape.activation))
    size = shape.in_features if shape.group_size == -1 else shape.group_size
    return GroupedInt(4, q, scales, zeros, np.arange(shape.in_features) // size)
