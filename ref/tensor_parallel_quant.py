"""Cutting quantized weights: a block of values that share a scale stays on one rank.

A quantized weight is integers (or fp8) and one scale, sometimes a zero, for each block of block[0] outputs by block[1]
inputs:  w[o, i] = (values[o, i] − zeros[o', i']) · scales[o', i'],  o' = o // block[0],  i' = i // block[1].

    GPTQ, AWQ in groups of 128    block (1, 128)
    one scale an output           block (1, 0)        0 = the whole axis
    FP8 in tiles (DeepSeek)       block (128, 128)
    one scale a tensor            block (0, 0)

A cut is legal at multiples of the block; a scale that covers the whole axis is copied to every rank. The kernels then
see on each rank a weight like any other. Three ways out where a cut falls inside a block: shares that are not equal
(split_sizes with `unit`), ranks that get whole experts, or refine_blocks, which gives halves of a block a scale each.

Act-order (GPTQ's desc_act): g_idx says which group each input belongs to, and groups lie scattered. A cut of the inputs
then leaves every rank with members of every group, so every rank keeps all scales (shard_in); or the inputs are put in
the order of their groups first (sort_groups) and cut between groups, and the layer before puts out its rows in that
order (permute_out), so that nothing is permuted at run time.

Packing does not appear here: values are unpacked. `pack` says how many share a word along the axis that is cut.

Source: follows from what the formats of ref/quant mean and from the cuts of tensor_parallel.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Ints = NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class BlockWeight:
    """A quantized weight, unpacked."""

    values: Array  # [out, in]
    scales: Array  # [⌈out / block[0]⌉, ⌈in / block[1]⌉], or [out, num_groups] with g_idx
    block: tuple[int, int]  # outputs and inputs that share a scale; 0 = all
    zeros: Array | None = None  # shape of scales
    g_idx: Ints | None = None  # [in], the group of each input


def dequantize_blocks(weight: BlockWeight) -> Array:
    """[out, in], dtype of scales. The last block of an axis may be short."""
    out_features, in_features = weight.values.shape
    rows = np.arange(out_features) // (weight.block[0] or out_features)
    columns = np.arange(in_features) // (weight.block[1] or in_features)
    cells = np.ix_(rows, columns if weight.g_idx is None else weight.g_idx)
    values = weight.values.astype(weight.scales.dtype)
    if weight.zeros is not None:
        values = values - weight.zeros[cells].astype(weight.scales.dtype)
    dequantized: Array = values * weight.scales[cells]
    return dequantized


def check_cut(part: range, size: int, block: int, pack: int = 1, axis: str = "axis") -> None:
    """That neither end of `part` lies inside a block or a packed word; the end of the axis is always legal.

    Raises:
        ValueError: names the axis, the block that would be cut and where it may be cut instead.
    """
    unit = math.lcm(block or 1, pack)
    for edge in (part.start, part.stop):
        if edge % unit and edge != size:
            first = edge - edge % unit
            last = min(first + unit, size)
            in_block = bool(block and edge % block)
            finer = math.gcd(edge, unit)
            what = "block" if in_block else "packed word"
            raise ValueError(
                f"{axis} {size} cannot be cut at {edge}: that is inside the {what} of {first} to {last - 1}; "
                f"cut at {first} or {last}, with shares that are not equal"
                + (f", or refine the blocks to {finer}" if in_block and finer % pack == 0 else "")
            )


def shard_out(weight: BlockWeight, part: range, pack: int = 1) -> BlockWeight:
    """The outputs in `part`, for a column split. Raises: ValueError, see check_cut."""
    rows = _scales_of(part, weight.values.shape[0], weight.block[0], pack, "out_features")
    return replace(
        weight,
        values=weight.values[part.start : part.stop],
        scales=weight.scales[rows],
        zeros=None if weight.zeros is None else weight.zeros[rows],
    )


def shard_in(weight: BlockWeight, part: range, pack: int = 1) -> BlockWeight:
    """The inputs in `part`, for a row split; with g_idx all scales are kept and every cut is legal but in a word.

    Raises: ValueError, see check_cut.
    """
    values = weight.values[:, part.start : part.stop]
    if weight.g_idx is not None:
        check_cut(part, weight.values.shape[1], 1, pack, "in_features")
        return replace(weight, values=values, g_idx=weight.g_idx[part.start : part.stop])
    columns = _scales_of(part, weight.values.shape[1], weight.block[1], pack, "in_features")
    return replace(
        weight,
        values=values,
        scales=weight.scales[:, columns],
        zeros=None if weight.zeros is None else weight.zeros[:, columns],
    )


def _scales_of(part: range, size: int, block: int, pack: int, axis: str) -> slice:
    check_cut(part, size, block, pack, axis)
    return slice(part.start // block, -(-part.stop // block)) if block else slice(None)


def refine_blocks(weight: BlockWeight, block: tuple[int, int]) -> BlockWeight:
    """The same weight in smaller blocks, each with a copy of its block's scale; exact.

    K = 896 in groups of 128 cannot be halved; in groups of 64 it can.

    Raises:
        ValueError: a new size that does not divide the old one.
    """
    shape = weight.values.shape
    old = [size or length for size, length in zip(weight.block, shape, strict=True)]
    if weight.g_idx is not None or any(was % new for was, new in zip(old, block, strict=True)):
        raise ValueError(
            f"blocks of {tuple(old)} cannot be refined to {block}; wanted sizes that divide them, no g_idx"
        )
    cells = np.ix_(*(np.arange(0, n, new) // was for n, new, was in zip(shape, block, old, strict=True)))
    zeros = None if weight.zeros is None else weight.zeros[cells]
    return replace(weight, scales=weight.scales[cells], zeros=zeros, block=block)


def sort_groups(weight: BlockWeight) -> tuple[BlockWeight, Ints]:
    """Act-order undone: inputs in the order of their groups, so that they may be cut between groups.

    Returns:
        The weight without g_idx, and order [in]: x[:, order] is what it now takes, in the place of x.
    Raises:
        ValueError: groups that do not all have block[1] members (the last may have fewer), so that no block fits.
    """
    if weight.g_idx is None:
        return weight, np.arange(weight.values.shape[1])
    order = np.argsort(weight.g_idx, kind="stable")
    sizes = np.bincount(weight.g_idx, minlength=weight.scales.shape[1]).tolist()
    group_size = weight.block[1] or weight.values.shape[1]
    if any(size != group_size for size in sizes[:-1]) or sizes[-1] > group_size:
        raise ValueError(
            f"g_idx makes groups of {sizes}; wanted {group_size} in each, so keep all scales on every rank"
        )
    return replace(weight, values=weight.values[:, order], g_idx=None), order


def permute_out(weight: BlockWeight, order: Ints) -> BlockWeight:
    """The outputs in another order, order [out]: output j is the old output order[j].

    gate and up take the order of down's inputs so. Each output must have scales of its own.

    Raises:
        ValueError: outputs share scales, block[0] is not 1.
    """
    if weight.block[0] != 1:
        raise ValueError(f"outputs share scales in blocks of {weight.block[0] or 'all'}; wanted 1 to move them about")
    zeros = None if weight.zeros is None else weight.zeros[order]
    return replace(weight, values=weight.values[order], scales=weight.scales[order], zeros=zeros)
