"""Speculative decoding: a cheap draft proposes tokens, one pass of the model judges them all, and nothing changes.

The model gives the distribution p_i of the token at each drafted place i, and one more for the token behind the last.
Draft token x_i, drawn from q_i, is kept with probability min(1, p_i(x_i) / q_i(x_i)). At the first that is not kept a
token is drawn from the residual max(p_i − q_i, 0) / Σ max(p_i − q_i, 0), and the rest of the draft is dropped; if all
are kept, one more token is drawn from the last p. Each token then has distribution p: for any x,

    q(x) · min(1, p(x) / q(x)) + (1 − Σ_y min(p(y), q(y))) · residual(x) = min(p, q)(x) + max(p − q, 0)(x) = p(x),

because 1 − Σ min(p, q) = Σ max(p − q, 0). A draft token is kept with probability Σ min(p, q).
Source: Leviathan, Kalman, Matias 2022, "Fast Inference from Transformers via Speculative Decoding"; Chen et al. 2023.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ref.sampling import GREEDY_TEMPERATURE, draw, greedy, keep_set, token_weights

Array = NDArray[Any]
Ints = NDArray[np.integer[Any]]


def sampling_distribution(
    logits: Array, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> NDArray[np.float64]:
    """The probabilities with which ref.sampling.sample draws from each row: what p and q must be.

    Args:
        logits: [num_rows, vocab_size], with penalties and masks already in them.
    Returns:
        [num_rows, vocab_size] float64, each row with sum 1; all on the best token where sample is greedy.
    """
    probabilities = np.zeros(logits.shape, np.float64)
    for row, best in enumerate(greedy(logits)):
        if temperature < GREEDY_TEMPERATURE or not np.isfinite(logits[row, best]):
            probabilities[row, best] = 1
            continue
        keep = keep_set(logits[row], temperature, top_k, top_p, min_p)
        weights = np.where(keep, token_weights(logits[row], temperature), 0).astype(np.float64)
        probabilities[row] = weights / weights.sum()
    return probabilities


def residual(target_probs: Array, draft_probs: Array) -> Array:
    """What is left of p where the draft gave too little: max(p − q, 0) / Σ max(p − q, 0), dtype as given.

    target_probs and draft_probs [vocab_size] are p and q; so is the answer.

    Edge cases: p = q leaves nothing, and nothing is rejected then; p is the answer, in case rounding rejects.
    """
    left: Array = np.maximum(target_probs - draft_probs, 0)
    total = left.sum()
    return target_probs if total == 0 else left / total


def speculative_accept(
    draft_ids: Ints,
    draft_probs: Array | None,
    target_probs: Array,
    accept_uniforms: Array,
    draw_uniforms: Array,
) -> NDArray[np.int64]:
    """The tokens that one pass of the model yields: those of the draft that are kept, and one more.

    Args:
        draft_ids: [num_draft].
        draft_probs: [num_draft, vocab_size], what each draft token was drawn from; None for tokens that were looked up
            (n-grams), which is q = 1 on the token.
        target_probs: [num_draft + 1, vocab_size], see sampling_distribution.
        accept_uniforms: [num_draft] in [0, 1); token i is kept where accept_uniforms[i] · q < p.
        draw_uniforms: [num_draft + 1] in [0, 1), independent of the others; number i is used if place i is drawn.
    Returns:
        [num_kept + 1] int64, from 1 to num_draft + 1 tokens.
    Raises:
        ValueError: shapes that do not fit.

    Numerics: no quotient is taken, so q = 0 needs no care: such a token is kept if p > 0.
    Edge cases: an empty draft is plain sampling. A token with p = 0 is never kept, one with p ≥ q always is.
    """
    num_draft = len(draft_ids)
    lengths = (len(target_probs) - 1, len(accept_uniforms), len(draw_uniforms) - 1)
    if any(length != num_draft for length in lengths):
        raise ValueError(
            f"{num_draft} draft tokens need {num_draft + 1} rows of target_probs, {num_draft} accept_uniforms and "
            f"{num_draft + 1} draw_uniforms; found {lengths[0] + 1}, {lengths[1]} and {lengths[2] + 1}"
        )
    if draft_probs is None:
        draft_probs = np.eye(target_probs.shape[1])[np.asarray(draft_ids, np.int64)]
    for i, token_id in enumerate(int(x) for x in draft_ids):
        if accept_uniforms[i] * draft_probs[i, token_id] < target_probs[i, token_id]:
            continue
        drawn = draw(residual(target_probs[i], draft_probs[i]), float(draw_uniforms[i]))
        return np.array([*draft_ids[:i], drawn], np.int64)
    return np.array([*draft_ids, draw(target_probs[-1], float(draw_uniforms[-1]))], np.int64)


def speculative_greedy(draft_ids: Ints, target_logits: Array) -> NDArray[np.int64]:
    """speculative_accept at temperature 0: drafts are kept while they are the model's best token.

    Args:
        draft_ids: [num_draft].
        target_logits: [num_draft + 1, vocab_size].
    Returns:
        [num_kept + 1] int64: the same tokens, one at a time, would have been greedy.
    """
    best = greedy(target_logits).astype(np.int64)
    differs = np.flatnonzero(best[:-1] != np.asarray(draft_ids))
    num_kept = int(differs[0]) if differs.size else len(draft_ids)
    return best[: num_kept + 1]
