"""The INT8 all-reduce with error feedback: what one sum of a step has rounded away is added to the next.

A residual stream is a sum of sums, Σ_k Σ_r x_rk, so what the stream lacks is Σ_k of all errors. With feedback each
rank remembers what it has left out of sum k, and adds it to what it brings to sum k + 1:

    y   = H x + carried          x: this rank's shard; carried: of the sum before, 0 at the first of a step
    sum                          as in int8_all_reduce.py, of the ranks' y
    carried = y − q · scale      of groups that it has sent; without owners of all
    carried = Σ − q · scale      of groups that it owns: what the sum lost when it was quantized again

A group has one of the two on each rank, so [num_groups, 32] hold all. No error is ever lost but that of rounding what
is carried to `carried_storage`: the sums of a step and what is carried at its end add up to the shards,

    Σ_k out_k + H Σ_r carried_r = Σ_k Σ_r x_rk          but for float32 rounding.

So the stream is off by the error of one sum, not of all before it. The bytes on the wire are the same. The last sum of
a step goes over an exact wire in the engine: no other comes after it that would make its error good.

Source: error feedback of Seide et al. 2014, "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel
Distributed Training of Speech DNNs", there over the steps of training; both ways, as in Tang et al. 2019,
"DoubleSqueeze".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ref.int8_all_reduce import GROUP, Floats, check_shards, from_groups, sum_groups, to_groups
from ref.numerics import round_to

Array = NDArray[Any]

CARRIED = "bfloat16"  # what is carried has the range of float32 then; 1/256 of an error is of no matter


def nothing_carried(num_tokens: int, hidden_size: int) -> Floats:
    """[num_tokens · ⌈hidden_size/32⌉, 32] float32 zeros: what a rank brings to the first sum of a step."""
    return np.zeros((num_tokens * -(-hidden_size // GROUP), GROUP), np.float32)


def int8_feedback_all_reduce(
    shards: Sequence[Array],
    carried: Sequence[Floats],
    *,
    rotate: bool = True,
    owners: bool | None = None,
    storage: str | None = None,
    carried_storage: str | None = CARRIED,
) -> tuple[list[Array], list[Floats]]:
    """The sum over all ranks of their shards and of what they carry, and what they carry from now on.

    Args:
        shards: one [num_tokens, hidden_size] a rank, as for int8_all_reduce.
        carried: [num_tokens · ⌈hidden_size/32⌉, 32] float32 of each rank, of rotated groups if rotate: what this gave
            for the sum before, or nothing_carried. Not changed.
        rotate, owners, storage: as for int8_all_reduce.
        carried_storage: the type to which what is carried is rounded.
    Returns:
        One [num_tokens, hidden_size] a rank, in the shards' dtype, the same bits on all ranks; and the carried of each.
    Raises:
        ValueError: as int8_all_reduce.

    Numerics: y and both differences in float32, one rounding each.
    Edge cases: one rank keeps its shard and carries what it did. A group with an inf or NaN is NaN in what is carried
    too, to the end of the step. A group that travels as zeros is carried whole.
    """
    check_shards(shards)
    num_tokens, hidden_size = shards[0].shape
    if len(shards) == 1:
        return [round_to(shards[0], storage).copy()], [carried[0].copy()]
    with np.errstate(invalid="ignore", over="ignore"):  # see the edge cases
        groups = [to_groups(shard, rotate) + owed for shard, owed in zip(shards, carried, strict=True)]
        summed, left_out = sum_groups(groups, owners)
        result = round_to(from_groups(summed, num_tokens, hidden_size, rotate), storage).astype(shards[0].dtype)
        return [result.copy() for _ in shards], [round_to(owed, carried_storage) for owed in left_out]
