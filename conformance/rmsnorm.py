"""Cases of RMSNorm, alone and fused with the residual add."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.case import HALVES, Case, Inputs, Kept, Outputs
from conformance.inputs import guarded, normal
from engine.ops import OpTable
from ref.rmsnorm import add_rmsnorm, add_rmsnorm_ordered, rmsnorm, rmsnorm_ordered

Array = NDArray[Any]

SHAPES = {  # num_tokens, hidden_size
    "no-tokens": (0, 64),
    "one-token": (1, 576),
    "width-1": (5, 1),
    "odd": (7, 33),
    "many": (130, 96),
    "wide": (3, 4096),
    "wider-than-a-block": (2, 4104),  # what 512 threads of a kernel cover at once is 4096 numbers of 16 bits
    "one-short-of-16-bytes": (3, 63),
}
ORDERED = ("no-tokens", "one-token", "many", "wide", "wider-than-a-block")  # rows of whole pieces
ROW_SIZES = (1.0, 0.0, 1e-3, 3e3, 1e-6)  # of the rows, in turn: a row of zeros, and one that eps outweighs


def cases() -> list[Case]:
    return [
        *(
            make_case(name, num_tokens, hidden_size, eps, fused)
            for fused in (False, True)
            for name, (num_tokens, hidden_size) in SHAPES.items()
            for eps in ((1e-5, 1e-6) if name == "odd" else (1e-5,))
        ),
        *(
            make_case(f"ordered-{name}", *SHAPES[name], 1e-5, fused, ordered=True)
            for fused in (False, True)
            for name in ORDERED
        ),
    ]


def make_case(name: str, num_tokens: int, hidden_size: int, eps: float, fused: bool, ordered: bool = False) -> Case:
    axes: dict[str, Any] = {"num_tokens": num_tokens, "hidden_size": hidden_size, "eps": eps, "fused": fused}
    return Case(
        stem="rmsnorm",
        name=("add-" if fused else "") + name + ("" if eps == 1e-5 else f"-eps{eps:g}"),
        axes=axes | ({"ordered": True} if ordered else {}),
        make_inputs=partial(_inputs, **axes, ordered=ordered),
        reference=_add_reference if fused else _reference,
        candidate=_add_candidate if fused else _candidate,
        changes=("residual",) if fused else (),
        disturb=_disturb,
        storages=HALVES if ordered else (*HALVES, "float32"),
    )


def _inputs(seed: int, num_tokens: int, hidden_size: int, eps: float, fused: bool, ordered: bool) -> Inputs:
    rng = np.random.default_rng(seed)
    sizes = np.resize(np.array(ROW_SIZES, np.float32), (num_tokens, 1))
    inputs: Inputs = {
        "x": guarded(normal(rng, num_tokens, hidden_size) * sizes),
        "weight": 1 + normal(rng, hidden_size, scale=0.2),
        "eps": eps,
    }
    if fused:
        inputs["residual"] = guarded(normal(rng, num_tokens, hidden_size) * sizes)
    if ordered:
        inputs["order"] = rng.permutation(hidden_size).astype(np.uint16)
    return inputs


def _reference(x: Array, weight: Array, eps: float, order: Array | None = None, storage: str | None = None) -> Outputs:
    return {"normed": rmsnorm(x, weight, eps) if order is None else rmsnorm_ordered(x, weight, eps, order)}


def _candidate(ops: OpTable, x: Array, weight: Array, eps: float, order: Array | None = None) -> Outputs:
    return {"normed": ops.rmsnorm(x, weight, eps) if order is None else ops.rmsnorm_ordered(x, weight, eps, order)}


def _add_reference(
    x: Array, residual: Array, weight: Array, eps: float, order: Array | None = None, storage: str | None = None
) -> Outputs:
    if order is None:
        normed, new_residual = add_rmsnorm(x, residual, weight, eps, storage=storage)
    else:
        normed, new_residual = add_rmsnorm_ordered(x, residual, weight, eps, order, storage=storage)
    return {"normed": normed, "new_residual": new_residual}


def _add_candidate(
    ops: OpTable, x: Array, residual: Array, weight: Array, eps: float, order: Array | None = None
) -> Outputs:
    if order is None:
        normed, new_residual = ops.add_rmsnorm(x, residual, weight, eps)
    else:
        normed, new_residual = ops.add_rmsnorm_ordered(x, residual, weight, eps, order)
    return {"normed": normed, "new_residual": new_residual}


def _disturb(inputs: Inputs, rng: np.random.Generator) -> Kept:
    x = inputs["x"]
    keep = int(rng.integers(len(x))) if len(x) else 0
    others = np.arange(len(x)) != keep
    for name in {"x", "residual"} & inputs.keys():
        inputs[name][others] = normal(rng, int(others.sum()), x.shape[1], scale=100.0)
    rows = slice(keep, keep + 1)
    return {"normed": rows, "new_residual": rows}
