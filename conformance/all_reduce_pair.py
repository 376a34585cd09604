"""Cases of the all-reduce between two ranks in chunks, as numbers and as int8, with and without the residual add."""

from __future__ import annotations

from functools import partial
from typing import Any

from numpy.typing import NDArray

from conformance.all_reduce import SKIP, outputs_of
from conformance.all_reduce_pieces import make_inputs
from conformance.carried import carried_case
from conformance.case import HALVES, Case, Outputs
from conformance.ranked import PATHS, RankedOps, make_exchanges
from engine.kernels import all_reduce_pair as kernels
from engine.kernels.channel import Slots
from ref import collectives
from ref.int8_all_reduce import int8_all_reduce
from ref.numerics import round_to

Array = NDArray[Any]

WIRES = ("numbers", "int8", "rotated")
SHAPES = {  # num_tokens of each call, hidden_size
    "few": ((1, 3), 32),  # less than a bundle
    "rows": ((5, 40, 3, 17), 96),
    "ragged": ((7, 90, 1), 33),
    "large": ((40, 8, 24), 2112),
}
# so that slots are used again in a call, which has warps and blocks without a bundle at its end
SLOTS = Slots(num_lanes=2, num_stages=8, slot_bytes=4608)


def cases() -> list[Case]:
    found = [make_case(path, wire, False, shape) for path in PATHS for wire in WIRES for shape in ("few", "rows")]
    found += [make_case(path, wire, True, "large") for path in PATHS for wire in WIRES]
    found += [make_case("peer", "numbers", True, "ragged"), make_case("window", "numbers", False, "ragged")]
    kernel, shape = kernels.int8_all_reduce_pair, (40, 2112)
    return found + [carried_case("all_reduce_pair", kernel, path, 2, shape, SLOTS, has_owners=False) for path in PATHS]


def make_case(path: str, wire: str, added: bool, shape: str) -> Case:
    calls, hidden_size = SHAPES[shape]
    axes: dict[str, Any] = {"calls": calls, "hidden_size": hidden_size, "path": path, "wire": wire, "added": added}
    return Case(
        stem="all_reduce_pair",
        name="-".join([*(["add"] if added else []), wire, shape, path]),
        axes=axes,
        make_inputs=partial(make_inputs, world_size=2, **axes),
        reference=reference,
        candidate=_candidate,
        changes=("residual",) if added else (),
        storages=(*HALVES, "float32") if wire == "numbers" else HALVES,
        skip=SKIP,
    )


def reference(
    x: Array,
    calls: tuple[int, ...],
    path: str,
    wire: str,
    residual: Array | None = None,
    storage: str | None = None,
) -> Outputs:
    """One rounding, of the sum with the residual."""
    outputs: Outputs = {}
    for call, num_tokens in enumerate(calls):
        shards = list(x[call, :, :num_tokens])
        if wire == "numbers":
            total = collectives.all_reduce(shards)[0]
        else:
            total = int8_all_reduce(shards, rotate=wire == "rotated")[0]
        for rank in range(2):
            whole = total if residual is None else total + residual[call, rank, :num_tokens]
            outputs[f"sum_{call}_rank_{rank}"] = round_to(whole, storage)
    return outputs


def _candidate(ops: RankedOps, x: Any, calls: tuple[int, ...], path: str, wire: str, residual: Any = None) -> Outputs:
    group = make_exchanges(ops, 2, path, SLOTS, has_owners=False)

    def run(rank: int) -> list[tuple[Any, ...]]:
        given: list[tuple[Any, ...]] = []
        for call, num_tokens in enumerate(calls):
            old = None if residual is None else residual[call, rank, :num_tokens]
            arguments = x[call, rank, :num_tokens], group.channels[rank], old
            if wire == "numbers":
                given.append((kernels.all_reduce_pair(*arguments, device=ops.device),))
            else:
                rotate = wire == "rotated"
                given.append((kernels.int8_all_reduce_pair(*arguments, rotate=rotate, device=ops.device),))
        return given

    return outputs_of(ops, group, [partial(run, rank) for rank in range(2)])
