"""Cases of LayerNorm: with and without bias, by heads with weights of their own, and fused with the residual add."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.case import HALVES, Case, Inputs, Kept, Outputs
from conformance.inputs import guarded, normal
from conformance.tolerance import MEAN_ROUNDED
from engine.ops import OpTable
from ref.layernorm import add_layernorm, layernorm

Array = NDArray[Any]

SHAPES: dict[str, tuple[int, ...]] = {  # num_tokens, hidden_size
    "no-tokens": (0, 64),
    "one-token": (1, 576),
    "width-1": (5, 1),
    "odd": (7, 33),
    "many": (130, 96),
    "wide": (3, 4096),
    "wider-than-a-block": (2, 4104),
    "one-short-of-16-bytes": (3, 63),
}
HEADS: dict[str, tuple[int, ...]] = {"heads": (9, 6, 32), "head": (4, 1, 10)}  # num_tokens, n_heads, head_dim
ROW_SIZES = (1.0, 0.0, 1e-3, 3e3, 1e-6)  # of the rows, in turn: a row of zeros, and one that eps outweighs
ROW_MEANS = (0.0, 0.0, 1.0, -1e4, 0.0)  # added to them: what is left after the mean has gone is small beside it


def cases() -> list[Case]:
    plain = [make_case(name, shape, bias) for name, shape in SHAPES.items() for bias in (False, True)]
    heads = [make_case(name, shape, bias=False) for name, shape in HEADS.items()]
    return plain + heads + [make_case(f"add-{name}", shape, bias=name != "odd") for name, shape in SHAPES.items()]


def make_case(name: str, shape: tuple[int, ...], bias: bool) -> Case:
    fused = name.startswith("add-")
    return Case(
        stem="layernorm",
        name=name + ("-bias" if bias and not fused else ""),
        axes={"shape": shape, "bias": bias, "fused": fused},
        make_inputs=partial(_inputs, shape=shape, bias=bias, fused=fused),
        reference=_add_reference if fused else _reference,
        candidate=_add_candidate if fused else _candidate,
        changes=("residual",) if fused else (),
        tolerance=MEAN_ROUNDED,
        disturb=_disturb,
        storages=(*HALVES, "float32"),
    )


def _inputs(seed: int, shape: tuple[int, ...], bias: bool, fused: bool) -> Inputs:
    rng = np.random.default_rng(seed)
    by_row = (shape[0], *(1 for _ in shape[1:]))
    sizes, means = (np.resize(np.array(rows, np.float32), by_row) for rows in (ROW_SIZES, ROW_MEANS))
    inputs: Inputs = {
        "x": guarded(normal(rng, *shape) * sizes + means),
        "weight": 1 + normal(rng, *shape[1:], scale=0.2),
        "bias": normal(rng, *shape[1:], scale=0.2) if bias else None,
        "eps": 1e-5,
    }
    if fused:
        inputs["residual"] = guarded(normal(rng, *shape) * sizes)
    return inputs


def _reference(x: Array, weight: Array, bias: Array | None, eps: float, storage: str | None = None) -> Outputs:
    return {"normed": layernorm(x, weight, bias, eps)}


def _candidate(ops: OpTable, x: Array, weight: Array, bias: Array | None, eps: float) -> Outputs:
    return {"normed": ops.layernorm(x, weight, bias, eps)}


def _add_reference(
    x: Array, residual: Array, weight: Array, bias: Array | None, eps: float, storage: str | None = None
) -> Outputs:
    normed, new_residual = add_layernorm(x, residual, weight, bias, eps, storage=storage)
    return {"normed": normed, "new_residual": new_residual}


def _add_candidate(ops: OpTable, x: Array, residual: Array, weight: Array, bias: Array | None, eps: float) -> Outputs:
    normed, new_residual = ops.add_layernorm(x, residual, weight, bias, eps)
    return {"normed": normed, "new_residual": new_residual}


def _disturb(inputs: Inputs, rng: np.random.Generator) -> Kept:
    x = inputs["x"]
    keep = int(rng.integers(len(x))) if len(x) else 0
    others = np.arange(len(x)) != keep
    for name in {"x", "residual"} & inputs.keys():
        inputs[name][others] = normal(rng, int(others.sum()), *x.shape[1:], scale=100.0)
    rows = slice(keep, keep + 1)
    return {"normed": rows, "new_residual": rows}
