"""SmoothQuant: outliers of activations are moved into the weights, so that both fit 8 bits.

A few channels of a norm's output are far larger than the rest and take the whole range of a token's scale. Dividing
each channel by s and multiplying the weight's column by s changes nothing but the ranges:

    y = x Wᵀ = (x / s) (W · s)ᵀ,      s[i] = max |x[:, i]|^alpha / max |W[:, i]|^(1 − alpha)

The division costs nothing: it is folded into the factor of the norm before, and the result is an ordinary model.
Calibration finds max |x|; alpha 0.5 splits the range evenly.

Source: Xiao et al. 2023, "SmoothQuant".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

SMALLEST, LARGEST = 1e-5, 1e5  # of s: channels that are always zero would give 0 or inf


def calibrate(batches: Iterable[Array]) -> Array:
    """The largest |activation| of each channel over all batches: many [num_tokens, n] → [n], same dtype.

    Raises:
        ValueError: no batch, or no token in any; an activation that is not finite.
    """
    absmax: Array | None = None
    for batch in batches:
        if batch.shape[0]:
            found = np.max(np.abs(batch), axis=0)
            absmax = found if absmax is None else np.maximum(absmax, found)
    if absmax is None:
        raise ValueError("calibration saw no token; give at least one prompt")
    if not np.all(np.isfinite(absmax)):
        raise ValueError("calibration met an activation that is not finite; run the model in a wider dtype")
    return absmax


def smoothing_factors(act_absmax: Array, weights: Sequence[Array], alpha: float = 0.5) -> Array:
    """s of each input channel, for all layers that read the same activations (q, k, v; or gate, up).

    Args:
        act_absmax: [in], from calibrate.
        weights: each [out, in].
        alpha: 0 leaves the difficulty with the activations, 1 moves all of it into the weights.
    Returns:
        [in], dtype of act_absmax, within 1e−5 … 1e5.
    Raises:
        ValueError: alpha outside 0 … 1.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must be from 0 to 1, found {alpha}")
    weight_absmax = np.max([np.max(np.abs(weight), axis=0) for weight in weights], axis=0)
    weight_part = np.maximum(weight_absmax, SMALLEST) ** (1 - alpha)
    factors: Array = np.clip(np.maximum(act_absmax, SMALLEST) ** alpha / weight_part, SMALLEST, LARGEST)
    result: Array = factors.astype(act_absmax.dtype)
    return result


def smooth_norm(norm: Array, factors: Array) -> Array:
    """norm / s: the factor (or bias) of the norm before the layers: [in], [in] → [in], dtype of norm."""
    return norm / factors


def smooth_weight(weight: Array, factors: Array) -> Array:
    """W · s, column by column: [out, in], [in] → [out, in], dtype of weight."""
    return weight * factors
