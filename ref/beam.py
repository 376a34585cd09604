"""Beam search, one step at a time: keep the num_beams likeliest beginnings instead of one.

A running beam has a score, the sum of its tokens' logprobs. A step extends each by every token and ranks all
extensions by score, highest first; among equals the lower beam comes first, then the lower token id. Of the best
num_beams · max(2, 1 + number of EOS ids), which hold num_beams that go on whatever happens, those that end with EOS
are finished texts if they are among the first num_beams, and dropped if not; the first num_beams others run on.
Source: Graves 2012, "Sequence Transduction with Recurrent Neural Networks"; the penalty: Wu et al. 2016.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Beams:
    """Extensions, best first: which beam each extends, by which token, and its score; all [num]."""

    parents: NDArray[np.int64]
    token_ids: NDArray[np.int64]
    scores: Array


def beam_candidates(logprobs: Array, scores: Array, num_candidates: int) -> Beams:
    """The best extensions of all beams.

    Args:
        logprobs: [num_beams, vocab_size], of the next token of each beam.
        scores: [num_beams]. A search begins with 0 for one beam and −inf for the others, which are all the same text.
    Returns:
        At most num_candidates extensions; fewer where the others have score −inf (banned tokens, dead beams).

    Numerics: sums in the dtype of scores; give float64, since ranks of long texts hang on small differences.
    """
    totals = (scores[:, None] + logprobs.astype(scores.dtype)).reshape(-1)  # [num_beams · vocab_size]
    order = np.argsort(-totals, kind="stable")[:num_candidates].astype(np.int64)
    order = order[totals[order] > -np.inf]
    return Beams(order // logprobs.shape[1], order % logprobs.shape[1], totals[order])


def beam_step(logprobs: Array, scores: Array, eos_token_ids: Collection[int]) -> tuple[Beams, Beams]:
    """One step of the search.

    Args:
        logprobs, scores: as in beam_candidates.
        eos_token_ids: tokens that end a text; may be empty.
    Returns:
        (running, finished): up to num_beams extensions that go on, and those that end here; the scores of both are
        plain sums. finished token_ids are the EOS ids.

    Edge cases: a text that ends counts as a finished one only if it beats all but num_beams − 1 of the others, so
    running is full even if every beam may end.
    """
    num_beams = len(scores)
    candidates = beam_candidates(logprobs, scores, num_beams * max(2, 1 + len(eos_token_ids)))
    ends = np.isin(candidates.token_ids, list(eos_token_ids))
    running = np.flatnonzero(~ends)[:num_beams]
    finished = np.flatnonzero(ends[:num_beams])
    return _select(candidates, running), _select(candidates, finished)


def _select(beams: Beams, rows: NDArray[np.intp]) -> Beams:
    return Beams(beams.parents[rows], beams.token_ids[rows], beams.scores[rows])


def beam_score(score: Array, length: int, length_penalty: float = 1.0) -> Array:
    """What finished texts are compared by: score / length^length_penalty.

    length counts generated tokens, EOS included. With a penalty of 0 sums are compared, which favours short texts; with
    1 means are. score [...] is a sum of logprobs; the answer has its shape and dtype.
    """
    normalized: Array = score / score.dtype.type(length**length_penalty)
    return normalized


def beam_done(
    finished: Array, running_scores: Array, num_beams: int, length: int, max_length: int, length_penalty: float = 1.0
) -> bool:
    """Whether no running beam can still enter the best num_beams finished texts.

    Logprobs are at most 0, so a beam's score never rises. What it can reach is beam_score of its score now, at the
    length that is kindest to it: max_length if the penalty is above 0, else the next one.

    Args:
        finished: [num_finished], beam_score of each finished text.
        running_scores: [num_running], plain sums.
        length: generated tokens of the running beams.
    """
    if len(running_scores) == 0 or length >= max_length:
        return True
    if len(finished) < num_beams:
        return False
    kindest = max_length if length_penalty > 0 else length + 1
    reachable = beam_score(np.asarray(running_scores).max(keepdims=True), kindest, length_penalty)
    return bool(reachable[0] <= np.sort(finished)[-num_beams])
