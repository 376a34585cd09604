"""ref.sampling: values that a reader can check by hand, and draws that follow the distribution."""

import math

import numpy as np
import pytest

from ref import sampling
from ref.philox import uniform

LN = np.log
INF = np.inf


def logits_of(*probabilities: float) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(np.array(probabilities))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_penalties_by_hand(dtype: type) -> None:
    """SAM-09: prompt and output count for repetition, the output alone for presence and frequency."""
    logits = np.array([2.0, -2.0, 4.0, -4.0, 1.0, 0.0], dtype=dtype)
    result = sampling.apply_penalties(logits, [0, 1, 0], [2, 2, 3], 2.0, 0.5, 0.25)
    assert result.dtype == dtype
    assert result.tolist() == [1.0, -4.0, 2.0 - 0.5 - 0.5, -8.0 - 0.5 - 0.25, 1.0, 0.0]
    assert logits.tolist() == [2.0, -2.0, 4.0, -4.0, 1.0, 0.0]


def test_penalties_pass_over_ids_without_a_logit() -> None:
    """SAM-09: a placeholder id of −200, and ids past the end."""
    logits = np.array([1.0, 2.0], dtype=np.float32)
    result = sampling.apply_penalties(logits, [-200, 2, -1], [5], 2.0, 1.0, 1.0)
    assert result.tolist() == [1.0, 2.0]


def test_neutral_penalties_change_nothing() -> None:
    logits = np.random.default_rng(0).normal(size=50).astype(np.float32)
    assert (sampling.apply_penalties(logits, [1, 2], [3]) == logits).all()


def test_bias_adds_and_bans() -> None:
    logits = np.array([1.0, 2.0, 300.0, 4.0], dtype=np.float32)
    assert sampling.apply_logit_bias(logits, {0: 2.5, 1: -99.0, 2: -100.0}).tolist() == [3.5, -97.0, -INF, 4.0]
    assert logits.tolist() == [1.0, 2.0, 300.0, 4.0]


def test_mask() -> None:
    masked = sampling.apply_mask(np.array([1.0, 2.0], dtype=np.float32), np.array([False, True]))
    assert masked.tolist() == [-INF, 2.0]
    assert masked.dtype == np.float32


def test_bad_words_look_at_the_end_of_the_output() -> None:
    words = [(7,), (1, 2), (3, 1, 5), (2, 2)]
    assert sampling.banned_by_bad_words(words, []) == [7]
    assert sampling.banned_by_bad_words(words, [1]) == [7, 2]
    assert sampling.banned_by_bad_words(words, [3, 1]) == [7, 2, 5]
    assert sampling.banned_by_bad_words(words, [3, 1, 2]) == [7, 2]


def test_ranking_puts_lower_ids_first_among_equals() -> None:
    assert sampling.rank(np.array([1.0, 3.0, 3.0, -INF, 2.0])).tolist() == [1, 2, 4, 0, 3]
    assert sampling.greedy(np.array([[1.0, 3.0, 3.0], [0.0, 0.0, 0.0]])).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("top_k", "kept"),
    [
        (0, [0, 1, 2, 3]),
        (-1, [0, 1, 2, 3]),
        (1, [1]),
        (2, [1, 2]),
        (3, [0, 1, 2]),
        (4, [0, 1, 2, 3]),
        (9, [0, 1, 2, 3]),
    ],
)
def test_top_k_keeps_exactly_k(top_k: int, kept: list[int]) -> None:
    """SAM-03: 0 and −1 are off, more than the vocabulary keeps all, ties go to the lower id."""
    assert np.flatnonzero(sampling.keep_top_k(np.array([1.0, 2.0, 2.0, 1.0]), top_k)).tolist() == kept


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [
        (1e-9, [1]),
        (0.5, [1]),
        (0.51, [1, 2]),
        (0.75, [1, 2]),
        (0.76, [0, 1, 2]),
        (0.99, [0, 1, 2, 3]),
        (1.0, [0, 1, 2, 3]),
    ],
)
def test_top_p_keeps_the_shortest_head(top_p: float, kept: list[int]) -> None:
    """Probabilities 1/8, 1/2, 1/4, 1/8, exact in binary; a mass that just reaches top_p is enough."""
    weights = np.array([0.25, 1.0, 0.5, 0.25])
    assert np.flatnonzero(sampling.keep_top_p(np.log(weights), weights, top_p)).tolist() == kept


def test_equal_logits_top_p_and_top_k() -> None:
    """SAM-03: with 8 equal logits top_p 0.5 keeps the 4 lowest ids, top_k 3 the 3 lowest, both together 2."""
    logits = np.zeros(8)
    kept = [
        np.flatnonzero(sampling.keep_set(logits, 1.0, k, p, 0.0)).tolist() for k, p in [(0, 0.5), (3, 1.0), (3, 0.5)]
    ]
    assert kept == [[0, 1, 2, 3], [0, 1, 2], [0, 1]]


