"""Cases of the all-reduce over islands, with and without the residual add: two to four of them, of 2 to 4 ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.all_reduce import SKIP, outputs_of
from conformance.case import HALVES, Case, Inputs, Outputs
from conformance.inputs import normal
from conformance.ranked import RankedOps, make_island_exchanges
from engine.kernels import all_reduce_islands as kernels
from engine.kernels.channel import Slots
from ref import collectives
from ref.numerics import round_to

Array = NDArray[Any]

SHAPES = {  # num_tokens of each call, hidden_size
    "few": ((1, 3), 8),  # fewer pieces than ranks
    "rows": ((5, 40, 3), 96),
    "ragged": ((7, 24, 1), 33),
    "large": ((40, 8, 40), 1056),
}
ISLANDS = ((4, 2), (6, 2), (6, 3), (8, 2), (8, 4))  # ranks, of which so many in each
SLOTS = Slots(num_lanes=2, num_stages=3, slot_bytes=4608)  # so that slots are used again in a call


def cases() -> list[Case]:
    found = [make_case(added, *islands, shape) for islands in ISLANDS for shape in ("few", "rows") for added in (0, 1)]
    found += [make_case(added, 4, 2, shape) for shape in ("ragged", "large") for added in (0, 1)]
    return [*found, make_case(1, 6, 2, "large"), make_case(1, 8, 4, "large")]


def make_case(added: int, world_size: int, island_size: int, shape: str) -> Case:
    calls, hidden_size = SHAPES[shape]
    axes: dict[str, Any] = {"calls": calls, "hidden_size": hidden_size, "world_size": world_size}
    axes |= {"island_size": island_size, "added": bool(added)}
    return Case(
        stem="all_reduce_islands",
        name="-".join([*(["add"] if added else []), shape, f"{world_size // island_size}-islands-of-{island_size}"]),
        axes=axes,
        make_inputs=partial(_inputs, **axes),
        reference=_reference,
        candidate=_candidate,
        changes=("residual",) if added else (),
        storages=(*HALVES, "float32") if world_size == 4 else ("bfloat16",),
        skip=SKIP,
    )


def _inputs(
    seed: int, calls: tuple[int, ...], hidden_size: int, world_size: int, island_size: int, added: bool
) -> Inputs:
    """x [num_calls, world_size, most tokens, hidden_size], ranks apart in size; residual alike, the same for all."""
    rng = np.random.default_rng(seed)
    shape = len(calls), world_size, -(-max(calls) // 8) * 8, hidden_size
    x = normal(rng, *shape) * np.resize(np.array([1.0, 30.0, 1e-3], np.float32), (world_size, 1, 1))
    inputs: Inputs = {"x": x, "calls": calls, "island_size": island_size}
    if added:
        inputs["residual"] = np.repeat(normal(rng, shape[0], 1, *shape[2:]), world_size, axis=1)
    return inputs


def _reference(
    x: Array, calls: tuple[int, ...], island_size: int, residual: Array | None = None, storage: str | None = None
) -> Outputs:
    """Islands change nothing: rounded when it is summed, and once more with the residual."""
    outputs: Outputs = {}
    for call, num_tokens in enumerate(calls):
        total = collectives.all_reduce(list(x[call, :, :num_tokens]), storage)[0]
        for rank in range(x.shape[1]):
            whole = total if residual is None else total + residual[call, rank, :num_tokens]
            outputs[f"sum_{call}_rank_{rank}"] = round_to(whole, storage)
    return outputs


def _candidate(ops: RankedOps, x: Any, calls: tuple[int, ...], island_size: int, residual: Any = None) -> Outputs:
    world_size = x.shape[1]
    group = make_island_exchanges(ops, world_size, island_size, SLOTS)

    def run(rank: int) -> list[tuple[Any, ...]]:
        given: list[tuple[Any, ...]] = []
        for call, num_tokens in enumerate(calls):
            old = None if residual is None else residual[call, rank, :num_tokens]
            mine = x[call, rank, :num_tokens]
            given.append((kernels.all_reduce_islands(mine, group.channels[rank], old, device=ops.device),))
        return given

    return outputs_of(ops, group, [partial(run, rank) for rank in range(world_size)])
