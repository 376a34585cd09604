"""Quicker twins of ref.sampling for a CPU: float32 rows, one at a time, sorting no more than must be sorted.

A row is worked on by itself, as one contiguous array, so what it gives cannot depend on the rows around it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.api import GREEDY_TEMPERATURE
from ref.philox import uniform

__all__ = ["apply_penalties", "greedy", "sample", "token_logprobs", "uniform"]

Float32 = NDArray[np.float32]
_SUM_BLOCK = 256  # weights a partial sum; a running sum over a whole row costs more than its exponentials


def apply_penalties(
    logits: Float32,
    seen_ids: NDArray[np.int64],
    output_counts: NDArray[np.int64],
    repetition_penalty: float,
    presence_penalty: float,
    frequency_penalty: float,
) -> None:
    """ref.apply_penalties on logits [vocab] in place; seen_ids [num_seen] are distinct, output_counts their counts."""
    seen = logits[seen_ids]
    penalised = np.where(seen > 0, seen / repetition_penalty, seen * repetition_penalty)
    penalties = frequency_penalty * output_counts + presence_penalty * (output_counts > 0)
    logits[seen_ids] = penalised - penalties.astype(np.float32)


def greedy(logits: Float32) -> NDArray[np.int32]:
    """The best id of each row, the lowest among equals. [num_rows, vocab] → [num_rows]."""
    token_ids: NDArray[np.intp] = np.argmax(logits, axis=-1)
    return token_ids.astype(np.int32)


def sample(
    logits: Float32,
    temperature: NDArray[np.float64],
    top_k: NDArray[np.int64],
    top_p: NDArray[np.float64],
    min_p: NDArray[np.float64],
    uniforms: Float32,
) -> NDArray[np.int32]:
    """One id for each row, [num_rows, vocab] → [num_rows]; the arguments are those of ref.sample, [num_rows] each.

    Greedy rows cost an argmax. A row whose largest logit is not finite gets its argmax too.
    """
    token_ids = greedy(logits)
    best = logits[np.arange(len(token_ids)), token_ids]
    for row in np.flatnonzero((temperature >= GREEDY_TEMPERATURE) & np.isfinite(best)).tolist():
        token_ids[row] = _sample_row(
            logits[row], best[row], temperature[row], top_k[row], top_p[row], min_p[row], uniforms[row]
        )
    return token_ids


def _sample_row(
    row: Float32,
    best: np.float32,
    temperature: np.float64,
    top_k: np.int64,
    top_p: np.float64,
    min_p: np.float64,
    uniform: np.float32,
) -> int:
    heat = np.float32(temperature)
    kept_ids = None  # all of them
    logits = row
    if 0 < top_k < len(row):
        kept_ids = _best_positions(row, int(top_k))
        logits = row[kept_ids]
    weights = np.exp((logits - best) / heat)
    if top_p < 1.0:
        num_kept, lowest = _nucleus(logits, weights, best, heat, float(top_p))
        nucleus = _positions_from(logits, lowest, num_kept)
        kept_ids = nucleus if kept_ids is None else kept_ids[nucleus]
        weights = weights[nucleus]
    if min_p > 0.0:
        weights = np.where(weights.astype(np.float64) >= min_p, weights, np.float32(0))
    position = _draw(weights, float(uniform))
    return position if kept_ids is None else int(kept_ids[position])


def _best_positions(row: Float32, k: int) -> NDArray[np.intp]:
    """The k best positions of row [vocab], lower ones first among equals, in ascending order."""
    return _positions_from(row, np.partition(row, len(row) - k)[len(row) - k], k)


def _positions_from(row: Float32, lowest: np.float32, k: int) -> NDArray[np.intp]:
    """The k best positions, ascending, where the last of them is known to have the value lowest."""
    above = np.flatnonzero(row > lowest)
    equal = np.flatnonzero(row == lowest)[: k - len(above)]
    return np.sort(np.concatenate([above, equal]))


def _nucleus(
    logits: Float32, weights: Float32, best: np.float32, heat: np.float32, top_p: float
) -> tuple[int, np.float32]:
    """Length of the shortest head of the ranking that holds top_p of all weight, and the logit that ends it.

    Only weights at or above half of (1 − top_p) · total / len are sorted: those below it hold at most half of what
    the head leaves out, so none of them can be in it.
    """
    total = float(weights.sum(dtype=np.float64))
    ranked = np.sort(logits[weights >= 0.5 * (1.0 - top_p) * total / len(weights)])[::-1]
    mass = np.cumsum(np.exp((ranked - best) / heat), dtype=np.float64)
    num_kept = 1 + int(np.count_nonzero(mass[:-1] < top_p * total))
    return num_kept, ranked[num_kept - 1]


def _draw(weights: Float32, uniform: float) -> int:
    """The first position at which the running sum of weights passes uniform · total."""
    starts = np.arange(0, len(weights), _SUM_BLOCK)
    block_ends = np.cumsum(np.add.reduceat(weights, starts, dtype=np.float64))
    target = uniform * block_ends[-1]
    block = int(np.searchsorted(block_ends, target, side="right"))
    first = block * _SUM_BLOCK
    inside = weights[first : first + _SUM_BLOCK]
    before = block_ends[block - 1] if block > 0 else 0.0
    mass = before + np.cumsum(inside, dtype=np.float64)
    position = int(np.searchsorted(mass, target, side="right"))
    if position == len(inside):  # the two sums of a block may differ in their last bit
        position = int(np.flatnonzero(inside)[-1])
    return first + position


def token_logprobs(
    logits: Sequence[Float32] | Float32, token_ids: NDArray[np.int32], k: int
) -> tuple[Float32, NDArray[np.int64], Float32]:
    """ref.token_logprobs: [num_rows], [num_rows, min(k, vocab)] twice. logits may also be a list of rows [vocab]."""
    num_top = min(k, len(logits[0])) if len(logits) else k
    own = np.empty(len(logits), dtype=np.float32)
    top_ids = np.empty((len(logits), num_top), dtype=np.int64)
    top = np.empty((len(logits), num_top), dtype=np.float32)
    for i, row in enumerate(logits):
        best = row.max()
        log_total = np.log(np.exp(row - best).sum(dtype=np.float64))
        own[i] = row[token_ids[i]] - best - log_total
        if num_top:
            ids = _best_positions(row, num_top)
            top_ids[i] = ids[np.argsort(-row[ids], kind="stable")]
            top[i] = row[top_ids[i]] - best - log_total
    return own, top_ids, top
