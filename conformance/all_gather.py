"""Cases of rows whose parts several ranks have, gathered on all ranks or on one, and handed from one to the next."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.all_reduce import SKIP
from conformance.case import HALVES, Case, Inputs, Outputs
from conformance.inputs import normal
from conformance.ranked import PATHS, RankedOps, make_exchanges
from conformance.tolerance import EXACT
from engine.kernels import all_gather as kernels
from engine.kernels.channel import Slots
from ref.collectives import all_gather

Array = NDArray[Any]

SHAPES = {  # num_rows of each call, columns of a part, columns beyond the end
    "row": ((1, 1, 1), 64, 0),
    "rows": ((3, 40, 1, 16), 96, 5),
    "ragged": ((7, 5, 20), 33, 32),
}
SLOTS = Slots(num_lanes=2, num_stages=4, slot_bytes=512)


def cases() -> list[Case]:
    found = [
        make_case(path, "all", world_size, shape)
        for world_size in range(2, 9)
        for path in PATHS
        for shape in SHAPES
        if world_size <= 3 or shape == "rows"
    ]
    found += [make_case(path, "root", world_size, "rows") for world_size in (2, 3) for path in PATHS]
    return found + [make_case(path, "onward", 2, shape) for path in PATHS for shape in ("row", "rows")]


def make_case(path: str, to: str, world_size: int, shape: str) -> Case:
    """to: "all" take all parts; "root": rank 0 does; "onward": rank 1 takes the part of rank 0."""
    calls, part, beyond = SHAPES[shape]
    axes: dict[str, Any] = {"calls": calls, "part": part, "beyond": beyond, "world_size": world_size}
    axes |= {"path": path, "to": to}
    return Case(
        stem="all_gather",
        name="-".join([to, shape, path, f"of-{world_size}"]),
        axes=axes,
        make_inputs=partial(_inputs, **axes),
        reference=_reference,
        candidate=_candidate,
        tolerance=EXACT,
        storages=("float32", *HALVES) if world_size == 2 else ("float32",),
        skip=SKIP,
    )


def _inputs(seed: int, calls: tuple[int, ...], part: int, beyond: int, world_size: int, path: str, to: str) -> Inputs:
    """x [num_calls, world_size, most rows, part]."""
    rows = -(-max(calls) // 8) * 8
    x = normal(np.random.default_rng(seed), len(calls), world_size, rows, part)
    return {"x": x, "calls": calls, "path": path, "to": to, "beyond": beyond}


def _reference(
    x: Array, calls: tuple[int, ...], path: str, to: str, beyond: int, storage: str | None = None
) -> Outputs:
    outputs: Outputs = {}
    for call, num_rows in enumerate(calls):
        parts = list(x[call, :, :num_rows])
        for rank in takers(to, x.shape[1]):
            whole = parts[0] if to == "onward" else all_gather(parts, axis=1)[rank]
            outputs[f"rows_{call}_rank_{rank}"] = whole[:, : whole.shape[1] - beyond]
    return outputs


def takers(to: str, world_size: int) -> range:
    return {"all": range(world_size), "root": range(1), "onward": range(1, 2)}[to]


def _candidate(ops: RankedOps, x: Any, calls: tuple[int, ...], path: str, to: str, beyond: int) -> Outputs:
    world_size, part = x.shape[1], x.shape[3]
    group = make_exchanges(ops, world_size, path, SLOTS)
    senders = 1 if to == "onward" else world_size

    def run(rank: int) -> list[Any]:
        how = {"takes": rank in takers(to, world_size), "num_senders": senders, "device": ops.device}
        return [
            kernels.all_gather(x[call, rank, :num_rows], group.channels[rank], senders * part - beyond, **how)
            for call, num_rows in enumerate(calls)
        ]

    found = ops.together([partial(run, rank) for rank in range(world_size)])
    if reports := group.reports():
        raise AssertionError(f"waiting was given up: {reports}")
    return {
        f"rows_{call}_rank_{rank}": found[rank][call] for call in range(len(calls)) for rank in takers(to, world_size)
    }
