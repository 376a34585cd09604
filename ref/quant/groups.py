"""Integer weights in groups: a few bits a weight, a scale (and a zero) for every `group_size` inputs of an output.

    w[o, i] ≈ (q[o, i] − zero[o, g(i)]) · scale[o, g(i)]

This is what GPTQ, AWQ and compressed-tensors files mean, however they pack it; each unpacks to the one record here.
g(i) = i // group_size, or any list of group numbers: GPTQ with act-order takes inputs in the order of their weight in
the error, so a group's members lie anywhere.

Also the packing of small integers into int32 words that those files share.
Source: Frantar et al. 2022, "GPTQ" (rounding in groups); the layout of words is that of GPTQ's, AWQ's files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ref.linear import linear
from ref.numerics import round_to

Array = NDArray[Any]
Words = NDArray[np.int32]

WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class GroupedInt:
    """A weight [out, in] in grouped integers, unpacked."""

    bits: int
    q: NDArray[np.uint8]  # [out, in], 0 to 2^bits − 1
    scales: Array  # [out, num_groups]
    zeros: NDArray[np.uint8]  # [out, num_groups], 0 to 2^bits − 1; 2^(bits − 1) everywhere if symmetric
    g_idx: NDArray[np.int64]  # [in], the group of each input

    @property
    def shape(self) -> tuple[int, ...]:
        """[out, in]."""
        return self.q.shape


def group_index(in_features: int, group_size: int) -> NDArray[np.int64]:
    """The group of each input when groups are neighbours: [in_features] int64. −1 = one group.

    Raises:
        ValueError: group_size does not divide in_features.
    """
    size = in_features if group_size == -1 else group_size
    if size < 1 or in_features % size:
        possible = [width for width in (32, 64, 128) if in_features % width == 0]
        raise ValueError(
            f"group_size {group_size} does not divide {in_features} inputs; possible are -1 and any divisor, "
            f"such as {', '.join(map(str, possible or [in_features]))}"
        )
    return np.arange(in_features) // size


def grouped_quantize(
    weight: Array, bits: int, group_size: int, *, symmetric: bool, shares: Sequence[float] = (1.0,)
) -> GroupedInt:
    """Round to nearest, group by group.

    symmetric: zero = 2^(bits − 1), scale = 2 · max |w| / (2^bits − 1). Otherwise the range is stretched to hold 0,
    scale = (max − min) / (2^bits − 1), zero = round(−min / scale), so that 0 stays exactly 0.

    Args:
        weight: [out, in], finite.
        bits: 4 or 8.
        group_size: a divisor of in, or −1.
        shares: of the scale above. Each group takes the one with the least squared error, the first of equals: a
            smaller one cuts the largest weights off, and holds all the others better.
    Raises:
        ValueError: group_size does not divide in; bits are others.

    Numerics: half to even; with the scale in weight's dtype. A checkpoint rounds scales to float16 first:
    give it to `grouped_round` then.
    Edge cases: a group of zeros has scale 0 and q = zero.
    """
    g_idx = group_index(weight.shape[1], group_size)
    top = 2 ** check_bits(bits) - 1
    groups = weight.reshape(weight.shape[0], int(g_idx[-1]) + 1, -1)  # [out, num_groups, group_size]
    if symmetric:
        scales = np.max(np.abs(groups), axis=-1) * 2 / top
        zeros = np.full(scales.shape, (top + 1) // 2)
    else:
        low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
        scales = (high - low) / top
        zeros = np.rint(-low / np.where(scales > 0, scales, 1))
    zeros, best, least = zeros.astype(np.uint8), np.ones(scales.shape), np.full(scales.shape, np.inf)
    for share in shares:
        tried = grouped_round(weight, bits, (scales * share).astype(weight.dtype), zeros, g_idx)
        errors = np.square(grouped_dequantize(tried, weight.dtype) - weight).reshape(groups.shape).sum(-1)
        best, least = np.where(errors < least, share, best), np.minimum(errors, least)
    return grouped_round(weight, bits, (scales * best).astype(weight.dtype), zeros, g_idx)


def grouped_round(weight: Array, bits: int, scales: Array, zeros: Array, g_idx: NDArray[np.int64]) -> GroupedInt:
    """The nearest integers to weight [out, in] for given scales, zeros [out, num_groups] and groups g_idx [in].

    Edge cases: beyond the range, the range's end.
    """
    scale, zero = scales[:, g_idx], zeros[:, g_idx]  # [out, in]
    steps = np.rint(np.where(scale > 0, weight / np.where(scale > 0, scale, 1), 0)) + zero
    return GroupedInt(bits, np.clip(steps, 0, 2**bits - 1).astype(np.uint8), scales, zeros.astype(np.uint8), g_idx)


def grouped_dequantize(weight: GroupedInt, dtype: DTypeLike = np.float64) -> Array:
    """(q − zero) · scale: [out, in] in dtype. Exact in float32 from float16 and bfloat16 scales (11 by 9 bits)."""
    steps = grouped_steps(weight).astype(dtype)
    dequantized: Array = steps * weight.scales.astype(dtype)[:, weight.g_idx]
    return dequantized


def grouped_steps(weight: GroupedInt) -> NDArray[np.int16]:
    """q − zero of each weight, before any scale: [out, in] int16."""
    return weight.q.astype(np.int16) - weight.zeros.astype(np.int16)[:, weight.g_idx]


def grouped_linear(x: Array, weight: GroupedInt, bias: Array | None = None, *, storage: str | None = None) -> Array:
    """y = x Wᵀ + b, activations in floating point: W4A16 and W8A16.

    Args:
        x: [num_tokens, in], floating.
        bias: [out] or None.
        storage: the type in which tensor cores take both sides: a kernel rounds each dequantized weight to it.
    Returns:
        [num_tokens, out], dtype of x.

    Numerics: (q − zero) is exact, its product with the scale is rounded to storage once, sums are in x's dtype.
    """
    return linear(x, round_to(grouped_dequantize(weight, x.dtype), storage), bias)


def check_bits(bits: Any) -> int:
    """bits, if they are 4 or 8. Raises ValueError otherwise (3 straddles words and is not supported)."""
    if bits not in (4, 8):
        raise ValueError(f"bits is {bits!r}; integer weights of 4 or 8 bits are supported")
    return int(bits)


def pack_words(values: NDArray[Any], bits: int, axis: int, order: Sequence[int] | None = None) -> Words:
    """32 / bits neighbours along axis into one int32.

    Value j of a word stands at bit bits · order[j]; order is 0, 1, 2 … unless given (AWQ's is not).

    Args:
        values: any shape, integers 0 to 2^bits − 1; axis must be a multiple of 32 / bits long.
    Raises:
        ValueError: it is not.
    """
    per_word = WORD_BITS // bits
    last = np.moveaxis(np.asarray(values), axis, -1)
    if last.shape[-1] % per_word:
        raise ValueError(f"{last.shape[-1]} values of {bits} bits fill no whole int32; give a multiple of {per_word}")
    shifts = np.array(order if order is not None else range(per_word), np.uint32) * bits
    words = last.astype(np.uint32).reshape(*last.shape[:-1], -1, per_word) << shifts
    packed = np.bitwise_or.reduce(words, axis=-1).view(np.int32)
    return np.moveaxis(packed, -1, axis)


def unpack_words(words: Words, bits: int, axis: int, order: Sequence[int] | None = None) -> NDArray[np.uint8]:
    """The inverse of pack_words.

    Args:
        words: any shape.
    Returns:
        uint8, that shape, but axis 32 / bits times as long.
    """
    per_word = WORD_BITS // bits
    last = np.ascontiguousarray(np.moveaxis(words, axis, -1)).view(np.uint32)
    shifts = np.array(order if order is not None else range(per_word), np.uint32) * bits
    values = (last[..., None] >> shifts) & (2**bits - 1)
    return np.moveaxis(values.reshape(*last.shape[:-1], -1).astype(np.uint8), -1, axis)
