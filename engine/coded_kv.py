"""Keys or values in 8 bits, as a layer's cache holds them and as kernels take them in place of an array of numbers.

Defined by ref.quant.kv: a code a number, and a scale for each head of each token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Array = Any
KVKind = Literal["fp8", "int8"]

CODES = {"fp8": np.dtype(np.uint8), "int8": np.dtype(np.int8)}  # fp8: the bits of e4m3
SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class CodedKV:
    """codes [num_blocks, block_size, n_kv_heads, head_dim] uint8 (e4m3) or int8; scales [num_blocks, block_size,
    n_kv_heads] float32."""

    codes: Array
    scales: Array

    @property
    def nbytes(self) -> int:
        return int(self.codes.nbytes) + int(self.scales.nbytes)


KVArray = Array | CodedKV  # of a layer: numbers, or codes for them


def parts_of(cache: KVArray) -> tuple[Array, Array | None]:
    """(what lies in blocks by head and element, its scales if it is codes)."""
    return (cache.codes, cache.scales) if isinstance(cache, CodedKV) else (cache, None)
