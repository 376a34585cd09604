"""Cases of the gated activation."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.case import Case, Inputs, Kept, Outputs
from conformance.inputs import guarded, normal
from engine.ops import OpTable
from ref.activation import gate_up_act

Array = NDArray[Any]

SHAPES = {  # num_tokens, intermediate_size
    "no-tokens": (0, 8),
    "scalar": (1, 1),
    "one-token": (1, 1536),
    "odd": (7, 33),
    "many": (130, 96),
}
STEEP_GATES = (0.0, 1e-30, -1e-3, 15.0, -15.0, 80.0, -80.0, -81.0, 88.0, -88.0, 89.0, -89.0, 1e4, -1e4, 3e38, -3e38)


def cases() -> list[Case]:
    found = [_case(name, num_tokens, width) for name, (num_tokens, width) in SHAPES.items()]
    return [*found, _case("steep", 5, len(STEEP_GATES)), _case("not-finite", 3, 8)]


def _case(name: str, num_tokens: int, intermediate_size: int) -> Case:
    axes = {"num_tokens": num_tokens, "intermediate_size": intermediate_size}
    return Case(
        stem="activation",
        name=name,
        axes=axes,
        make_inputs=partial(_inputs, **axes, kind=name),
        reference=lambda gate_up: {"out": gate_up_act(gate_up)},
        candidate=_candidate,
        disturb=_disturb,
    )


def _inputs(seed: int, num_tokens: int, intermediate_size: int, kind: str) -> Inputs:
    """steep: gates at which exp overflows or is lost; not-finite: NaN and inf, which must stay where they are."""
    rng = np.random.default_rng(seed)
    gate_up = normal(rng, num_tokens, 2 * intermediate_size, scale=3.0)
    if kind == "steep":
        gate_up[:, :intermediate_size] = STEEP_GATES
        gate_up[:, intermediate_size:] = np.clip(gate_up[:, intermediate_size:], -1, 1)
    if kind == "not-finite":
        gate_up[0, 1] = gate_up[1, -1] = np.nan  # a gate, and an up
        gate_up[2, :2] = np.inf
    return {"gate_up": guarded(gate_up)}


def _candidate(ops: OpTable, gate_up: Array) -> Outputs:
    return {"out": ops.gate_up_act(gate_up)}


def _disturb(inputs: Inputs, rng: np.random.Generator) -> Kept:
    gate_up = inputs["gate_up"]
    keep = int(rng.integers(len(gate_up))) if len(gate_up) else 0
    others = np.arange(len(gate_up)) != keep
    gate_up[others] = normal(rng, int(others.sum()), gate_up.shape[1], scale=20.0)
    return {"out": slice(keep, keep + 1)}
