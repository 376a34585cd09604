"""What cases of int8 sums with carried errors have in common: the sums of a step, one after another."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.all_reduce import SKIP, outputs_of
from conformance.case import HALVES, Case, Inputs, Kept, Outputs
from conformance.inputs import normal
from conformance.ranked import Group, RankedOps, make_exchanges, make_group, zeros
from engine.kernels.carried import CARRIED, Carried
from engine.kernels.channel import Slots
from ref.int8_all_reduce import int8_all_reduce
from ref.int8_feedback import int8_feedback_all_reduce, nothing_carried
from ref.numerics import round_to

Array = NDArray[Any]

WIRES = ("int8", "rotated", "carried")  # of these the last is rotated too
NUM_SUMS = 3  # of a step
NAN_BITS = 0x7FC0  # of bfloat16
Kernel = Callable[..., Any]  # (x, channel or exchange, residual, carried, device=…) → the sum


def step_inputs(rng: np.random.Generator, num_tokens: int, hidden_size: int, world_size: int, wire: str) -> Inputs:
    """x [NUM_SUMS, world_size, rows, hidden_size], with outliers and a token of zeros; where errors are carried a
    residual of the same shape, the same for all ranks. Rows are a multiple of 8: arrays begin at multiples of 16 bytes.
    """
    shape = NUM_SUMS, world_size, -(-num_tokens // 8) * 8, hidden_size
    x = normal(rng, *shape) * np.resize(np.array([1.0, 30.0, 1e-3], np.float32), (world_size, 1, 1))
    x[..., 5] *= 50.0
    x[..., 1, :] = 0.0
    inputs: Inputs = {"x": x, "num_tokens": num_tokens, "wire": wire}
    if wire == "carried":
        inputs["residual"] = np.repeat(normal(rng, NUM_SUMS, 1, *shape[2:]), world_size, axis=1)
    return inputs


def step_reference(
    x: Array,
    num_tokens: int,
    wire: str,
    residual: Array | None = None,
    storage: str | None = None,
    owners: bool | None = None,
    **_: Any,
) -> Outputs:
    """The sums, rounded once they are added to the residual; and what each rank carries in the end."""
    ranks, hidden_size = range(x.shape[1]), x.shape[3]
    carried = [nothing_carried(num_tokens, hidden_size) for _ in ranks]
    outputs: Outputs = {}
    for call in range(NUM_SUMS):
        shards = list(x[call, :, :num_tokens])
        if wire == "carried":
            sums, carried = int8_feedback_all_reduce(shards, carried, owners=owners)
        else:
            sums = int8_all_reduce(shards, rotate=wire == "rotated", owners=owners)
        for rank in ranks:
            whole = sums[rank] if residual is None else sums[rank] + residual[call, rank, :num_tokens]
            outputs[f"sum_{call}_rank_{rank}"] = round_to(whole, storage)
    if wire == "carried":
        outputs |= {f"carried_rank_{rank}": carried[rank].reshape(num_tokens, hidden_size) for rank in ranks}
    return outputs


def wide_outputs(world_size: int) -> tuple[str, ...]:
    """Names of those that are float32, or bfloat16 as float32, whatever the storage type."""
    return tuple(f"carried_rank_{rank}" for rank in range(world_size))


class Errors:
    """What one rank carries through the sums of a step; at first NaN, which nobody may read."""

    def __init__(self, ops: RankedOps, num_tokens: int, hidden_size: int, wire: str) -> None:
        self._device, self._has_any = ops.device, wire == "carried"
        bits = zeros(ops.device, num_tokens * hidden_size if self._has_any else 0, np.uint16)
        bits[...] = NAN_BITS
        self._array = bits.view(CARRIED).reshape(-1, hidden_size)

    def of(self, call: int) -> Carried | None:
        return Carried(self._array, is_new=call == 0) if self._has_any else None

    def output(self, rank: int) -> Outputs:
        if not self._has_any:
            return {}
        return {f"carried_rank_{rank}": self._device.to_host(self._array).astype(np.float32)}


def carried_case(
    stem: str,
    kernel: Kernel,
    path: str,
    world_size: int,
    shape: tuple[int, int],
    slots: Slots | None = None,
    has_owners: bool = True,
) -> Case:
    """The sums of a step over kernels that wait for each other, through an exchange of these slots or a channel."""
    axes: dict[str, Any] = {
        "num_tokens": shape[0],
        "hidden_size": shape[1],
        "world_size": world_size,
        "wire": "carried",
    }
    return Case(
        stem=stem,
        name=f"carried-{path}-of-{world_size}",
        axes=axes | {"path": path},
        make_inputs=partial(_seeded_inputs, **axes),
        reference=partial(step_reference, owners=has_owners),
        candidate=partial(_candidate, kernel=kernel, path=path, slots=slots, has_owners=has_owners),
        disturb=step_disturb,
        changes=("residual",),
        wide=wide_outputs(world_size),
        storages=HALVES if world_size <= 3 else ("bfloat16",),
        skip=SKIP,
    )


def _seeded_inputs(seed: int, num_tokens: int, hidden_size: int, world_size: int, wire: str) -> Inputs:
    return step_inputs(np.random.default_rng(seed), num_tokens, hidden_size, world_size, wire)


def _candidate(
    ops: RankedOps,
    x: Any,
    num_tokens: int,
    wire: str,
    residual: Any,
    kernel: Kernel,
    path: str,
    slots: Slots | None,
    has_owners: bool,
) -> Outputs:
    world_size, hidden_size = int(x.shape[1]), int(x.shape[3])
    group: Group = (
        make_group(ops, world_size, path, 4 * int(x[0, 0].nbytes), max_blocks=2)
        if slots is None
        else make_exchanges(ops, world_size, path, slots, has_owners=has_owners)
    )
    errors = [Errors(ops, num_tokens, hidden_size, wire) for _ in range(world_size)]

    def run(rank: int) -> list[tuple[Any, ...]]:
        given: list[tuple[Any, ...]] = []
        for call in range(NUM_SUMS):
            mine, old = x[call, rank, :num_tokens], residual[call, rank, :num_tokens]
            given.append((kernel(mine, group.channels[rank], old, errors[rank].of(call), device=ops.device),))
        return given

    outputs = outputs_of(ops, group, [partial(run, rank) for rank in range(world_size)])
    for rank in range(world_size):
        outputs |= errors[rank].output(rank)
    return outputs


def step_disturb(inputs: Inputs, rng: np.random.Generator) -> Kept:
    """Tokens do not meet: token 0 keeps its bits."""
    x = inputs["x"]
    x[:, :, 1:] = normal(rng, *x[:, :, 1:].shape, scale=100.0)
    ranks = range(x.shape[1])
    names = [f"sum_{call}_rank_{rank}" for call in range(NUM_SUMS) for rank in ranks]
    names += wide_outputs(len(ranks)) if inputs["wire"] == "carried" else ()
    return dict.fromkeys(names, slice(0, 1))
