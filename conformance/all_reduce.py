"""Cases of the all-reduce in one trip, alone, with the residual add, and with that and RMSNorm.

A case is a row of calls on one channel, of other sizes one after another, so that what a call leaves behind is in the
way of later ones.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.case import HALVES, Case, Inputs, Kept, Outputs
from conformance.inputs import normal
from conformance.ranked import PATHS, Group, RankedOps, make_group
from engine.kernels import all_reduce as kernels
from engine.kernels.channel import packets
from ref import collectives
from ref.numerics import round_to
from ref.rmsnorm import add_rmsnorm

Array = NDArray[Any]

ADDED = ("plain", "add", "norm")  # what is fused
SHAPES = {  # num_tokens of each call, hidden_size
    "one-token": ((1,), 64),
    "rows": ((3, 8, 1, 5), 96),
    "ragged": ((7, 5, 8), 33),
    "large": ((16, 1, 24, 2), 1032),
}
SKIP = {
    "cpu": "ranks of a CPU add up by MPI, which has tests of its own",
    "sanitizer": "kernels of ranks share memory, which launches in processes of their own do not",
}
LAST_NUMBERS = {"from-0": 0, "wraps": 0xFFFFFFFE}  # that a channel has come to
MAX_BLOCKS = 3  # so that blocks of the larger calls have several pieces, or rows


def cases() -> list[Case]:
    found = [
        make_case(path, added, world_size, "rows")
        for world_size in (2, 3, 4, 5, 6, 7, 8)
        for path in PATHS
        for added in ADDED
    ]
    found += [
        make_case(PATHS[number % 2], added, world_size, shape)
        for world_size in (2, 3)
        for added in ADDED
        for number, shape in enumerate(SHAPES)
        if shape != "rows" and not (added == "norm" and shape == "ragged")
    ]
    found += [make_case("window", added, 2, "wide") for added in ("add", "norm")]
    return found + [make_case(path, "plain", 2, "rows", "wraps") for path in PATHS]


def make_case(path: str, added: str, world_size: int, shape: str, start: str = "from-0") -> Case:
    calls, hidden_size = SHAPES.get(shape, ((1, 2, 1), 8192))
    axes: dict[str, Any] = {
        "calls": calls,
        "hidden_size": hidden_size,
        "world_size": world_size,
        "path": path,
        "added": added,
    }
    storages = (*HALVES, "float32") if world_size <= 3 and shape != "wide" else ("bfloat16",)
    return Case(
        stem="all_reduce",
        name="-".join([added, shape, path, f"of-{world_size}", *([start] if start != "from-0" else [])]),
        axes=axes,
        make_inputs=partial(_inputs, **axes, last_number=LAST_NUMBERS[start]),
        reference=partial(_reference, added=added),
        candidate=partial(_candidate, added=added),
        changes=("residual",) if added != "plain" else (),
        disturb=partial(_disturb, added=added),
        storages=storages,
        skip=SKIP,
    )


def _inputs(
    seed: int, calls: tuple[int, ...], hidden_size: int, world_size: int, path: str, added: str, last_number: int
) -> Inputs:
    """x [num_calls, world_size, most tokens, hidden_size]; residual alike, the same for all ranks."""
    rng = np.random.default_rng(seed)
    rows = -(-max(calls) // 8) * 8  # so that every array begins at a multiple of 16 bytes
    shape = len(calls), world_size, rows, hidden_size
    sizes = np.resize(np.array([1.0, 30.0, 1e-3], np.float32), (world_size, 1, 1))
    inputs: Inputs = {"x": normal(rng, *shape) * sizes, "calls": calls, "path": path, "last_number": last_number}
    if added != "plain":
        inputs["residual"] = np.repeat(normal(rng, shape[0], 1, *shape[2:]), world_size, axis=1)
    if added == "norm":
        inputs |= {"weight": 1 + normal(rng, hidden_size, scale=0.2), "eps": 1e-5}
    return inputs


def _reference(
    x: Array,
    calls: tuple[int, ...],
    path: str,
    last_number: int,
    residual: Array | None = None,
    weight: Array | None = None,
    eps: float = 0.0,
    storage: str | None = None,
    added: str = "plain",
) -> Outputs:
    """One rounding at the end of the sum with the residual."""
    outputs: Outputs = {}
    for call, num_tokens in enumerate(calls):
        total = collectives.all_reduce(list(x[call, :, :num_tokens]))[0]
        for rank in range(x.shape[1]):
            where = f"{call}_rank_{rank}"
            if residual is None:
                outputs[f"sum_{where}"] = round_to(total, storage)
            elif weight is None:
                outputs[f"sum_{where}"] = round_to(total + residual[call, rank, :num_tokens], storage)
            else:
                normed, new = add_rmsnorm(total, residual[call, rank, :num_tokens], weight, eps, storage=storage)
                outputs |= {f"normed_{where}": normed, f"sum_{where}": new}
    return outputs


def _candidate(
    ops: RankedOps,
    x: Any,
    calls: tuple[int, ...],
    path: str,
    last_number: int,
    residual: Any = None,
    weight: Any = None,
    eps: float = 0.0,
    added: str = "plain",
) -> Outputs:
    device = ops.device
    world_size = x.shape[1]
    row_bytes = x.shape[3] * x.itemsize
    num_bytes = max(calls) * (packets(row_bytes) * 12 if added == "norm" else row_bytes)  # a row has whole packets
    group = make_group(ops, world_size, path, num_bytes, last_number, max_blocks=MAX_BLOCKS)

    def run(rank: int) -> list[tuple[Any, ...]]:
        channel = group.channels[rank]
        given: list[tuple[Any, ...]] = []
        for call, num_tokens in enumerate(calls):
            mine = x[call, rank, :num_tokens]
            old = None if residual is None else residual[call, rank, :num_tokens]
            if added == "norm":
                normed, new = kernels.all_reduce_add_rmsnorm(mine, old, weight, eps, channel, device=device)
                given.append((new, normed))
            else:
                given.append((kernels.all_reduce(mine, channel, old, device=device),))
        return given

    return outputs_of(ops, group, [partial(run, rank) for rank in range(world_size)])


def outputs_of(ops: RankedOps, group: Group, ranks: list[Callable[[], list[tuple[Any, ...]]]]) -> Outputs:
    """What ranks give that run together, under names; a list entry a call: (sum, normed if there is that too).

    Raises:
        AssertionError: a rank gave up waiting, or ranks do not have the same bits.
    """
    found = ops.together(ranks)
    if reports := group.reports():
        raise AssertionError(f"waiting was given up: {reports}")
    outputs: Outputs = {}
    for rank, given in enumerate(found):
        for call, arrays in enumerate(given):
            for name, array, first in zip(("sum", "normed"), arrays, found[0][call], strict=False):
                if ops.device.to_host(array).tobytes() != ops.device.to_host(first).tobytes():
                    raise AssertionError(f"{name} of call {call}: rank {rank} has other bits than rank 0")
                outputs[f"{name}_{call}_rank_{rank}"] = array
    return outputs


def _disturb(inputs: Inputs, rng: np.random.Generator, added: str) -> Kept:
    """Tokens do not meet: token 0 of each call keeps its bits."""
    x = inputs["x"]
    x[:, :, 1:] = normal(rng, *x[:, :, 1:].shape, scale=100.0)
    names = ("sum", "normed") if added == "norm" else ("sum",)
    calls = len(inputs["calls"])
    ranks = range(x.shape[1])
    return {f"{name}_{call}_rank_{rank}": slice(0, 1) for name in names for call in range(calls) for rank in ranks}
