"""Cases of the all-reduce in two trips and many pieces, as numbers and as int8, with and without the residual add."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.all_reduce import SKIP, outputs_of
from conformance.carried import carried_case
from conformance.case import HALVES, Case, Inputs, Outputs
from conformance.inputs import normal
from conformance.ranked import PATHS, RankedOps, make_exchanges
from engine.kernels import all_reduce_pieces as kernels
from engine.kernels.channel import Slots
from ref import collectives
from ref.int8_all_reduce import int8_all_reduce
from ref.numerics import round_to

Array = NDArray[Any]

WIRES = ("numbers", "int8", "rotated")
SHAPES = {  # num_tokens of each call, hidden_size
    "few": ((1, 3), 32),  # less units than ranks
    "rows": ((5, 40, 3), 96),
    "ragged": ((7, 24, 1), 33),
    "large": ((40, 8), 1056),
}
SLOTS = Slots(
    num_lanes=2, num_stages=3, slot_bytes=2560
)  # so that slots are used again in a call, and a turn is partial


def cases() -> list[Case]:
    found = [
        make_case(path, wire, False, world_size, shape)
        for world_size in range(2, 9)
        for path in PATHS
        for wire in WIRES
        for shape in ("few", "rows")
        if world_size <= 4 or wire != "int8"
    ]
    found += [make_case(path, wire, True, 2, "large") for path in PATHS for wire in WIRES]
    found += [make_case("window", wire, True, 3, "large") for wire in WIRES]
    found += [make_case("peer", "numbers", True, world_size, "ragged") for world_size in (2, 3)]
    sizes = (("window", 3), ("peer", 3), ("window", 4), ("peer", 8))
    return found + [
        carried_case("all_reduce_pieces", kernels.int8_all_reduce, path, world_size, (40, 288), SLOTS)
        for path, world_size in sizes
    ]


def make_case(path: str, wire: str, added: bool, world_size: int, shape: str) -> Case:
    calls, hidden_size = SHAPES[shape]
    axes: dict[str, Any] = {"calls": calls, "hidden_size": hidden_size, "world_size": world_size}
    axes |= {"path": path, "wire": wire, "added": added}
    storages: tuple[str, ...] = HALVES if world_size <= 3 else ("bfloat16",)
    return Case(
        stem="all_reduce_pieces",
        name="-".join([*(["add"] if added else []), wire, shape, path, f"of-{world_size}"]),
        axes=axes,
        make_inputs=partial(make_inputs, **axes),
        reference=reference,
        candidate=_candidate,
        changes=("residual",) if added else (),
        storages=(*storages, "float32") if wire == "numbers" and world_size <= 3 else storages,
        skip=SKIP,
    )


def make_inputs(
    seed: int, calls: tuple[int, ...], hidden_size: int, world_size: int, path: str, wire: str, added: bool
) -> Inputs:
    """x [num_calls, world_size, most tokens, hidden_size], with outliers; residual alike, the same for all ranks."""
    rng = np.random.default_rng(seed)
    shape = len(calls), world_size, -(-max(calls) // 8) * 8, hidden_size
    x = normal(rng, *shape) * np.resize(np.array([1.0, 30.0, 1e-3], np.float32), (world_size, 1, 1))
    x[..., 5] *= 50.0
    x[..., 1, :] = 0.0
    inputs: Inputs = {"x": x, "calls": calls, "path": path, "wire": wire}
    if added:
        inputs["residual"] = np.repeat(normal(rng, shape[0], 1, *shape[2:]), world_size, axis=1)
    return inputs


def reference(
    x: Array,
    calls: tuple[int, ...],
    path: str,
    wire: str,
    residual: Array | None = None,
    storage: str | None = None,
) -> Outputs:
    """Numbers are rounded when they are summed, and once more with the residual; as int8 only then."""
    outputs: Outputs = {}
    for call, num_tokens in enumerate(calls):
        shards = list(x[call, :, :num_tokens])
        if wire == "numbers":
            total = collectives.all_reduce(shards, storage)[0]
        else:
            total = int8_all_reduce(shards, rotate=wire == "rotated", owners=True)[0]
        for rank in range(x.shape[1]):
            whole = total if residual is None else total + residual[call, rank, :num_tokens]
            outputs[f"sum_{call}_rank_{rank}"] = round_to(whole, storage)
    return outputs


def _candidate(ops: RankedOps, x: Any, calls: tuple[int, ...], path: str, wire: str, residual: Any = None) -> Outputs:
    world_size = x.shape[1]
    group = make_exchanges(ops, world_size, path, SLOTS)

    def run(rank: int) -> list[tuple[Any, ...]]:
        given: list[tuple[Any, ...]] = []
        for call, num_tokens in enumerate(calls):
            old = None if residual is None else residual[call, rank, :num_tokens]
            arguments = x[call, rank, :num_tokens], group.channels[rank], old
            if wire == "numbers":
                given.append((kernels.all_reduce_pieces(*arguments, device=ops.device),))
            else:
                rotate = wire == "rotated"
                given.append((kernels.int8_all_reduce(*arguments, rotate=rotate, device=ops.device),))
        return given

    return outputs_of(ops, group, [partial(run, rank) for rank in range(world_size)])
