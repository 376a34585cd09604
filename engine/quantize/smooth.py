"""SmoothQuant of a piece of a model: outliers go from a norm's output into the weights that read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.models.model import Piece
from engine.quantize.encode import STORAGE
from engine.quantize.source_model import SourceModel
from engine.weights import LinearSpec
from ref.numerics import round_to
from ref.quant.smoothquant import calibrate, smooth_norm, smoothing_factors

Float32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Smoothed:
    """What becomes of a piece. readers: dest names of the layers whose columns are multiplied by factors [in]."""

    norms: Mapping[str, Float32]  # by their names in the checkpoint
    factors: Float32
    readers: frozenset[str]


def smooth_piece(
    model: SourceModel,
    piece: Piece,
    hidden: Float32,
    inputs: Sequence[tuple[LinearSpec, Any]],
    names: Mapping[int, str],
    alpha: float,
) -> Smoothed:
    """
    Args:
        hidden: [num_tokens, hidden_size], what the norm put out.
        inputs: each layer that the piece ran, and its input: hidden itself, or something else.
        names: of arrays by id.

    A norm is divided by the factors and rounded as it is stored; the weights are then multiplied by what it was in
    fact divided by, so that its rounding costs nothing. A channel whose quotient the type does not hold, as it would be
    infinity or 0, is left as it is.
    """
    readers = [spec for spec, x in inputs if x is hidden]
    weights = [model.weight(spec, module) for spec in readers for module, _, _ in spec.modules()]
    factors = smoothing_factors(calibrate([hidden]), weights, alpha).astype(np.float32)
    arrays = {
        names[id(array)]: np.asarray(array) for array in (piece.norm.weight, piece.norm.bias) if array is not None
    }
    for name, array in arrays.items():
        found = _divided(array, factors, model.stored_dtype(name))
        is_held = np.isfinite(found) & ((found != 0) == (array != 0))
        factors = np.where(is_held, factors, np.float32(1))
    (name, norm), *others = arrays.items()
    smoothed = _divided(norm, factors, model.stored_dtype(name))
    factors = np.where(smoothed != 0, norm / np.where(smoothed != 0, smoothed, 1), factors).astype(np.float32)
    norms = {name: smoothed} | {name: smooth_norm(array, factors) for name, array in others}
    return Smoothed(norms, factors, frozenset(spec.dest for spec in readers))


def _divided(array: Float32, factors: Float32, dtype: str) -> Float32:
    """As it is stored."""
    with np.errstate(over="ignore"):
        return np.asarray(round_to(smooth_norm(array, factors), STORAGE[dtype]), np.float32)
