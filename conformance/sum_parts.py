"""Cases of the sum of what ranks have copied to each other: each rank in turn, with and without a residual."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.all_reduce import SKIP
from conformance.case import HALVES, Case, Inputs, Kept, Outputs
from conformance.inputs import normal
from conformance.ranked import RankedOps
from engine.kernels.sum_parts import sum_parts
from ref.collectives import all_reduce
from ref.numerics import round_to

Array = NDArray[Any]

SHAPES = {"one-token": (1, 64), "ragged": (5, 33), "rows": (7, 96), "several-rounds": (130, 1032)}


def cases() -> list[Case]:
    found = [_case(name, world_size, added) for name in SHAPES for world_size in (2, 3) for added in ("plain", "add")]
    return found + [_case("rows", world_size, "add") for world_size in (4, 5, 6, 7, 8)]


def _case(name: str, world_size: int, added: str) -> Case:
    num_tokens, hidden_size = SHAPES[name]
    axes = {"num_tokens": num_tokens, "hidden_size": hidden_size, "world_size": world_size, "added": added}
    return Case(
        stem="sum_parts",
        name=f"{added}-{name}-of-{world_size}",
        axes=axes,
        make_inputs=partial(_inputs, **axes),
        reference=_reference,
        candidate=_candidate,
        disturb=_disturb,
        changes=tuple(f"residual_{rank}" for rank in range(world_size)) if added == "add" else (),
        storages=(*HALVES, "float32") if world_size <= 3 else ("bfloat16",),
        skip={"cpu": SKIP["cpu"]},
    )


def _inputs(seed: int, num_tokens: int, hidden_size: int, world_size: int, added: str) -> Inputs:
    """Of each rank its x [num_tokens, hidden_size], and those of the others, [world_size − 1, …], and a residual."""
    rng = np.random.default_rng(seed)
    sizes = np.resize(np.array([1.0, 30.0, 1e-3], np.float32), (world_size, 1, 1))
    x = normal(rng, world_size, num_tokens, hidden_size) * sizes
    residual = normal(rng, num_tokens, hidden_size)
    inputs: Inputs = {}
    for rank in range(world_size):
        inputs |= {f"x_{rank}": x[rank].copy(), f"others_{rank}": np.delete(x, rank, axis=0)}
        if added == "add":
            inputs[f"residual_{rank}"] = residual.copy()
    return inputs


def _reference(storage: str | None = None, **arrays: Array) -> Outputs:
    x = [array for name, array in arrays.items() if name.startswith("x_")]
    total = all_reduce(x)[0] + arrays.get("residual_0", 0.0)
    return {f"sum_{rank}": round_to(total, storage) for rank in range(len(x))}


def _candidate(ops: RankedOps, **arrays: Any) -> Outputs:
    ranks = [name.removeprefix("x_") for name in arrays if name.startswith("x_")]
    return {
        f"sum_{rank}": sum_parts(
            arrays[f"x_{rank}"],
            arrays[f"others_{rank}"],
            int(rank),
            arrays.get(f"residual_{rank}"),
            device=ops.device,
        )
        for rank in ranks
    }


def _disturb(inputs: Inputs, rng: np.random.Generator) -> Kept:
    """Tokens do not meet: token 0 keeps its bits."""
    for array in inputs.values():
        array[..., 1:, :] = normal(rng, *array[..., 1:, :].shape, scale=100.0)
    return {f"sum_{name.removeprefix('x_')}": slice(0, 1) for name in inputs if name.startswith("x_")}
