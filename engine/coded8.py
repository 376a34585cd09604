"""Weights of 8 bits a number, whose activations are quantized when they are multiplied; needs no GPU.

    weight       [out, in] int8, or uint8: codes of e4m3
    scale        float32; [1] for all, [out], or [⌈out / 128⌉, ⌈in / 128⌉] of tiles; int8 has [out]
    input_scale  [1] float32 where activations have a scale of the checkpoint's; else each token finds its own

What they are multiplied to is defined by quantized_linear of ref/quant/coded.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

INT8: Final = "int8"  # formats of a LinearWeight
FP8: Final = "fp8"
TILE = 128  # rows and columns of a scale of a weight in blocks, columns of one of x
COLUMNS = 16  # in_features is a multiple of
DTYPES = {INT8: np.dtype(np.int8), FP8: np.dtype(np.uint8)}
FP8_NAN = 0x7F  # without its sign


@dataclass(frozen=True, slots=True)
class CodedActivations:
    """Activations as a layer of 8 bits multiplies them, in place of the numbers."""

    codes: Any  # [num_tokens, in_features] int8 or uint8
    scales: Any  # [num_tokens], or [num_tokens, ⌈in_features / 128⌉], float32
    dtype: Any  # of the numbers

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.codes.shape)

    @property
    def size(self) -> int:
        return int(self.codes.size)


def blank8(kind: str, scale: str, static: bool, out_features: int, in_features: int) -> dict[str, Array]:
    """Tensors of a weight of zeros, which take no memory before they are touched; scale as in engine.weights.Coded."""
    shapes = {"tensor": (1,), "channel": (out_features,), "block": (-(-out_features // TILE), -(-in_features // TILE))}
    tensors: dict[str, Array] = {
        "weight": np.zeros((out_features, in_features), DTYPES[kind]),
        "scale": np.zeros(shapes[scale], np.float32),
    }
    return tensors | ({"input_scale": np.ones(1, np.float32)} if static else {})


def decode8(tensors: Mapping[str, Array]) -> NDArray[np.float32]:
    """The numbers of a weight [out, in]; one rounding, in the product with the scale."""
    codes, scale = tensors["weight"], tensors["scale"]
    numbers = codes if codes.dtype == np.int8 else codes.view(ml_dtypes.float8_e4m3fn)
    if scale.ndim == 2:
        scale = scale.repeat(TILE, 0)[: codes.shape[0]].repeat(TILE, 1)[:, : codes.shape[1]]
    else:
        scale = scale[:, None]
    decoded: NDArray[np.float32] = numbers.astype(np.float32) * scale
    return decoded
