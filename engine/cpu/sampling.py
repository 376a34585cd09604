"""Quicker twins of ref.sampling for a CPU: float32 rows, one at a time, sorting no more than must be sorted.

A row is worked on by itself, as one contiguous array, so what it gives cannot depend on the rows around it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.api import GREEDY_TEMPERATURE
from engine.logit_edits import ALLOWED, BANNED, BIAS, NOT_FINITE, NOTHING_LEFT, PENALTY, SAMPLED, LogitEdits
from ref.philox import uniform

Float32 = NDArray[np.float32]
Int32 = NDArray[np.int32]
_SUM_BLOCK = 256  # weights a partial sum; a running sum over a whole row costs more than its exponentials


def edit_logits(logits: Float32, edits: LogitEdits) -> tuple[Int32, Float32]:
    """Penalties, bias and masks on logits [num_rows, vocab] in place.

    Returns:
        reasons [num_rows], what it means if the best logit of a row is not finite from now on: NOT_FINITE, or
        NOTHING_LEFT for an edited row that was usable; a row that was not is left alone. And the rows that edits wants
        kept, as they were, [num_kept, vocab].
    """
    reasons = np.full(len(logits), NOT_FINITE, dtype=np.int32)
    raw = logits[edits.rows[edits.keeps_raw]]
    for i, row in enumerate(edits.rows.tolist()):
        if not np.isfinite(logits[row].max()):
            continue
        reasons[row] = NOTHING_LEFT
        with np.errstate(all="ignore"):  # extreme penalties may reach ±inf, which ends as a bad row
            _edit_row(logits[row], edits, i)
    return reasons, raw


def _edit_row(logits: Float32, edits: LogitEdits, i: int) -> None:
    bounds = edits.bounds[i].tolist()
    parts = [slice(*pair) for pair in pairwise(bounds)]
    ids = [edits.token_ids[part] for part in parts]
    if len(ids[PENALTY]):
        apply_penalties(logits, ids[PENALTY], edits.values[parts[PENALTY]], edits.repetition_penalty[i])
    logits[ids[BIAS]] += edits.values[parts[BIAS]]
    if len(ids[ALLOWED]):
        allowed = logits[ids[ALLOWED]]
        logits.fill(-np.inf)
        logits[ids[ALLOWED]] = allowed
    logits[ids[BANNED]] = -np.inf


def apply_penalties(logits: Float32, seen_ids: Int32, penalties: Float32, repetition_penalty: np.float32) -> None:
    """ref.apply_penalties on logits [vocab] in place.

    Args:
        seen_ids: [num_seen], distinct.
        penalties: [num_seen], frequency · count + presence · [count > 0] of each.
    """
    seen = logits[seen_ids]
    logits[seen_ids] = np.where(seen > 0, seen / repetition_penalty, seen * repetition_penalty) - penalties


def sample_rows(
    logits: Float32,
    temperature: NDArray[np.float64],
    top_k: NDArray[np.int64],
    top_p: NDArray[np.float64],
    min_p: NDArray[np.float64],
    seed: NDArray[np.uint64],
    position: NDArray[np.int64],
    stream: NDArray[np.int64],
    reasons: Int32 | None = None,
) -> Int32:
    """One id for each row of logits [num_rows, vocab], as ref.sample with the uniforms of ref.philox.

    Args:
        temperature, top_k, top_p, min_p, seed, position, stream: [num_rows].
        reasons: [num_rows] of edit_logits; None = nothing was edited.
    Returns:
        [2, num_rows]: token ids, and SAMPLED or the reason why a row could not be.
    """
    draws = np.flatnonzero(temperature >= GREEDY_TEMPERATURE)
    if len(draws):
        uniforms = np.zeros(len(logits), dtype=np.float32)
        uniforms[draws] = uniform(seed[draws], position[draws], stream[draws])
        token_ids = sample(logits, temperature, top_k, top_p, min_p, uniforms)
    else:
        token_ids = greedy(logits)
    usable = np.isfinite(logits[np.arange(len(token_ids)), token_ids])
    return np.stack([token_ids, np.where(usable, SAMPLED, NOT_FINITE if reasons is None else reasons).astype(np.int32)])


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
    logits: Float32, token_ids: Int32, k: int, rows: Int32 | None = None, raw: Float32 | None = None
) -> tuple[Float32, NDArray[np.int64], Float32]:
    """ref.token_logprobs of the wanted rows: [num_wanted], [num_wanted, min(k, vocab)] twice.

    Args:
        token_ids: [num_wanted].
        rows: [num_wanted], those of logits [num_rows, vocab] that are wanted; ~i, which is negative, is row i of raw.
            None = all of logits, in order. They must be usable.
        raw: [num_kept, vocab], rows as they were before edit_logits.
    """
    wanted = np.arange(len(logits)) if rows is None else rows
    num_top = min(k, logits.shape[1])
    own = np.empty(len(wanted), dtype=np.float32)
    top_ids = np.empty((len(wanted), num_top), dtype=np.int64)
    top = np.empty((len(wanted), num_top), dtype=np.float32)
    for i, wanted_row in enumerate(wanted.tolist()):
        row = logits[wanted_row] if wanted_row >= 0 or raw is None else raw[~wanted_row]
        best = row.max()
        log_total = np.log(np.exp(row - best).sum(dtype=np.float64))
        own[i] = row[token_ids[i]] - best - log_total
        if num_top:
            ids = _best_positions(row, num_top)
            top_ids[i] = ids[np.argsort(-row[ids], kind="stable")]
            top[i] = row[top_ids[i]] - best - log_total
    return own, top_ids, top


def start_copy(array: NDArray[Any]) -> Callable[[], NDArray[Any]]:
    """A copy on the host has begun; what is given waits for it. Here the array is the host's already."""
    return lambda: array