def test_top_p_is_of_what_top_k_left() -> None:
    """0.4 of 0.4 + 0.3 + 0.3 alone is below 0.5; after top_k 2 it is 0.4 / 0.7 and above."""
    logits = logits_of(0.4, 0.3, 0.3)
    assert sampling.keep_set(logits, 1.0, 0, 0.5, 0.0).tolist() == [True, True, False]
    assert sampling.keep_set(logits, 1.0, 2, 0.5, 0.0).tolist() == [True, False, False]


def test_min_p_is_relative_to_the_best() -> None:
    logits = logits_of(0.5, 0.26, 0.24, 0.0)
    assert sampling.keep_set(logits, 1.0, 0, 1.0, 0.5).tolist() == [True, True, False, False]
    assert sampling.keep_set(logits, 1.0, 0, 1.0, 1.0).tolist() == [True, False, False, False]
    assert sampling.keep_set(logits, 1.0, 0, 1.0, 0.0).tolist() == [True, True, True, True]


def test_temperature_comes_before_the_filters() -> None:
    """Weights 1 and 1/4 become 1 and 1/2 at temperature 2, which min_p 0.5 keeps."""
    logits = np.array([0.0, -2 * math.log(2)])
    assert sampling.keep_set(logits, 1.0, 0, 1.0, 0.49).tolist() == [True, False]
    assert sampling.keep_set(logits, 2.0, 0, 1.0, 0.49).tolist() == [True, True]


def test_draw_walks_ids_in_order() -> None:
    weights = np.array([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    draws = [sampling.draw(weights, u) for u in (0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2**-24)]
    assert draws == [1, 1, 3, 3, 4, 4]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("temperature", [1e-4, 1e-2, 1.0, 1e6])
def test_any_temperature_gives_finite_weights(dtype: type, temperature: float) -> None:
    """SAM-01, SAM-02: nothing overflows; a tiny temperature is greedy in effect, a huge one near uniform."""
    logits = np.array([-1e4, 3.0, 88.0, 1e4], dtype=dtype)
    weights = sampling.token_weights(logits, temperature)
    assert np.isfinite(weights).all()
    assert weights[3] == 1
    assert (weights[0] > 0.9) == (temperature == 1e6)


def test_greedy_and_unusable_rows_take_the_argmax() -> None:
    logits = np.array([[0, 1, 1], [0, 1, 1], [np.nan, 1, 2], [-INF, -INF, -INF], [INF, 0, INF]], dtype=np.float32)
    ids = sampling.sample(logits, [0.0, 1e-6, 1.0, 1.0, 1.0], 0, 1.0, 0.0, 0.999)
    assert ids.tolist() == [1, 1, 0, 0, 0]
    assert ids.dtype == np.int32


def test_draws_follow_the_distribution() -> None:
    """χ² of 20 000 draws against softmax(l / 1.5) cut to the 6 best. Bound as in test_philox, exp(−20)."""
    rng = np.random.default_rng(1)
    logits = rng.normal(size=10) * 2
    num_draws, t = 20_000, 20.0
    keep = sampling.keep_top_k(logits, 6)
    expected = np.where(keep, np.exp(logits / 1.5), 0)
    expected *= num_draws / expected.sum()
    uniforms = uniform(11, np.arange(num_draws))
    weights = np.where(keep, sampling.token_weights(logits, 1.5), 0)
    ids = [sampling.draw(weights, u) for u in uniforms]
    observed = np.bincount(ids, minlength=10)
    assert (observed[~keep] == 0).all()
    chi2 = ((observed - expected)[keep] ** 2 / expected[keep]).sum()
    assert chi2 < 5 + 2 * math.sqrt(5 * t) + 2 * t
    assert expected[keep].min() > 5  # below that χ² is a poor approximation


def test_logprobs() -> None:
    logits = logits_of(0.1, 0.4, 0.4, 0.1)[None] + 1000.0
    own, top_ids, top = sampling.token_logprobs(logits, [3], 3)
    assert own == pytest.approx([LN(0.1)])
    assert top_ids.tolist() == [[1, 2, 0]]
    assert top[0] == pytest.approx([LN(0.4), LN(0.4), LN(0.1)])
    assert np.exp(sampling.log_softmax(logits)).sum() == pytest.approx(1.0, abs=1e-12)
    assert sampling.token_logprobs(logits, [0], 0)[1].shape == (1, 0)
    assert sampling.token_logprobs(logits, [0], 99)[1].shape == (1, 4)
