"""W4A8: weights of 4 bits in memory, 8 bits in the matrix unit, activations of 8 bits a token.

With many tokens the arithmetic, not the reading of weights, takes the time, and 8-bit tensor cores do twice as much of
it as 16-bit ones. So a kernel takes a tile of the weight, one group of inputs, and subtracts the zero: q − zero lies in
−15 … 15, which int8 holds exactly and e4m3 too (its integers are exact to 16). Each group's sum is scaled before it is
added to the next:

    y[t, o] = x_scale[t] · Σ_g scale[o, g] · Σ_{i in g} xq[t, i] · (q[o, i] − zero[o, g])

So nothing is lost but in the activations. With act-order, inputs are first put in the order of their groups.

Source: the sum over groups of grouped quantization written out; the weight itself is not requantized.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ref.quant.fp8 import fp8_decode, fp8_encode, fp8_quantize
from ref.quant.groups import GroupedInt, grouped_steps
from ref.quant.int8 import int8_matmul, int8_quantize

Array = NDArray[Any]

KINDS = ("int8", "fp8")


def w4a8_tile(weight: GroupedInt, group: int, kind: str) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """One group of inputs as the matrix unit reads it.

    Args:
        weight: of 4 bits.
        kind: "int8" or "fp8".
    Returns:
        (inputs [n], the columns of the group; tile [out, n]: q − zero as int8, or its e4m3 codes as uint8).
    Raises:
        ValueError: another kind, or weights of 8 bits, whose q − zero fills nine.
    """
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}; known are {', '.join(KINDS)}")
    if weight.bits != 4:
        raise ValueError(f"weights have {weight.bits} bits; 4 are wanted: more do not fit 8 bits less their zero")
    inputs = np.flatnonzero(weight.g_idx == group)
    tile = grouped_steps(weight)[:, inputs]
    return inputs, tile.astype(np.int8) if kind == "int8" else fp8_encode(tile)


def w4a8_linear(x: Array, weight: GroupedInt, bias: Array | None = None, *, kind: str = "int8") -> Array:
    """y = x Wᵀ + b, activations quantized per token.

    Args:
        x: [num_tokens, in], floating.
        weight: of 4 bits, in groups.
        bias: [out] or None.
        kind: "int8" or "fp8", the type of both sides in the matrix unit.
    Returns:
        [num_tokens, out], dtype of x.
    Raises:
        ValueError: see w4a8_tile.
        OverflowError: see int8_matmul.

    Numerics: a group's sum is exact in int8 and in x's dtype in fp8; times its scale it is added in x's dtype, group
    after group; the token's scale, then the bias, come last.
    Edge cases: as in int8_linear and fp8_linear: a token that holds inf or NaN spoils only itself.
    """
    quantized: tuple[Array, Array] = int8_quantize(x) if kind == "int8" else fp8_quantize(x)
    xq, x_scale = quantized
    y = np.zeros((x.shape[0], weight.q.shape[0]), x.dtype)
    for group in range(weight.scales.shape[1]):
        inputs, tile = w4a8_tile(weight, group, kind)
        if kind == "int8":
            part = int8_matmul(xq[:, inputs], tile).astype(x.dtype)
        else:
            part = fp8_decode(xq[:, inputs], x.dtype) @ fp8_decode(tile, x.dtype).T
        y += part * weight.scales[:, group].astype(x.dtype)
    with np.errstate(invalid="ignore"):
        y *= x_scale[:, None]
    return y if bias is None else y + bias.astype(x.dtype)
