"""How wrong ref.int8_all_reduce can be at most, as a number that can be computed for any input.

Let a be the largest magnitude of a group. scale ≤ a/127 · (1 + 2⁻⁷)(1 + 2⁻²³); multiplying by 1/scale adds less than
2⁻¹⁶ to the half step of rounding, and q · scale has at most 15 bits, so it is exact in float32. Hence one trip costs
each element at most scale · (1/2 + 2⁻¹⁶) < a/252. With a_r of rank r, u = 2⁻²⁴, n ranks and owner o:

    sum         e₁ = Σ_{r≠o} a_r/252  +  γ Σ_r a_r (1 + 1/252)      γ = (n−1)u / (1 − (n−1)u), of the float32 sums
    requantize  e₂ = e₁ + (|sum| + e₁)/252                   |sum| is the largest magnitude of the exact sum
    no owners   all a_r/252 are in e₁, and e₂ = e₁
    rotated     all of this holds in the rotated space. H is orthonormal, so the error of a group has there and here
                the same Euclidean length, at most √32 e₂, and no element can be off by more than that. Each rotation
                adds float32 rounding: at most 8 u ‖·‖₁/√32 an element (five sums, one product, the rounded 1/√32).

Source: derived here from the steps of int8_all_reduce.py; γ is that of Higham 2002, "Accuracy and Stability of
Numerical Algorithms", chapter 3.

Groups below 2⁻¹⁰⁰ travel as zeros, so that a trip costs at most max(a/252, 2⁻¹⁰⁰).

For one outlier A among small numbers the rotation makes a = A/√32: the length of a trip's error is at most A/252
instead of √32 · A/252. A constant group becomes one number √32 times as large, and nothing is gained in the bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ref.collectives import split_sizes
from ref.int8_all_reduce import GROUP, SMALLEST, check_shards, to_groups

Array = NDArray[Any]

UNIT = 2.0**-24  # the relative error of one float32 operation
TRIP = 1 / 252  # of a group's largest magnitude: what one trip may cost an element


def error_bound(shards: Sequence[Array], *, rotate: bool = True, owners: bool | None = None) -> NDArray[np.float64]:
    """How far any element of int8_all_reduce may be from the exact sum, before the last rounding.

    Args:
        shards, rotate, owners: as for int8_all_reduce; float64 shards are rounded to float32 first, which is counted.
    Returns:
        [num_tokens, hidden_size] float64, the same number for all elements of a group.
    Raises:
        ValueError: as int8_all_reduce.
    """
    check_shards(shards)
    num_tokens, hidden_size = shards[0].shape
    world_size = len(shards)
    if world_size == 1:
        return np.zeros((num_tokens, hidden_size))
    exact = [to_groups(shard, rotate).astype(np.float64) for shard in shards]
    taken = [to_groups(shard, False).astype(np.float64) for shard in shards]
    largest = np.array([np.max(np.abs(group), axis=1) for group in exact])  # [world_size, num_groups]
    owner = np.repeat(np.arange(world_size), split_sizes(len(taken[0]), world_size))
    has_owners = world_size > 2 if owners is None else owners
    foreign = (np.arange(world_size)[:, None] != owner[None, :]) | (not has_owners)

    trips = np.sum(np.where(foreign, np.maximum(largest * TRIP, SMALLEST), 0), axis=0)
    additions = (world_size - 1) * UNIT
    sums = additions / (1 - additions) * np.sum(largest, axis=0) * (1 + TRIP)
    summed = trips + sums
    size = np.max(np.abs(np.sum(exact, axis=0)), axis=1) + summed
    total = summed + np.maximum(size * TRIP, SMALLEST) * has_owners
    if rotate:
        there = 8 * UNIT * np.sum(np.abs(taken), axis=(0, 2)) / math.sqrt(GROUP)
        back = 8 * UNIT * math.sqrt(GROUP) * (size + total)
        total = math.sqrt(GROUP) * (total + there) + back
    cast = 2 * UNIT * np.sum(np.max(np.abs(taken), axis=2), axis=0)  # float64 shards alone need it
    per_element = np.repeat(total + cast, GROUP).reshape(num_tokens, -(-hidden_size // GROUP) * GROUP)
    return per_element[:, :hidden_size]
