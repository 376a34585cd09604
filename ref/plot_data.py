"""What the plots of the course show, as numbers; ref/plot.py draws them.

Source: what is measured stands in the files of the functions that are called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ref.attention import first_visible
from ref.numerics import relative_error, round_to, softmax
from ref.philox import uniform
from ref.quant.fp8 import fp8_dequantize, fp8_quantize
from ref.quant.fp8_block import fp8_block_dequantize, fp8_block_quantize
from ref.quant.groups import grouped_dequantize, grouped_quantize
from ref.quant.int8 import int8_dequantize, int8_quantize
from ref.rope import rope, rope_cos_sin, rope_inv_freq

Array = NDArray[Any]


def rope_scores(theta: float, distances: NDArray[np.int64], head_dim: int = 128) -> Array:
    """q·k / head_dim of two vectors of ones that are so far apart: mean of cos(distance · inv_freq).

    Args:
        distances: [num], in tokens.
    Returns:
        [num] float64.
    Raises:
        ValueError: as rope_inv_freq.
    """
    inv_freq = rope_inv_freq("default", theta, head_dim)
    ones = np.ones((len(distances), 1, head_dim))
    q, k = (rope(ones, rope_cos_sin(inv_freq, at))[:, 0] for at in (distances, np.zeros_like(distances)))
    scores: Array = np.sum(q * k, axis=-1) / head_dim
    return scores


def wavelengths(kind: str, theta: float = 500000.0, length: int = 8192) -> Array:
    """Tokens in which each pair turns once, 2π / inv_freq, of a head of 128 stretched 8 times: [64] float64.

    Args:
        length: original_max_position_embeddings, in tokens.
    Raises:
        ValueError: as rope_inv_freq.
    """
    result: Array = 2 * np.pi / rope_inv_freq(kind, theta, 128, 8.0, original_max_position_embeddings=length)
    return result


def attention_weights(q: Array, k: Array, window: int | None = None) -> Array:
    """softmax(q·k / √head_dim) over the visible keys, the numbers that attention multiplies values by.

    Args:
        q: [num_tokens, n_heads, head_dim], rotated.
        k: [num_tokens, n_kv_heads, head_dim], rotated.
        window: keys a query sees, itself included; None: all.
    Returns:
        [n_heads, num_tokens, num_tokens], dtype of q: query, then key; 0 where the key is not visible.
    """
    num_tokens, n_heads, head_dim = q.shape
    k = np.repeat(k, n_heads // k.shape[1], axis=1)
    scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(head_dim)
    key = np.arange(num_tokens)
    for i in range(num_tokens):
        scores[:, i, (key > i) | (key < first_visible(i, window))] = -np.inf
    return softmax(scores)


def gaussian(num_rows: int, num_columns: int, seed: int = 0) -> Array:
    """Normal numbers out of Philox, the same everywhere: [num_rows, num_columns] float64.

    Source: Box and Muller 1958, "A Note on the Generation of Random Normal Deviates".
    """
    positions = np.arange(num_rows * num_columns)
    first, second = (uniform(seed, positions, stream).astype(np.float64) for stream in (0, 1))
    normal: Array = np.sqrt(-2 * np.log(1 - first)) * np.cos(2 * np.pi * second)
    return normal.reshape(num_rows, num_columns)


def _integers(weight: Array, bits: int, group_size: int, symmetric: bool) -> Array:
    return grouped_dequantize(grouped_quantize(weight, bits, group_size, symmetric=symmetric))


def _int8(weight: Array) -> Array:
    codes, scale = int8_quantize(weight)
    return int8_dequantize(codes, scale)


# bits a weight of [128, 1024], 16-bit scales and 4-bit zeros included; quantize and dequantize in one
FORMATS: dict[str, tuple[float, Callable[[Array], Array]]] = {
    "bfloat16": (16, lambda w: round_to(w, "bfloat16")),
    "int8, a row": (8 + 16 / 1024, _int8),
    "fp8, a tensor": (8, lambda w: fp8_dequantize(*fp8_quantize(w, axis=None))),
    "fp8, 128 × 128": (8 + 32 / 128**2, lambda w: fp8_block_dequantize(*fp8_block_quantize(w))),
    "int4, a row": (4 + 16 / 1024, lambda w: _integers(w, 4, -1, True)),
    "int4, groups of 128": (4 + 16 / 128, lambda w: _integers(w, 4, 128, True)),
    "int4, 128, zeros": (4 + 20 / 128, lambda w: _integers(w, 4, 128, False)),
    "int4, 32, zeros": (4 + 20 / 32, lambda w: _integers(w, 4, 32, False)),
}


def quantization_errors() -> dict[str, tuple[float, float]]:
    """‖ŵ − w‖ / ‖w‖ by format: of normal weights [128, 1024], and of those with one input of 512 ten times as large."""
    plain = gaussian(128, 1024)
    outliers = plain * np.where(np.arange(1024) % 512 == 7, 10, 1)
    return {
        name: (relative_error(there_and_back(plain), plain), relative_error(there_and_back(outliers), outliers))
        for name, (_, there_and_back) in FORMATS.items()
    }
