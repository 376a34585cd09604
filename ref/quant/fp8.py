"""FP8 e4m3fn: 1 sign, 4 exponent and 3 mantissa bits, no infinity, one NaN a sign.

    code = s eeee mmm:   e > 0: ± 2^(e − 7) · (1 + m/8)     e = 0: ± 2^−6 · m/8     s 1111 111 = NaN

The largest number is 448, the smallest 2⁻⁹. A code has a relative error of at most 1/16 and needs a scale that brings
the numbers near 448: one a tensor, a row (channel or token), or a tile. Here codes are uint8; weights times scale
give the number. DeepSeek calls that scale `weight_scale_inv` (the inverse of what it multiplied by), others
`weight_scale`.

Source: Micikevicius et al. 2022, "FP8 formats for deep learning"; tiles of 128: DeepSeek-AI 2024, "DeepSeek-V3".
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ref.numerics import flushed

Array = NDArray[Any]
Codes = NDArray[np.uint8]

FP8_MAX = 448.0
FP8_NAN = 0x7F
BLOCK = 128


def _table() -> NDArray[np.float32]:
    """The number of each of the 256 codes."""
    code = np.arange(256)
    sign, exponent, mantissa = 1 - (code >> 7) * 2.0, code >> 3 & 15, code & 7
    magnitude = np.where(exponent > 0, np.ldexp(1 + mantissa / 8, exponent - 7), np.ldexp(mantissa / 8, -6))
    return np.where((code & 0x7F) == FP8_NAN, np.nan, sign * magnitude).astype(np.float32)


FP8_TABLE = _table()
FP8_MIDPOINTS = (FP8_TABLE[:126].astype(np.float64) + FP8_TABLE[1:127]) / 2  # between code i and i + 1


def fp8_decode(codes: Codes, dtype: DTypeLike = np.float32) -> Array:
    """The number of each code, by table: codes [...] → [...] in dtype; exact in any float."""
    decoded: Array = FP8_TABLE.astype(dtype)[codes]
    return decoded


def fp8_encode(x: Array) -> Codes:
    """The code nearest to each element, ties to the even code; shape as x.

    Edge cases: beyond ±448, infinity too, saturates to ±448 (so 448.1 is no NaN); NaN gives 0x7F; a zero keeps its
    sign; half the smallest number, 2⁻¹⁰, goes to zero.
    """
    magnitude = np.minimum(np.abs(np.asarray(x, np.float64)), FP8_MAX)  # a NaN stays
    lower = np.searchsorted(FP8_MIDPOINTS, magnitude, side="left")  # a tie finds the code below
    is_tie = FP8_MIDPOINTS[np.minimum(lower, 125)] == magnitude
    code = np.where(is_tie, lower + (lower & 1), lower)
    code = np.where(np.isnan(magnitude), FP8_NAN, code | np.signbit(x) * 0x80)
    return code.astype(np.uint8)


def fp8_quantize_static(x: Array, scale: Array) -> Codes:
    """The codes of x / scale, saturating: x [...], scale of a shape that broadcasts against it → [...].

    Edge cases: a scale below 2⁻¹²⁶ gives 0 everywhere but for a NaN; a NaN as scale gives NaN.
    """
    scale = flushed(scale)
    usable = np.where(scale == 0, 1, scale).astype(x.dtype)
    with np.errstate(invalid="ignore"):  # inf / inf is NaN and means it
        ratio = x / usable
    return fp8_encode(np.where((scale == 0) & ~np.isnan(x), 0, ratio))


def fp8_quantize(x: Array, axis: int | None = -1) -> tuple[Codes, Array]:
    """Codes, and the scale max |x| / 448 of each row (axis −1), or of the whole tensor (axis None).

    Args:
        x: [..., n], floating: a weight [out, in] (per channel) or activations [num_tokens, in] (per token).
    Returns:
        (codes [..., n] uint8, scale [...] or a scalar [] in x's dtype).

    Edge cases: zeros have scale 0 and codes 0, and so has a row whose scale would be below 2⁻¹²⁶. An inf or NaN makes
    its own row NaN or zero times inf, which is NaN as soon as it is decoded; other rows are as without it.
    """
    scale: Array = flushed((np.max(np.abs(x), axis=axis, initial=0) / x.dtype.type(FP8_MAX)).astype(x.dtype))
    return fp8_quantize_static(x, scale if axis is None else scale[..., None]), scale


def fp8_dequantize(codes: Codes, scale: Array) -> Array:
    """codes · scale: codes [..., n], scale [...] or [] → [..., n] in scale's dtype."""
    scale = np.asarray(scale)
    with np.errstate(invalid="ignore"):  # 0 · inf of a row that held inf
        return fp8_decode(codes, scale.dtype) * (scale if scale.ndim == 0 else scale[..., None])


def fp8_linear(
    x: Array, w: Codes, w_scale: Array, bias: Array | None = None, *, input_scale: Array | None = None
) -> Array:
    """y = x Wᵀ + b with both sides in fp8 and the scales outside the sum.

    Args:
        x: [num_tokens, in], floating; quantized here, per token, or by input_scale.
        w: [out, in] uint8 codes.
        w_scale: [] for the tensor or [out] per channel.
        bias: [out] or None.
        input_scale: [] static scale of the checkpoint, or None.
    Returns:
        [num_tokens, out], dtype of x.
    Raises:
        ValueError: input_scale is not finite and positive.

    Numerics: products of two codes are exact in float32; sums are in x's dtype; scales, then bias, after the sum.
    """
    if input_scale is None:
        xq, x_scale = fp8_quantize(x)
    else:
        x_scale = np.asarray(check_scale("input_scale", input_scale), x.dtype)
        xq = fp8_quantize_static(x, x_scale)
    with np.errstate(invalid="ignore"):
        y: Array = (fp8_decode(xq, x.dtype) @ fp8_decode(w, x.dtype).T) * x_scale.reshape(-1, 1)
    y = y * np.asarray(w_scale, x.dtype)
    return y if bias is None else y + bias.astype(x.dtype)


def check_scale(name: str, scale: Array) -> Array:
    """scale itself, of any shape and dtype, if it is finite and positive all over: it is never replaced by a guess.

    Raises:
        ValueError: names the scale and the value that cannot be used.
    """
    scale = np.asarray(scale)
    wrong = scale[~(np.isfinite(scale) & (scale > 0))]
    if wrong.size:
        raise ValueError(f"{name} must be finite and positive, found {wrong.flat[0]}; the checkpoint is damaged")
    return scale
