"""A weight as a value, whatever its format: decode it, or multiply by it as a kernel would.

Three kinds: an array (floating point), `GroupedInt` (4 or 8 bits in groups: GPTQ, AWQ, pack-quantized), and
`CodedWeight` (int8 or fp8, whose activations may be 8 bits wide too). Source: that of each format's own file.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ref.checkpoint import widen
from ref.linear import linear
from ref.numerics import round_to
from ref.quant.fp8 import fp8_dequantize, fp8_linear
from ref.quant.fp8_block import fp8_block_dequantize, fp8_block_linear
from ref.quant.groups import GroupedInt, grouped_dequantize, grouped_linear
from ref.quant.int8 import int8_dequantize, int8_linear, int8_matmul, int8_quantize_static, int8_scale

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class CodedWeight:
    """A weight [out, in] of 8 bits a number, and how its input is treated."""

    codes: NDArray[Any]  # [out, in]; int8, or uint8: the codes of e4m3
    scale: Array  # [], [out], or [⌈out / block⌉, ⌈in / block⌉]
    block: tuple[int, int] | None = None  # size of a tile; fp8 only
    activations: str | None = None  # None = floating point, "token", "group" (per token and tile), "static"
    input_scale: Array | None = None  # [1], for "static"

    @property
    def shape(self) -> tuple[int, ...]:
        """[out, in]."""
        return self.codes.shape


QuantWeight = Array | GroupedInt | CodedWeight


def dequantize_weight(weight: QuantWeight, dtype: DTypeLike = np.float64) -> Array:
    """The numbers of a weight [out, in], in dtype; one rounding, in the product with the scale."""
    if isinstance(weight, GroupedInt):
        return grouped_dequantize(weight, dtype)
    if not isinstance(weight, CodedWeight):
        return widen(weight, dtype)
    scale = weight.scale.astype(dtype)
    if weight.block is not None:
        return fp8_block_dequantize(weight.codes, scale, weight.block)
    if weight.codes.dtype == np.uint8:
        return fp8_dequantize(weight.codes, scale)
    return int8_dequantize(weight.codes, np.broadcast_to(scale, weight.codes.shape[:1]))


def quantized_linear(x: Array, weight: QuantWeight, bias: Array | None = None, *, storage: str | None = None) -> Array:
    """y = x Wᵀ + b as the format's kernel computes it: 8-bit activations where the format has them.

    Args:
        x: [num_tokens, in], floating.
        weight: [out, in] of any kind.
        bias: [out] or None.
        storage: the type of activations, to which a weight that is decoded on the way is rounded.
    Returns:
        [num_tokens, out], dtype of x.
    Raises:
        ValueError: a pairing of weight and activations that no format has.
        OverflowError: see ref.quant.int8.int8_matmul.

    Numerics: int8 activations have the scale max |x| / 127 and codes within ±127, as GPU kernels have it. The package
    compressed-tensors, where it imitates a kernel in floating point, takes max |x| / 127.5 and codes from −128 to 127.
    Either is off by half a step at most, so an input differs by at most max |x| · (1/254 + 1/255) < max |x| / 127
    between the two, and y[t, o] by less than that times Σ_i |w[o, i]|. For e4m3 both divide by 448.
    """
    if isinstance(weight, GroupedInt):
        return grouped_linear(x, weight, bias, storage=storage)
    if not isinstance(weight, CodedWeight):
        return linear(x, widen(weight, x.dtype), bias)
    if weight.activations is None:
        return linear(x, round_to(dequantize_weight(weight, x.dtype), storage), bias)
    if weight.activations == "group" and weight.block is not None:
        return fp8_block_linear(x, weight.codes, weight.scale, bias, block=weight.block)
    if weight.activations == "group" or weight.block is not None:
        raise ValueError(f"activations {weight.activations!r} do not go with tiles of {weight.block}")
    if weight.codes.dtype == np.uint8:
        return fp8_linear(x, weight.codes, weight.scale, bias, input_scale=weight.input_scale)
    scale = np.broadcast_to(weight.scale, weight.codes.shape[:1]).astype(x.dtype)
    if weight.input_scale is None:
        return int8_linear(x, weight.codes, scale, bias)
    x_scale = np.full(x.shape[0], weight.input_scale.item(), x.dtype)
    return int8_scale(int8_matmul(int8_quantize_static(x, x_scale[:, None]), weight.codes), x_scale, scale, bias)


def weight_rows(weight: QuantWeight, rows: slice) -> QuantWeight:
    """Some outputs of a weight: the same kind of value, [num_rows, in], its dtype too. Nothing is decoded.

    Args:
        weight: [out, in] of any kind.
        rows: from start to stop by ones; with tiles, start must be a multiple of their height.
    """
    if isinstance(weight, GroupedInt):
        return replace(weight, q=weight.q[rows], scales=weight.scales[rows], zeros=weight.zeros[rows])
    if not isinstance(weight, CodedWeight):
        return weight[rows]
    scale = weight.scale
    if weight.block is not None:
        scale = scale[rows.start // weight.block[0] : -(-rows.stop // weight.block[0])]
    elif scale.ndim:
        scale = scale[rows]
    return replace(weight, codes=weight.codes[rows], scale=scale)
