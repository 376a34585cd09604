"""cuBLAS as a function of our op table; GPU only."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

Array = Any

cupy = importlib.import_module("cupy")
CUBLAS = importlib.import_module("engine.kernels.cublas").Cublas()


def linear(x: Array, weight: Array, bias: Array | None) -> Array:
    """In float32, so that the bias is added before the one rounding."""
    y = cupy.empty((len(x), len(weight)), np.float32)
    if y.size:
        CUBLAS.matmul(x, weight, y)
    return (y if bias is None else y + bias.astype(np.float32)).astype(x.dtype)
