"""ref.beam: ranks, ties and ends by hand; a search that is wide enough is exhaustive."""

import math
from itertools import pairwise, product

import numpy as np
import pytest

from ref.beam import beam_candidates, beam_done, beam_score, beam_step
from ref.sampling import log_softmax

Array = np.ndarray


def test_candidates_are_ranked_across_beams() -> None:
    """Sums: beam 0 −1 −2 −3, beam 1 −1.5 −2.5 −9."""
    logprobs = np.array([[0.0, -1, -2], [-0.5, -1.5, -8]])
    best = beam_candidates(logprobs, np.array([-1.0, -1.0]), 4)
    assert best.parents.tolist() == [0, 1, 0, 1]
    assert best.token_ids.tolist() == [0, 0, 1, 1]
    assert best.scores.tolist() == [-1, -1.5, -2, -2.5]


def test_ties_go_to_the_lower_beam_then_the_lower_token() -> None:
    best = beam_candidates(np.zeros((2, 3)), np.zeros(2), 4)
    assert best.parents.tolist() == [0, 0, 0, 1]
    assert best.token_ids.tolist() == [0, 1, 2, 0]


def test_a_search_begins_with_one_live_beam() -> None:
    running, _ = beam_step(np.tile([-1.0, -2, -3, -4], (3, 1)), np.array([0, -np.inf, -np.inf]), [3])
    assert running.parents.tolist() == [0, 0, 0]
    assert running.token_ids.tolist() == [0, 1, 2]


def test_ends_among_the_first_num_beams_finish_and_later_ones_are_dropped() -> None:
    """Ranked: beam 0 EOS −1, beam 0 token 1 −2, beam 1 EOS −3, beam 1 token 1 −4; the second EOS is third of two."""
    logprobs, scores = np.array([[-1.0, -2], [-2, -3]]), np.array([0.0, -1])
    running, finished = beam_step(logprobs, scores, [0])
    assert (running.parents.tolist(), running.token_ids.tolist()) == ([0, 1], [1, 1])
    assert running.scores.tolist() == [-2, -4]
    assert (finished.parents.tolist(), finished.token_ids.tolist()) == ([0], [0])
    assert finished.scores.tolist() == [-1]


def test_running_stays_full_when_every_beam_may_end_in_several_ways() -> None:
    """3 EOS ids take the best 3 places of both beams: 2 · (1 + 3) candidates still hold two that run."""
    logprobs = np.tile([-1.0, -1, -1, -5, -6], (2, 1))
    running, finished = beam_step(logprobs, np.zeros(2), [0, 1, 2])
    assert running.token_ids.tolist() == [3, 3]
    assert finished.token_ids.tolist() == [0, 1]


def test_banned_tokens_are_no_candidates() -> None:
    running, finished = beam_step(np.array([[-np.inf, -1.0, -np.inf]] * 2), np.array([0.0, -np.inf]), [0])
    assert running.token_ids.tolist() == [1]
    assert finished.scores.size == 0


def test_scores_are_means_unless_told_otherwise() -> None:
    scores = np.array([-6.0])
    assert beam_score(scores, 4).tolist() == [-1.5]
    assert beam_score(scores, 4, 0.0).tolist() == [-6]
    assert beam_score(scores, 4, 0.5).tolist() == [-3]


@pytest.mark.parametrize(
    ("finished", "running", "length_penalty", "expected"),
    [
        ([-1.0], [-0.1], 1.0, False),  # one of two finished
        ([-1.0, -2.0], [-19.0], 1.0, False),  # −19 over 10 tokens is −1.9
        ([-1.0, -2.0], [-20.0], 1.0, True),
        ([-1.0, -2.0, -9.0], [-20.0], 1.0, True),  # the worst of the best two counts
        ([-1.0, -2.0], [-1.9], 0.0, False),
        ([-1.0, -2.0], [-2.0], 0.0, True),
        ([-1.0, -20.0], [-4.0], -1.0, False),  # a penalty below 0 likes short texts: 4 tokens, −16
        ([-1.0, -2.0], [], 1.0, True),
    ],
)
def test_done_when_nothing_can_get_in(
    finished: list[float], running: list[float], length_penalty: float, expected: bool
) -> None:
    assert beam_done(np.array(finished), np.array(running), 2, 3, 10, length_penalty) is expected
    assert beam_done(np.array(finished), np.array(running), 2, 10, 10, length_penalty)


@pytest.mark.parametrize("seed", range(4))
def test_a_wide_search_finds_the_best_of_all_texts(seed: int) -> None:
    """A model of 4 tokens, 0 = EOS, whose logprobs hang on the last token; all texts of up to 4 tokens that end."""
    table = log_softmax(np.random.default_rng(seed).standard_normal((4, 4)))  # [last token, next token]; begins at 0
    num_beams, max_length = 64, 4
    texts, scores = [()] * num_beams, np.array([0.0] + [-np.inf] * (num_beams - 1))
    ended: dict[tuple[int, ...], float] = {}
    for length in range(1, max_length + 1):
        running, finished = beam_step(np.stack([table[text[-1] if text else 0] for text in texts]), scores, [0])
        for parent, score in zip(finished.parents, finished.scores, strict=True):
            ended[*texts[parent], 0] = float(beam_score(np.array(score), length))
        texts = [(*texts[p], int(t)) for p, t in zip(running.parents, running.token_ids, strict=True)]
        texts += [()] * (num_beams - len(texts))
        scores = np.concatenate([running.scores, np.full(num_beams - len(running.scores), -np.inf)])
    expected = {}
    for length in range(1, max_length + 1):
        for words in product((1, 2, 3), repeat=length - 1):
            steps = (0, *words, 0)
            expected[*words, 0] = sum(table[a, b] for a, b in pairwise(steps)) / length
    best = max(expected, key=lambda text: expected[text])
    assert max(ended, key=lambda text: ended[text]) == best
    assert math.isclose(ended[best], expected[best], rel_tol=1e-14)
