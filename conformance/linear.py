"""Cases of the dense linear layer, alone and with the activation of a gate behind it."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.case import HALVES, Case, Inputs, Kept, Outputs
from conformance.inputs import guarded, normal
from engine.ops import OpTable
from engine.weights import LinearWeight
from ref.linear import linear, linear_gate_up_act

Array = NDArray[Any]

SHAPES = {  # num_tokens, in_features, out_features
    "no-tokens": (0, 16, 24),
    "scalar": (1, 1, 1),
    "one-token": (1, 576, 960),
    "odd": (3, 33, 65),
    "few-tokens": (17, 576, 192),
    "tall": (127, 65, 31),
    "long-sum": (2, 4096, 63),
    "eight-tokens": (8, 96, 40),
    "nine-tokens": (9, 72, 48),  # a multiple of 8, which is 16 bytes, but of no more
    "sixteen-tokens": (16, 264, 17),
    "seventeen-tokens": (17, 40, 16),
    "many-tokens": (100, 136, 72),
    "wide-blocks": (5, 64, 1040),  # of a kernel: many rows of blocks
    "one-step": (4, 8, 160),
    "sixteen-tokens-wide": (13, 72, 330),
    "twenty-tokens-wide": (20, 64, 328),
    "forty-tokens": (40, 200, 48),
    "splits": (12, 1600, 64),  # of a kernel: in_features shared by several blocks
    "splits-of-many-tokens": (33, 1288, 50),
}
GATED = {  # num_tokens, in_features, out_features, bias, activation
    "no-tokens": (0, 16, 24, False, "silu"),
    "one-token": (1, 576, 960, False, "silu"),
    "odd": (3, 33, 66, True, "silu"),
    "eight-tokens": (8, 96, 48, True, "gelu_new"),
    "sixteen-tokens": (16, 264, 34, False, "silu"),
    "twenty-tokens-wide": (20, 64, 328, True, "silu"),
    "splits-of-many-tokens": (33, 1288, 50, True, "silu"),
    "many-tokens": (100, 136, 80, True, "silu"),
}
LOGITS = ("no-tokens", "one-token", "odd", "sixteen-tokens", "seventeen-tokens", "many-tokens", "splits")


def cases() -> list[Case]:
    """Every shape, without and with bias; and the layout of a head that is also the embedding."""
    found = [make_case(name, *shape, bias=False) for name, shape in SHAPES.items()]
    found += [
        make_case(f"{name}-bias", *SHAPES[name], bias=True)
        for name in ("one-token", "odd", "tall", "sixteen-tokens", "many-tokens")
    ]
    found += [
        make_case(f"{name}-tied", *SHAPES[name], bias=False, tied=True) for name in ("no-tokens", "one-token", "odd")
    ]
    found.append(make_case("rows-off-16-bytes", 5, 64, 40, bias=True, last=1))
    found += [_gated_case(name, *axes) for name, axes in GATED.items()]
    return found + [make_case(f"logits-{name}", *SHAPES[name], bias=name == "splits", op="logits") for name in LOGITS]


def make_case(
    name: str,
    num_tokens: int,
    in_features: int,
    out_features: int,
    bias: bool,
    tied: bool = False,
    last: int | None = None,
    op: str = "linear",
) -> Case:
    axes: dict[str, Any] = {
        "num_tokens": num_tokens,
        "in_features": in_features,
        "out_features": out_features,
        "bias": bias,
    }
    return Case(
        stem="linear",
        name=name,
        axes={**axes, "tied": tied, "op": op},
        make_inputs=partial(_inputs, last=last, **axes),
        reference=lambda x, weight, bias, storage=None: {"y": linear(x, weight, bias)},
        candidate=partial(_candidate, tied=tied or op == "logits", op=op),
        disturb=_disturb,
        storages=HALVES,
        wide=("y",) if op == "logits" else (),
    )


def _gated_case(name: str, num_tokens: int, in_features: int, out_features: int, bias: bool, activation: str) -> Case:
    """gate_up_act of linear; x is not so large that gate · up is more than float16 can hold."""
    axes: dict[str, Any] = {
        "num_tokens": num_tokens,
        "in_features": in_features,
        "out_features": out_features,
        "bias": bias,
    }

    def reference(x: Array, weight: Array, bias: Array | None, storage: str | None = None) -> Outputs:
        return {"y": linear_gate_up_act(x, weight, activation, bias, storage=storage)}

    def candidate(ops: OpTable, x: Array, weight: Array, bias: Array | None) -> Outputs:
        stored = ops.prepare(LinearWeight("dense", out_features, in_features, {"weight": weight}, bias))
        return {"y": ops.linear_gate_up_act(x, stored, activation)}

    return Case(
        stem="linear",
        name=f"gated-{name}",
        axes=axes | {"activation": activation, "op": "linear_gate_up_act"},
        make_inputs=partial(_inputs, last=None, **axes, largest=1.0),
        reference=reference,
        candidate=candidate,
        disturb=partial(_disturb, scale=10.0),
        storages=HALVES,
    )


def _inputs(
    seed: int,
    num_tokens: int,
    in_features: int,
    out_features: int,
    bias: bool,
    last: int | None,
    largest: float = 3.0,
) -> Inputs:
    """Rows of x of sizes from 1e-3 to 1e3 or 10 ** largest, not side by side in memory, but at multiples of 16 bytes if
    in_features has as many. last: the border of x in the way of rows instead."""
    rng = np.random.default_rng(seed)
    sizes = np.float32(10) ** rng.uniform(-3, largest, (num_tokens, 1)).astype(np.float32)
    return {
        "x": guarded(normal(rng, num_tokens, in_features) * sizes, last=last or (1 if in_features % 8 else 8)),
        "weight": guarded(normal(rng, out_features, in_features, scale=in_features**-0.5), num_axes=1),
        "bias": normal(rng, out_features) if bias else None,
    }


def _candidate(ops: OpTable, x: Array, weight: Array, bias: Array | None, tied: bool, op: str) -> Outputs:
    out_features, in_features = weight.shape
    stored = LinearWeight("dense", out_features, in_features, {"weight": weight}, bias)
    return {"y": getattr(ops, op)(x, stored if tied else ops.prepare(stored))}


def _disturb(inputs: Inputs, rng: np.random.Generator, scale: float = 100.0) -> Kept:
    x = inputs["x"]
    keep = int(rng.integers(len(x))) if len(x) else 0
    others = np.arange(len(x)) != keep
    x[others] = normal(rng, int(others.sum()), x.shape[1], scale=scale)
    return {"y": slice(keep, keep + 1)}
