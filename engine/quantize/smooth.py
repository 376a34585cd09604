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
    fact divided by, so that its rounding costs nothing.
    """
    readers = [spec for spec, x in inputs if x is hidden]
    weights = [model.weight(spec, module) for spec in readers for module, _, _ in spec.modules()]
    factors = smoothing_factors(calibrate([hidden]), weights, alpha).astype(np.float32)
    dtype = model.stored_dtype(names[id(piece.norm.weight)])
    norm = np.asarray(piece.norm.weight)
    smoothed = np.asarray(round_to(smooth_norm(norm, factors), STORAGE[dtype]), np.float32)
    usable = np.isfinite(smoothed) & (smoothed != 0) & (norm != 0)
    factors = np.where(usable, norm / np.where(usable, smoothed, 1), factors).astype(np.float32)
    norms = {names[id(piece.norm.weight)]: smoothed}
    if piece.norm.bias is not None:
        norms[names[id(piece.norm.bias)]] = smooth_norm(piece.norm.bias, factors)
    return Smoothed(norms, factors, frozenset(spec.dest for spec in readers))
