"""Cases of the all-reduce as int8 in two trips of packets, with and without the residual add."""

from __future__ import annotations

from functools import partial
from typing import Any

from conformance.all_reduce import SKIP, outputs_of
from conformance.all_reduce_pieces import make_inputs, reference
from conformance.carried import carried_case
from conformance.case import HALVES, Case, Outputs
from conformance.ranked import PATHS, RankedOps, make_group
from engine.kernels import int8_all_reduce as kernels

SHAPES = {  # num_tokens of each call, hidden_size
    "few": ((1, 3), 256),  # a group for each of 8 ranks
    "rows": ((5, 40, 3, 9), 96),
    "large": ((40, 8), 2112),  # more bundles than warps
}
MAX_BLOCKS = 3  # so that warps of the larger calls have several bundles


def cases() -> list[Case]:
    found = [
        make_case(path, wire, False, world_size, shape)
        for world_size in range(2, 9)
        for path in PATHS
        for wire in ("int8", "rotated")
        for shape in ("few", "rows")
        if world_size <= 3 or wire == "rotated"
    ]
    found += [make_case(path, "rotated", True, world_size, "large") for world_size in (2, 3) for path in PATHS]
    sizes = (("window", 3), ("peer", 3), ("window", 4), ("peer", 8))
    return found + [
        carried_case("int8_all_reduce", kernels.int8_all_reduce, path, world_size, (40, 2112))
        for path, world_size in sizes
    ]


def make_case(path: str, wire: str, added: bool, world_size: int, shape: str) -> Case:
    calls, hidden_size = SHAPES[shape]
    axes: dict[str, Any] = {"calls": calls, "hidden_size": hidden_size, "world_size": world_size}
    axes |= {"path": path, "wire": wire, "added": added}
    return Case(
        stem="int8_all_reduce",
        name="-".join([*(["add"] if added else []), wire, shape, path, f"of-{world_size}"]),
        axes=axes,
        make_inputs=partial(make_inputs, **axes),
        reference=reference,
        candidate=_candidate,
        changes=("residual",) if added else (),
        storages=HALVES if world_size <= 3 else ("bfloat16",),
        skip=SKIP,
    )


def _candidate(ops: RankedOps, x: Any, calls: tuple[int, ...], path: str, wire: str, residual: Any = None) -> Outputs:
    world_size = x.shape[1]
    group = make_group(ops, world_size, path, 4 * int(x[0, 0].nbytes), max_blocks=MAX_BLOCKS)

    def run(rank: int) -> list[tuple[Any, ...]]:
        given: list[tuple[Any, ...]] = []
        for call, num_tokens in enumerate(calls):
            old = None if residual is None else residual[call, rank, :num_tokens]
            mine, rotate = x[call, rank, :num_tokens], wire == "rotated"
            given.append((kernels.int8_all_reduce(mine, group.channels[rank], old, rotate=rotate, device=ops.device),))
        return given

    return outputs_of(ops, group, [partial(run, rank) for rank in range(world_size)])
