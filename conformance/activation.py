"""Cases of the activation, gated and plain."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.case import HALVES, Case, Inputs, Kept, Outputs
from conformance.inputs import guarded, normal
from engine.ops import OpTable
from ref.activation import act, gate_up_act

Array = NDArray[Any]

SHAPES = {  # num_tokens, intermediate_size
    "no-tokens": (0, 8),
    "scalar": (1, 1),
    "one-token": (1, 1536),
    "odd": (7, 33),
    "many": (130, 96),
    "wider-than-a-block": (2, 2056),  # 256 threads of 8 numbers, and one piece more
    "one-short-of-16-bytes": (3, 63),
    "up-off-16-bytes": (5, 33),  # beside gates that are not
}
STEEP_GATES = (0.0, 1e-30, -1e-3, 15.0, -15.0, 80.0, -80.0, -81.0, 88.0, -88.0, 89.0, -89.0, 1e4, -1e4, 3e38, -3e38)
STEEP_HALVES = (*STEEP_GATES[:-2], 6e4, -6e4)  # within float16


def cases() -> list[Case]:
    shapes = SHAPES | {"steep": (5, len(STEEP_GATES)), "steep-half": (2, len(STEEP_HALVES)), "not-finite": (3, 8)}
    found = [make_case(name, *shape) for name, shape in shapes.items()]
    found += [make_case(name, *shapes[name], activation="gelu") for name in ("no-tokens", "odd", "steep")]
    found += [make_case("odd", *shapes["odd"], activation="gelu_new")]
    return found + [_plain(name) for name in ("gelu_new", "gelu", "relu", "silu")]


def make_case(name: str, num_tokens: int, intermediate_size: int, activation: str = "silu") -> Case:
    axes = {"num_tokens": num_tokens, "intermediate_size": intermediate_size}
    return Case(
        stem="activation",
        name=name if activation == "silu" else f"{name}-{activation}",
        axes=axes | {"activation": activation},
        make_inputs=partial(_inputs, **axes, kind=name, activation=activation),
        reference=lambda gate_up, activation, storage=None: {"out": gate_up_act(gate_up, activation)},
        candidate=lambda ops, gate_up, activation: {"out": ops.gate_up_act(gate_up, activation)},
        disturb=partial(_disturb, name="gate_up"),
        storages=("bfloat16", "float32") if name == "steep" else (*HALVES, "float32"),
    )


def _plain(activation: str) -> Case:
    return Case(
        stem="activation",
        name=f"plain-{activation}",
        axes={"num_tokens": 7, "intermediate_size": 63, "activation": activation},
        make_inputs=lambda seed: {
            "x": guarded(normal(np.random.default_rng(seed), 7, 63, scale=3.0)),
            "activation": activation,
        },
        reference=lambda x, activation, storage=None: {"out": act(x, activation)},
        candidate=_plain_candidate,
        disturb=partial(_disturb, name="x"),
        storages=HALVES,
        skip={"cpu": "the CPU's op table holds ref.activation.act itself"},
    )


def _inputs(seed: int, num_tokens: int, intermediate_size: int, kind: str, activation: str) -> Inputs:
    """steep: gates at which exp overflows or is lost; not-finite: NaN and inf, which must stay where they are.
    up-off-16-bytes: some rows begin at a multiple of 16 bytes, and their halves do not."""
    rng = np.random.default_rng(seed)
    gate_up = normal(rng, num_tokens, 2 * intermediate_size, scale=3.0)
    if kind in ("steep", "steep-half"):
        gate_up[:, :intermediate_size] = STEEP_GATES if kind == "steep" else STEEP_HALVES
        gate_up[:, intermediate_size:] = np.clip(gate_up[:, intermediate_size:], -1, 1)
    if kind == "not-finite":
        gate_up[0, 1] = gate_up[1, -1] = np.nan  # a gate, and an up
        gate_up[2, :2] = np.inf
    return {"gate_up": guarded(gate_up, last=8 if kind == "up-off-16-bytes" else None), "activation": activation}


def _plain_candidate(ops: OpTable, x: Array, activation: str) -> Outputs:
    return {"out": ops.act(x, activation)}


def _disturb(inputs: Inputs, rng: np.random.Generator, name: str) -> Kept:
    values = inputs[name]
    keep = int(rng.integers(len(values))) if len(values) else 0
    others = np.arange(len(values)) != keep
    values[others] = normal(rng, int(others.sum()), values.shape[1], scale=20.0)
    return {"out": slice(keep, keep + 1)}
