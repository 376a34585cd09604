"""Collectives: what several ranks know together, written as functions of a list with one array a rank.

A rank is a process with a GPU of its own. Nothing here sends anything: shards[rank] is what a rank brings, and entry
`rank` of the result is what it takes away, so a test needs neither MPI nor a second process.

Every rank gets the same bits: a sum runs over the ranks in order, ((shard 0 + shard 1) + shard 2) + …, in float32
(float64 if the shards are float64) and is rounded once, to their dtype or to `storage`. Any number of ranks will do.
Slices need not be equal: rank r owns sizes[r] entries of an axis, and sizes[r] may be 0.

all_reduce = reduce_scatter, then all_gather: each rank sums one slice and hands it round ("two-shot"). A rank then
sends 2 (n − 1)/n of the array; when all send everything to all ("one-shot") it is n − 1 times the array, in one trip.

Source: MPI 4.1, chapter 6 (Allreduce, Allgatherv, Reduce_scatter, Alltoallv, Bcast).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ref.numerics import round_to

Array = NDArray[Any]


def split_sizes(total: int, world_size: int, unit: int = 1) -> list[int]:
    """How many of `total` entries each rank gets, when runs of `unit` entries stay together.

    Whole units are dealt out in rank order; where they do not divide, the first ranks have one more. If unit does not
    divide total, the last unit is short.

    Returns:
        world_size sizes that add up to total; [4, 3, 3] for 10 on 3 ranks, [256, 256, 256, 128] for 896 on 4 by 128.
    Raises:
        ValueError: world_size or unit below 1, or total below 0.

    Edge cases: fewer units than ranks leaves the last ranks with 0.
    """
    if world_size < 1 or unit < 1 or total < 0:
        raise ValueError(
            f"cannot split {total} entries by {unit} on {world_size} ranks; wanted total ≥ 0, unit ≥ 1, world_size ≥ 1"
        )
    num_units = -(-total // unit)
    ends = [min(total, unit * _first_unit(rank + 1, num_units, world_size)) for rank in range(world_size)]
    return [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def _first_unit(rank: int, num_units: int, world_size: int) -> int:
    return rank * (num_units // world_size) + min(rank, num_units % world_size)


def split_ranges(total: int, world_size: int, unit: int = 1) -> list[range]:
    """The same as entries: [range(0, 4), range(4, 7), range(7, 10)] for 10 on 3 ranks. Raises: see split_sizes."""
    ends = np.cumsum(split_sizes(total, world_size, unit)).tolist()
    return [range(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def all_reduce(shards: Sequence[Array], storage: str | None = None) -> list[Array]:
    """The sum over all ranks, on every rank.

    Args:
        shards: one array a rank, all of one shape and floating dtype.
        storage: see round_to; the type to which the sum is rounded.
    Returns:
        One array a rank, of that shape and dtype; all the same bits.
    Raises:
        ValueError: no shards, or the first rank that differs from rank 0 in shape or dtype.
    """
    total = _sum_in_rank_order(shards, storage)
    return [total.copy() for _ in shards]


def reduce_scatter(
    shards: Sequence[Array], axis: int = 0, sizes: Sequence[int] | None = None, storage: str | None = None
) -> list[Array]:
    """The sum over all ranks, of which rank r keeps its slice alone.

    Args:
        shards: one array a rank, all of one shape and floating dtype.
        axis: the axis that is cut.
        sizes: [world_size], length of each rank's slice; None deals out as split_sizes does.
    Returns:
        One array a rank, of the shards' dtype: slice r of all_reduce(shards), sizes[r] long along axis, else of their
        shape.
    Raises:
        ValueError: see all_reduce; sizes that do not fit the axis.
    """
    total = _sum_in_rank_order(shards, storage)
    if sizes is None:
        sizes = split_sizes(total.shape[axis], len(shards))
    return _cut(total, sizes, axis)


def all_gather(shards: Sequence[Array], axis: int = 0) -> list[Array]:
    """The slices of all ranks side by side in rank order, on every rank; exact.

    Args:
        shards: one array a rank, of one dtype; shapes may differ along axis, there alone.
    Raises:
        ValueError: no shards, or the first rank whose dtype or other axes differ from rank 0's.
    """
    _check_alike([np.delete(np.array(shard.shape), axis) for shard in shards], [shard.dtype for shard in shards])
    whole = np.concatenate(list(shards), axis=axis)
    return [whole.copy() for _ in shards]


def all_to_all(shards: Sequence[Array], counts: Sequence[Sequence[int]] | None = None, axis: int = 0) -> list[Array]:
    """Rank s sends the d-th piece of its array to rank d; a rank ends with the pieces meant for it, in rank order.

    Expert parallelism sends each token to the ranks of its experts so, and back with counts transposed.

    Args:
        shards: one array a rank, of one dtype; shapes may differ along axis, there alone.
        counts: [world_size, world_size], counts[s][d] entries go from s to d, in the order of d; None deals out each
            shard as split_sizes does.
    Returns:
        One array a rank; rank d's has Σ_s counts[s][d] entries along axis; dtype of the shards. Exact.
    Raises:
        ValueError: see all_gather; counts that do not fit.
    """
    world_size = len(shards)
    _check_alike([np.delete(np.array(shard.shape), axis) for shard in shards], [shard.dtype for shard in shards])
    if counts is None:
        counts = [split_sizes(shard.shape[axis], world_size) for shard in shards]
    if len(counts) != world_size:
        raise ValueError(f"counts has {len(counts)} rows for {world_size} ranks; wanted one row a rank")
    pieces = [_cut(shard, sizes, axis) for shard, sizes in zip(shards, counts, strict=True)]
    return [np.concatenate([pieces[s][d] for s in range(world_size)], axis=axis) for d in range(world_size)]


def broadcast(shards: Sequence[Array], root: int = 0) -> list[Array]:
    """What rank `root` has, on every rank; exact. What the others bring is not looked at.

    Args:
        shards: one array a rank, of any shape and dtype.
    Returns:
        One array a rank, of the root's shape and dtype.
    Raises:
        ValueError: root is no rank.
    """
    if not 0 <= root < len(shards):
        raise ValueError(f"root is {root}, but ranks are 0 to {len(shards) - 1}")
    return [shards[root].copy() for _ in shards]


def all_reduce_bytes(num_elements: int, world_size: int, itemsize: int = 2) -> list[int]:
    """Bytes that each rank sends (and receives) in a two-shot all_reduce of num_elements numbers of itemsize bytes.

    A rank that owns `own` of n elements sends n − own of them to their owners and its sum to world_size − 1 others.
    Equal slices give 2 (world_size − 1)/world_size · n · itemsize. Raises ValueError as split_sizes does.
    """
    owned = split_sizes(num_elements, world_size)
    return [itemsize * (num_elements - own + own * (world_size - 1)) for own in owned]


def _sum_in_rank_order(shards: Sequence[Array], storage: str | None) -> Array:
    _check_alike([np.array(shard.shape) for shard in shards], [shard.dtype for shard in shards])
    dtype = shards[0].dtype
    wide = np.float64 if dtype == np.float64 else np.float32
    total = shards[0].astype(wide)
    for shard in shards[1:]:
        total = total + shard.astype(wide)
    return round_to(total, storage).astype(dtype)


def _check_alike(shapes: Sequence[Array], dtypes: Sequence[np.dtype[Any]]) -> None:
    if not shapes:
        raise ValueError("no shards were given; wanted one array a rank")
    for rank, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True)):
        if dtype != dtypes[0] or shape.tolist() != shapes[0].tolist():
            raise ValueError(
                f"rank {rank} brings {dtype} {shape.tolist()} where rank 0 brings {dtypes[0]} {shapes[0].tolist()}; "
                "on the wire that would hang or give wrong sums"
            )


def _cut(array: Array, sizes: Sequence[int], axis: int) -> list[Array]:
    if sum(sizes) != array.shape[axis] or min(sizes) < 0:
        raise ValueError(f"slices of {list(sizes)} do not make up axis {axis}, which has {array.shape[axis]} entries")
    return [piece.copy() for piece in np.split(array, np.cumsum(sizes)[:-1], axis=axis)]
