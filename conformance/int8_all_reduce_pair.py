"""Cases of the all-reduce between two ranks as int8 in packets, with and without the residual add."""

from __future__ import annotations

from functools import partial
from typing import Any

from conformance.all_reduce import SKIP, outputs_of
from conformance.all_reduce_pair import reference
from conformance.all_reduce_pieces import make_inputs
from conformance.carried import carried_case
from conformance.case import HALVES, Case, Outputs
from conformance.ranked import PATHS, RankedOps, make_group
from engine.kernels.all_reduce_pair import int8_packets

SHAPES = {  # num_tokens of each call, hidden_size
    "few": ((1, 3), 32),  # less than a bundle
    "rows": ((5, 40, 3, 17), 96),
    "large": ((40, 8), 2112),  # more bundles than warps
}
MAX_BLOCKS = 2  # so that warps of the larger calls have several bundles


def cases() -> list[Case]:
    found = [
        make_case(path, wire, False, shape)
        for path in PATHS
        for wire in ("int8", "rotated")
        for shape in ("few", "rows")
    ]
    found += [make_case(path, "rotated", True, "large") for path in PATHS]
    return found + [
        carried_case("int8_all_reduce_pair", int8_packets, path, 2, (40, 2112), has_owners=False) for path in PATHS
    ]


def make_case(path: str, wire: str, added: bool, shape: str) -> Case:
    calls, hidden_size = SHAPES[shape]
    axes: dict[str, Any] = {"calls": calls, "hidden_size": hidden_size, "path": path, "wire": wire, "added": added}
    return Case(
        stem="int8_all_reduce_pair",
        name="-".join([*(["add"] if added else []), wire, shape, path]),
        axes=axes,
        make_inputs=partial(make_inputs, world_size=2, **axes),
        reference=reference,
        candidate=_candidate,
        changes=("residual",) if added else (),
        storages=HALVES,
        skip=SKIP,
    )


def _candidate(ops: RankedOps, x: Any, calls: tuple[int, ...], path: str, wire: str, residual: Any = None) -> Outputs:
    group = make_group(ops, 2, path, int(x[0, 0].nbytes) + 4096, max_blocks=MAX_BLOCKS)

    def run(rank: int) -> list[tuple[Any, ...]]:
        given: list[tuple[Any, ...]] = []
        for call, num_tokens in enumerate(calls):
            old = None if residual is None else residual[call, rank, :num_tokens]
            mine, rotate = x[call, rank, :num_tokens], wire == "rotated"
            given.append((int8_packets(mine, group.channels[rank], old, rotate=rotate, device=ops.device),))
        return given

    return outputs_of(ops, group, [partial(run, rank) for rank in range(2)])
