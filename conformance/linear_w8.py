"""Cases of linear layers with weights of 8 bits, alone and with the activation of a gate behind it.

Activations are such that their codes hold them exactly: what comes of rounding them is seen by conformance.quantize,
and where a target multiplies by a decoded weight the answer is the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.case import HALVES, Case, Inputs, Outputs
from conformance.inputs import guarded, normal, other_tokens
from conformance.tolerance import DECODED_SUM, TENSOR_CORE_SUM
from engine.ops import OpTable
from engine.weights import LinearWeight
from ref.activation import gate_up_act
from ref.numerics import round_to
from ref.quant.coded import CodedWeight, quantized_linear
from ref.quant.fp8 import fp8_decode, fp8_encode, fp8_quantize
from ref.quant.fp8_block import fp8_block_quantize
from ref.quant.int8 import int8_quantize

Array = NDArray[Any]

INT8, FP8, BLOCK, TENSOR = "int8", "fp8", "fp8_block", "fp8_tensor"  # of a weight: a scale a channel, tile, or one
GROUP = 128
FIXED = np.float32(0.125)
ONLY_HOPPER = "the size is for tiles of a kernel that runs on Hopper alone; others take it as they do many-tokens"


@dataclass(frozen=True, slots=True)
class Shape:
    num_tokens: int
    in_features: int
    out_features: int
    kind: str = INT8
    bias: bool = False
    activation: str = ""  # of a gated weight
    fixed: bool = False  # activations have a scale of the checkpoint
    op: str = "linear"


SHAPES = {
    "no-tokens": Shape(0, 128, 64),
    "one-token": Shape(1, 256, 192),
    "one-token-fp8": Shape(1, 256, 192, FP8, bias=True),
    "one-token-tensor": Shape(1, 384, 64, TENSOR),
    "one-token-block": Shape(1, 384, 192, BLOCK),
    "one-token-fixed": Shape(1, 256, 64, fixed=True),
    "zero-token": Shape(2, 272, 64, bias=True),  # all of its numbers are 0
    "two-tokens-block": Shape(2, 272, 72, BLOCK, bias=True),
    "tiles-of-three": Shape(5, 272, 185, bias=True),  # with as few SMs as the host has
    "odd": Shape(3, 336, 72),  # neither whole tiles of rows nor whole steps of columns
    "odd-fp8": Shape(3, 336, 72, FP8),
    "seven-tokens-ragged": Shape(7, 192, 576, BLOCK),  # QNT-05: 4.5 blocks of rows, 1.5 of columns
    "eight-tokens-tensor": Shape(8, 256, 104, TENSOR, fixed=True),
    "nine-tokens": Shape(9, 384, 136, bias=True),
    "nine-tokens-block": Shape(9, 384, 136, BLOCK),
    "sixteen-tokens-fp8": Shape(16, 256, 64, FP8, fixed=True),
    "seventeen-tokens": Shape(17, 256, 104),
    "seventeen-tokens-block": Shape(17, 400, 104, BLOCK, bias=True),
    "splits": Shape(6, 4608, 32),  # of a kernel: in_features shared by several blocks
    "splits-one-token-fp8": Shape(1, 4608, 24, FP8),
    "splits-block": Shape(12, 4688, 32, BLOCK),
    "splits-thirty-tokens": Shape(30, 4608, 32),
    "odd-many-tokens": Shape(100, 400, 136, bias=True),
    "many-tokens-fp8": Shape(70, 256, 136, FP8),
    "many-tokens-block": Shape(130, 400, 192, BLOCK),
    "many-tokens-tensor": Shape(257, 272, 72, TENSOR, bias=True, fixed=True),
    "larger-tiles": Shape(1100, 144, 2048, bias=True),  # of a kernel: so many that none is idle
    "larger-tiles-fp8": Shape(1030, 272, 2304, FP8),
    "larger-tiles-block": Shape(1100, 400, 2056, BLOCK),
    "logits-one-token": Shape(1, 256, 200, op="logits"),
    "logits-eleven-tokens-fp8": Shape(11, 256, 200, FP8, op="logits"),
    "gated-no-tokens": Shape(0, 128, 64, activation="silu"),
    "gated-one-token": Shape(1, 256, 96, activation="silu"),
    "gated-one-token-block": Shape(1, 256, 256, BLOCK, activation="silu"),
    "gated-ragged": Shape(2, 256, 288, BLOCK, activation="silu"),  # a block has gates and what they are multiplied by
    "gated-odd": Shape(3, 336, 80, FP8, bias=True, activation="gelu_new"),
    "gated-nine-tokens-block": Shape(9, 272, 512, BLOCK, activation="silu", bias=True),
    "gated-splits": Shape(12, 4608, 32, bias=True, activation="silu"),
    "gated-tiles-of-three": Shape(2, 272, 176, FP8, activation="silu"),
    "gated-seventeen-tokens": Shape(17, 256, 144, activation="silu"),
    "gated-many-tokens": Shape(80, 256, 144, FP8, bias=True, activation="silu"),
    "gated-many-tokens-block": Shape(140, 400, 384, BLOCK, bias=True, activation="silu"),
    "gated-larger-tiles-block": Shape(1100, 272, 2304, BLOCK, activation="silu"),
}


def cases() -> list[Case]:
    """Every shape: few and many tokens, each kind of scale."""
    return [_case(name, shape) for name, shape in SHAPES.items()]


def _case(name: str, shape: Shape) -> Case:
    out_features, in_features = shape.out_features, shape.in_features

    def reference(
        x: Array, weight: Array, scale: Array, bias: Array | None, input_scale: Array | None, storage: str | None = None
    ) -> Outputs:
        activations = "static" if shape.fixed else "group" if shape.kind == BLOCK else "token"
        coded = CodedWeight(
            weight,
            scale.reshape(()) if shape.kind == TENSOR else scale,
            (GROUP, GROUP) if shape.kind == BLOCK else None,
            activations,
            input_scale,
        )
        z = quantized_linear(x, coded, bias)
        if shape.activation:
            z = gate_up_act(z if storage is None else round_to(z, storage), shape.activation)
        return {"y": z}

    def candidate(
        ops: OpTable, x: Array, weight: Array, scale: Array, bias: Array | None, input_scale: Array | None
    ) -> Outputs:
        tensors = {"weight": weight, "scale": scale} | ({} if input_scale is None else {"input_scale": input_scale})
        format = "int8" if shape.kind == INT8 else "fp8"
        stored = ops.prepare(LinearWeight(format, out_features, in_features, tensors, bias))
        if shape.activation:
            return {"y": ops.linear_gate_up_act(x, stored, shape.activation)}
        return {"y": getattr(ops, shape.op)(x, stored)}

    axes: dict[str, Any] = {"num_tokens": shape.num_tokens, "in_features": in_features, "out_features": out_features}
    return Case(
        stem="linear_w8",
        name=name,
        axes=axes | {"kind": shape.kind, "bias": shape.bias, "fixed": shape.fixed, "op": shape.op},
        make_inputs=partial(_inputs, shape=shape, zero="zero" in name),
        reference=reference,
        candidate=candidate,
        disturb=partial(other_tokens, make=partial(_activations, shape=shape)),
        storages=HALVES,
        wide=("scale", "input_scale", *(("y",) if shape.op == "logits" else ())),
        tolerance=TENSOR_CORE_SUM if shape.op == "logits" else DECODED_SUM,
        skip=dict.fromkeys(("cpu", "host"), ONLY_HOPPER) if "larger-tiles" in name else {},
    )


def _inputs(seed: int, shape: Shape, zero: bool) -> Inputs:
    rng = np.random.default_rng(seed)
    weight = normal(rng, shape.out_features, shape.in_features, scale=shape.in_features**-0.5)
    weight *= np.float32(10) ** rng.uniform(-1, 0.5, (shape.out_features, 1)).astype(np.float32)
    codes: Array
    if shape.kind == BLOCK:
        codes, scale = fp8_block_quantize(weight)
    elif shape.kind == TENSOR:
        codes, scale = fp8_quantize(weight, axis=None)
    else:
        codes, scale = int8_quantize(weight) if shape.kind == INT8 else fp8_quantize(weight)
    x = _activations(rng, shape.num_tokens, shape)
    if zero:
        x[0] = 0
    return {
        "x": guarded(x, last=8),
        "weight": codes,
        "scale": np.atleast_1d(scale),
        "bias": normal(rng, shape.out_features) if shape.bias else None,
        "input_scale": np.array([FIXED]) if shape.fixed else None,
    }


def _activations(rng: np.random.Generator, num_tokens: int, shape: Shape) -> Array:
    """[num_tokens, in_features] that codes hold exactly: codes times a power of two, one of them the largest."""
    group = GROUP if shape.kind == BLOCK else shape.in_features
    most = 127 if shape.kind == INT8 else 448
    x = np.clip(normal(rng, num_tokens, shape.in_features, scale=most / 4), -most, most)
    x = np.rint(x) if shape.kind == INT8 else fp8_decode(fp8_encode(x))
    for first in range(0, shape.in_features, group):
        part = x[:, first : first + group]
        part[np.arange(num_tokens), rng.integers(0, part.shape[1], num_tokens)] = most
        part *= (
            FIXED
            if shape.fixed
            else np.exp2(rng.integers(-8, -3 if shape.activation else 2, (num_tokens, 1))).astype(np.float32)
        )
    return x
