"""FP8 in tiles: a scale for every 128 × 128 of a weight, and for every 128 neighbours within a token.

An outlier spoils the precision of its own tile only. The scale of activations now changes along the sum, so the sum is
cut at every 128 inputs, and each part is scaled before it is added:

    y[t, o] = Σ_k  x_scale[t, k] · w_scale[o / 128, k] · Σ_{i in tile k} xq[t, i] · wq[o, i]

Sizes need not be multiples of 128: the last tile is smaller (DeepSeek's kv_a_proj has 576 rows, 4.5 tiles).
Source: DeepSeek-AI 2024, "DeepSeek-V3 technical report" §3.3; tensor `weight_scale_inv` of its checkpoints.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ref.quant.fp8 import BLOCK, Codes, fp8_decode, fp8_quantize

Array = NDArray[Any]


def check_block_scale(scale: Array, shape: tuple[int, int], block: tuple[int, int] = (BLOCK, BLOCK)) -> None:
    """Whether a scale has the shape that a weight's tiles need, [⌈out / block⌉, ⌈in / block⌉].

    Args:
        scale: any shape.
        shape: [out, in] of the weight.
    Raises:
        ValueError: says both shapes.
    """
    wanted = (math.ceil(shape[0] / block[0]), math.ceil(shape[1] / block[1]))
    if scale.shape != wanted:
        raise ValueError(
            f"block scales have shape {list(scale.shape)}; a weight {list(shape)} in tiles of {block[0]} × {block[1]} "
            f"needs {list(wanted)}"
        )


def expand_block_scale(scale: Array, shape: tuple[int, int], block: tuple[int, int] = (BLOCK, BLOCK)) -> Array:
    """The scale of every element: [⌈out / block⌉, ⌈in / block⌉] → [out, in], its dtype kept.

    Raises:
        ValueError: scale has another shape than the weight's needs.
    """
    check_block_scale(scale, shape, block)
    return np.repeat(np.repeat(scale, block[0], 0)[: shape[0]], block[1], 1)[:, : shape[1]]


def fp8_block_quantize(weight: Array, block: tuple[int, int] = (BLOCK, BLOCK)) -> tuple[Codes, Array]:
    """[out, in] → (codes [out, in] uint8, scale [⌈out / block⌉, ⌈in / block⌉] in weight's dtype)."""
    out, n = math.ceil(weight.shape[0] / block[0]), math.ceil(weight.shape[1] / block[1])
    codes, scale = np.zeros(weight.shape, np.uint8), np.zeros((out, n), weight.dtype)
    for i in range(out):
        for j in range(n):
            tile = np.s_[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
            codes[tile], scale[i, j] = fp8_quantize(weight[tile], axis=None)
    return codes, scale


def fp8_block_dequantize(codes: Codes, scale: Array, block: tuple[int, int] = (BLOCK, BLOCK)) -> Array:
    """codes · scale of the tile: [out, in], [⌈out / block⌉, ⌈in / block⌉] → [out, in] in scale's dtype.

    Raises:
        ValueError: see expand_block_scale.
    """
    return fp8_decode(codes, scale.dtype) * expand_block_scale(scale, (codes.shape[0], codes.shape[1]), block)


def fp8_quantize_token_groups(x: Array, group: int = BLOCK) -> tuple[Codes, Array]:
    """Activations per token and group of inputs: [num_tokens, in] → (codes, scale [num_tokens, ⌈in / group⌉] in x's
    dtype).

    Edge cases: the last group may be shorter; a group of zeros has scale 0 and codes 0.
    """
    parts = [fp8_quantize(x[:, at : at + group]) for at in range(0, x.shape[1], group)]
    return np.concatenate([codes for codes, _ in parts], axis=1), np.stack([scale for _, scale in parts], axis=1)


def fp8_block_linear(
    x: Array, w: Codes, w_scale: Array, bias: Array | None = None, *, block: tuple[int, int] = (BLOCK, BLOCK)
) -> Array:
    """y = x Wᵀ + b, weight in tiles, activations per token and tile.

    Args:
        x: [num_tokens, in], floating.
        w: [out, in] uint8 codes.
        w_scale: [⌈out / 128⌉, ⌈in / 128⌉].
        bias: [out] or None.
    Returns:
        [num_tokens, out], dtype of x.
    Raises:
        ValueError: w_scale does not fit w.

    Numerics: each tile's sum in x's dtype, times both scales, added up in the order of the tiles.
    """
    scale = expand_block_scale(w_scale.astype(x.dtype), (w.shape[0], w.shape[1]), block)
    xq, x_scale = fp8_quantize_token_groups(x, block[1])
    y = np.zeros((x.shape[0], w.shape[0]), x.dtype)
    with np.errstate(invalid="ignore"):  # a token that held inf
        for k, at in enumerate(range(0, x.shape[1], block[1])):
            tile = np.s_[:, at : at + block[1]]
            part = fp8_decode(xq[tile], x.dtype) @ fp8_decode(w[tile], x.dtype).T
            y += part * x_scale[:, k, None] * scale[:, at]
    return y if bias is None else y + bias.astype(x.dtype)
