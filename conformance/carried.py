"""What cases of int8 sums with carried errors have in common: the sums of a step, one after another."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.case import Inputs, Kept, Outputs
from conformance.inputs import normal
from conformance.ranked import RankedOps, zeros
from engine.kernels.carried import CARRIED, Carried
from ref.int8_all_reduce import int8_all_reduce
from ref.int8_feedback import int8_feedback_all_reduce, nothing_carried
from ref.numerics import round_to

Array = NDArray[Any]

WIRES = ("int8", "rotated", "carried")  # of these the last is rotated too
NUM_SUMS = 3  # of a step
NAN_BITS = 0x7FC0  # of bfloat16


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


def step_disturb(inputs: Inputs, rng: np.random.Generator) -> Kept:
    """Tokens do not meet: token 0 keeps its bits."""
    x = inputs["x"]
    x[:, :, 1:] = normal(rng, *x[:, :, 1:].shape, scale=100.0)
    ranks = range(x.shape[1])
    names = [f"sum_{call}_rank_{rank}" for call in range(NUM_SUMS) for rank in ranks]
    names += wide_outputs(len(ranks)) if inputs["wire"] == "carried" else ()
    return dict.fromkeys(names, slice(0, 1))
