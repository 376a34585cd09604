"""All-reduce with 8-bit integers on the wire: 34 bytes travel where bfloat16 needs 64.

The hidden axis is cut into groups of 32 (the last one padded with zeros). A group travels as 32 int8 and one bfloat16
scale, and each rank owns a run of the groups:

    rotate      y = H x, H the orthonormal 32-point Hadamard matrix, so that one outlier is spread over its group
    quantize    scale = max |y| / 127, rounded up to bfloat16;  q = round(y / scale)
    exchange    q and scale of each group go to the group's owner
    sum         over ranks in order, in float32; the owner's own y is not quantized
    requantize  the sum, in the same way
    gather      q and scale of each sum go to all ranks
    dequantize  x = H (q · scale), on the owner too, from what it sent: all ranks end with the same bits

Without owners each rank sends all its groups to all others, and all sum what was sent, their own codes too: one trip
for two, and one rounding fewer. Of two ranks it is as many bytes, so two ranks have no owners.

rotate=False leaves H out: the plain form. Relative error of four ranks of Gaussian noise: 0.7 % either way; with one
channel of each group 50 times as large, as hidden states have them, 1.7 % plain and 0.36 % rotated.

Source: the plain form is that of ZhiLight (zhihu/ZhiLight, INT8 reduce); the rotation follows Ashkboos et al.
2024, "QuaRot".

Why a bfloat16 scale: it has the range of float32, so a partial sum of any size can travel; a float16 scale would end
at 65504 · 127 and be subnormal, with ever fewer bits, in groups below 127 · 2⁻¹⁴ = 0.008. The price is at most 1/128 of
a step. Rounded up, the largest element is at most 127 scale (1 + 2⁻²³), which rounds to 127: nothing saturates.

How wrong it can be: int8_all_reduce_bound.py. How the errors of one sum are made good in the next: int8_feedback.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ref.collectives import split_ranges
from ref.numerics import bf16_to_float32, round_to

Array = NDArray[Any]
Floats = NDArray[np.float32]
Quantized = tuple[NDArray[np.int8], NDArray[np.uint16]]

GROUP = 32
GROUP_BYTES = GROUP + 2
ROTATION = np.float32(1 / math.sqrt(GROUP))
# a group below this travels as zeros, so that hardware that flushes subnormals and hardware that keeps them agree
SMALLEST = np.float32(2.0**-100)


def hadamard(x: Floats) -> Floats:
    """H x for each group of 32, with H[i, j] = (−1)^popcount(i & j) / √32; its own inverse.

    Five rounds of sums and differences at distance 1, 2, 4, 8, 16, then one multiplication by 1/√32.

    Args:
        x: [..., 32] float32.
    Returns:
        [..., 32] float32.

    Numerics: float32; magnitudes above 2¹²² may overflow on the way.
    """
    with np.errstate(invalid="ignore", over="ignore"):  # inf − inf is NaN: meant to be seen
        for distance in (1, 2, 4, 8, 16):
            pairs = x.reshape(*x.shape[:-1], GROUP // (2 * distance), 2, distance)
            first, second = pairs[..., 0, :], pairs[..., 1, :]
            x = np.stack([first + second, first - second], axis=-2).reshape(x.shape)
        return x * ROTATION


def quantize_groups(y: Floats) -> Quantized:
    """Each group as 32 integers and the bits of a bfloat16 scale.

    Args:
        y: [num_groups, 32] float32, rotated already if it is to be.
    Returns:
        q [num_groups, 32] int8 from −127 to 127 and scale [num_groups] uint16, bfloat16 bits.

    Numerics: q = round(y · (1/scale)), ties to even, each step in float32.
    Edge cases: a group with no magnitude of 2⁻¹⁰⁰ or more has scale 0 and q 0. A group with an inf or NaN has the
    scale NaN, so that all of it arrives as NaN: trouble is spread, never hidden.
    """
    largest = np.max(np.abs(y), axis=-1)  # NaN if any is
    bits = (largest / np.float32(127)).view(np.uint32)
    scale = ((bits.astype(np.uint64) + 0xFFFF) >> 16).astype(np.uint16)  # up, unless the lower half is 0 already
    scale = np.where(largest < SMALLEST, 0, np.where(np.isfinite(largest), scale, 0x7FC0)).astype(np.uint16)
    usable = np.isfinite(largest) & (largest >= SMALLEST)
    inverse = np.float32(1) / np.where(usable, bf16_to_float32(scale), np.float32(1))
    q = np.rint(np.where(usable[:, None], y, np.float32(0)) * inverse[:, None]).astype(np.int8)
    return q, scale


def dequantize_groups(q: NDArray[np.int8], scale: NDArray[np.uint16]) -> Floats:
    """q [num_groups, 32] · scale [num_groups] (bfloat16 bits): [num_groups, 32] float32; exact."""
    return q.astype(np.float32) * bf16_to_float32(scale)[:, None]


def to_groups(x: Array, rotate: bool) -> Floats:
    """[num_tokens, hidden_size] → [num_tokens · ⌈hidden_size/32⌉, 32] float32, each row padded with zeros."""
    num_tokens, hidden_size = x.shape
    padded = np.zeros((num_tokens, -(-hidden_size // GROUP) * GROUP), np.float32)
    padded[:, :hidden_size] = x
    groups = padded.reshape(-1, GROUP)
    return hadamard(groups) if rotate else groups


def from_groups(groups: Floats, num_tokens: int, hidden_size: int, rotate: bool) -> Floats:
    """The way back: groups [num_tokens · ⌈hidden_size/32⌉, 32] → [num_tokens, hidden_size] float32, without padding."""
    x = hadamard(groups) if rotate else groups
    return x.reshape(num_tokens, -(-hidden_size // GROUP) * GROUP)[:, :hidden_size]


def int8_all_reduce(
    shards: Sequence[Array], *, rotate: bool = True, owners: bool | None = None, storage: str | None = None
) -> list[Array]:
    """The sum over all ranks on every rank, about as exact as 8 bits a group of 32 allow, for half the bytes.

    Args:
        shards: one [num_tokens, hidden_size] a rank, of one floating dtype; taken as float32.
        rotate: whether groups are rotated; the better choice for hidden states, which have outlier channels.
        owners: whether groups have owners that sum them; None: of more than two ranks they have.
        storage: see round_to; the type to which the result is rounded at the end.
    Returns:
        One [num_tokens, hidden_size] a rank, in the shards' dtype; the same bits on all ranks.
    Raises:
        ValueError: no shards, one that is not two-dimensional, or ranks that differ in shape or dtype.

    Numerics: see the top of this file. The error before the last rounding is at most that of
    ref.int8_all_reduce_bound.error_bound.
    Edge cases: one rank sends nothing and keeps its shard, exactly. Ranks may own no group, or one more than others.
    """
    check_shards(shards)
    num_tokens, hidden_size = shards[0].shape
    if len(shards) == 1:
        return [round_to(shards[0], storage).copy()]
    summed, _ = sum_groups([to_groups(shard, rotate) for shard in shards], owners)
    x = from_groups(summed, num_tokens, hidden_size, rotate)
    result = round_to(x, storage).astype(shards[0].dtype)
    return [result.copy() for _ in shards]


def sum_groups(groups: Sequence[Floats], owners: bool | None = None) -> tuple[Floats, list[Floats]]:
    """What all ranks have in the end, and what each has left out of it.

    Args:
        groups: [num_groups, 32] float32 of each rank.
        owners: as for int8_all_reduce.
    Returns:
        The sums, [num_groups, 32] float32, as they were dequantized. Of each rank [num_groups, 32] float32: what it
        rounded off its groups, or, where it owns them, off their sum.
    """
    sent = [quantize_groups(group) for group in groups]
    arrived = [dequantize_groups(*codes) for codes in sent]
    with np.errstate(invalid="ignore", over="ignore"):  # what overflows is NaN when it is quantized
        left_out = [group - part for group, part in zip(groups, arrived, strict=True)]
        if owners is False or (owners is None and len(groups) == 2):
            total = np.zeros_like(groups[0])
            for part in arrived:
                total = total + part
            return total, left_out
        sums = []
        for rank, owned in enumerate(split_ranges(len(groups[0]), len(groups))):
            here = slice(owned.start, owned.stop)
            total = sum_slice(rank, here, groups, sent)
            sums.append(dequantize_groups(*quantize_groups(total)))  # the owner, too, goes on from what it sends
            left_out[rank][here] = total - sums[-1]
        return np.concatenate(sums), left_out


def sum_slice(rank: int, owned: slice, groups: Sequence[Floats], sent: Sequence[Quantized]) -> Floats:
    """What owner `rank` sums before it is quantized again: its slice, in rank order, its own part as it is.

    Args:
        owned: which groups it owns.
        groups: [num_groups, 32] float32 of each rank; only the owner's is read.
        sent: (q, scale) of each rank, shapes as quantize_groups gives them; the owner's are not read.
    Returns:
        [num_owned, 32] float32.
    """
    total = np.zeros_like(groups[rank][owned])
    for source, (q, scale) in enumerate(sent):
        part = groups[rank][owned] if source == rank else dequantize_groups(q[owned], scale[owned])
        with np.errstate(invalid="ignore", over="ignore"):  # what overflows becomes NaN in quantize_groups
            total = total + part
    return total


def wire_bytes(num_tokens: int, hidden_size: int, world_size: int) -> list[int]:
    """Bytes that each rank sends (and receives): 34 a group to its owner, then 34 a sum to each other rank.

    Equal slices give 34 · 2 (world_size − 1)/world_size · groups; see all_reduce_bytes for wider numbers.
    """
    num_groups = num_tokens * -(-hidden_size // GROUP)
    owned = [len(part) for part in split_ranges(num_groups, world_size)]
    return [GROUP_BYTES * (num_groups - own + own * (world_size - 1)) for own in owned]


def check_shards(shards: Sequence[Array]) -> None:
    """Raises ValueError unless shards are one [num_tokens, hidden_size] a rank, all of one shape and dtype."""
    if not shards:
        raise ValueError("no shards were given; wanted one array a rank")
    for rank, shard in enumerate(shards):
        if shard.ndim != 2:
            raise ValueError(f"rank {rank} brings shape {list(shard.shape)}; wanted [num_tokens, hidden_size]")
        if shard.shape != shards[0].shape or shard.dtype != shards[0].dtype:
            raise ValueError(
                f"rank {rank} brings {shard.dtype} {list(shard.shape)} where rank 0 brings {shards[0].dtype} "
                f"{list(shards[0].shape)}"
            )
