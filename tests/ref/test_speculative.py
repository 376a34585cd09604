"""ref.speculative: by hand, exactly over all draws of a grid, and by statistics with a bound on false alarms."""

import math
from collections import Counter

import numpy as np
import pytest

from ref.sampling import draw, sample
from ref.speculative import residual, sampling_distribution, speculative_accept, speculative_greedy

Array = np.ndarray


def test_kept_rejected_and_one_more_by_hand() -> None:
    """p/q of token 0 is 1/2: kept below it; the residual of (¼, ¾) − (½, ½) is all on token 1."""
    draft, q = np.array([0]), np.array([[0.5, 0.5]])
    p = np.array([[0.25, 0.75], [0.5, 0.5]])
    assert speculative_accept(draft, q, p, np.array([0.49]), np.array([0.0, 0.2])).tolist() == [0, 0]
    assert speculative_accept(draft, q, p, np.array([0.49]), np.array([0.0, 0.6])).tolist() == [0, 1]
    assert speculative_accept(draft, q, p, np.array([0.5]), np.array([0.0, 0.2])).tolist() == [1]
    assert residual(p[0], q[0]).tolist() == [0, 1]


def test_what_follows_a_rejected_token_is_dropped() -> None:
    p = np.eye(3)[[1, 2, 0, 1]]  # the model wants 1, 2, 0, 1
    q = np.eye(3)[[1, 0, 0]]
    out = speculative_accept(np.array([1, 0, 0]), q, p, np.zeros(3), np.zeros(4))
    assert out.tolist() == [1, 2]


def test_impossible_and_certain_tokens() -> None:
    """p = 0 is never kept, not even with u = 0; p ≥ q always is, up to the largest u; q = 0 needs no quotient."""
    p, almost = np.array([[0.0, 1.0], [1.0, 0.0]]), np.array([1 - 2.0**-24])
    assert speculative_accept(np.array([0]), np.array([[1.0, 0.0]]), p, np.zeros(1), np.zeros(2)).tolist() == [1]
    half = np.array([[0.5, 0.5], [1.0, 0.0]])
    assert speculative_accept(np.array([1]), half[:1], half, almost, np.zeros(2)).tolist() == [1, 0]
    assert speculative_accept(np.array([1]), np.array([[1.0, 0.0]]), p, almost, np.zeros(2)).tolist() == [1, 0]
    assert speculative_accept(np.array([0]), np.array([[0.0, 1.0]]), p, np.zeros(1), np.zeros(2)).tolist() == [1]


def test_equal_distributions_leave_no_residual() -> None:
    p = np.array([0.25, 0.75])
    np.testing.assert_array_equal(residual(p, p), p)


def test_looked_up_tokens_are_kept_with_probability_p() -> None:
    p = np.array([[0.25, 0.75], [0.0, 1.0]])
    assert speculative_accept(np.array([0]), None, p, np.array([0.24]), np.zeros(2)).tolist() == [0, 1]
    assert speculative_accept(np.array([0]), None, p, np.array([0.25]), np.zeros(2)).tolist() == [1]


def test_an_empty_draft_is_plain_sampling() -> None:
    logits = np.log(np.array([[1.0, 2.0, 5.0]]))
    for uniform in (0.0, 0.124, 0.126, 0.374, 0.376, 0.99):
        out = speculative_accept(np.array([], int), None, sampling_distribution(logits, 1.0), [], np.array([uniform]))
        assert out.tolist() == sample(logits, 1.0, 0, 1.0, 0.0, uniform).tolist()


def test_the_first_token_has_exactly_the_distribution_of_the_model() -> None:
    """All draft tokens × 8 uniforms × 8 uniforms, weighted by q: all quotients are eighths, so counts are exact.

    p = (4, 4, 2, 6)/16, q = (8, 4, 2, 2)/16: Σ min(p, q) = 12/16; the residual is all on token 3.
    """
    p, q = np.array([4, 4, 2, 6]) / 16, np.array([8, 4, 2, 2]) / 16
    grid = np.arange(8) / 8
    mass, kept = np.zeros(4), 0.0
    for draft in range(4):
        for u in grid:
            for w in grid:
                draws = np.array([w, 0.0])
                out = speculative_accept(np.array([draft]), q[None], np.stack([p, p]), np.array([u]), draws)
                mass[out[0]] += q[draft] / 64
                kept += q[draft] / 64 * (len(out) == 2)
    assert mass.tolist() == p.tolist()
    assert kept == 12 / 16


def test_pairs_of_tokens_have_the_distribution_of_the_model() -> None:
    """Two drafted places and the token behind: how often each text of 3 tokens comes out, when the draft is poor.

    Each of the K = 27 shares is a mean of n independent 0/1 values; by Hoeffding it is off by more than ε with
    probability ≤ 2 exp(−2 n ε²), so with ε = sqrt(ln(2K / 10⁻⁹) / 2n) any of them is with probability ≤ 10⁻⁹.
    """
    num_runs, vocab_size = 6000, 3
    rng = np.random.default_rng(0)
    p = np.array([[0.1, 0.2, 0.7], [0.6, 0.3, 0.1], [0.2, 0.7, 0.1]])  # the model's at each place, whatever came before
    q = np.array([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6], [1.0, 0.0, 0.0]])

    def text() -> tuple[int, ...]:
        tokens: list[int] = []
        while len(tokens) < 3:
            start, num_draft = len(tokens), 2 - len(tokens)
            draft = np.array([draw(q[start + i], rng.random()) for i in range(num_draft)], int)
            uniforms = rng.random(2 * num_draft + 1)
            out = speculative_accept(draft, q[start:2], p[start:], uniforms[:num_draft], uniforms[num_draft:])
            tokens += out.tolist()
        return tuple(tokens)

    counts = Counter(text() for _ in range(num_runs))
    bound = math.sqrt(math.log(2 * vocab_size**3 / 1e-9) / (2 * num_runs))
    assert bound < 0.05  # drawing from p after a rejection would give place 0 token 0 in 16 % of all runs, not in 10 %
    for a, b, c in np.ndindex(3, 3, 3):
        assert abs(counts[a, b, c] / num_runs - p[0, a] * p[1, b] * p[2, c]) < bound
    for place, tokens in enumerate(zip(*counts.elements(), strict=True)):
        shares = np.bincount(tokens, minlength=3) / num_runs
        assert np.max(np.abs(shares - p[place])) < bound


def test_the_distribution_is_what_sample_draws_from() -> None:
    """Weights 1, 2, 5, 8: top_k 3 leaves 2, 5, 8 of 15; top_p 0.8 of that 5 and 8 of 13, as 8/15 is too little."""
    logits = np.log(np.array([[1.0, 2.0, 5.0, 8.0]]))
    np.testing.assert_allclose(sampling_distribution(logits, 1.0), [[1 / 16, 2 / 16, 5 / 16, 8 / 16]], rtol=1e-14)
    cut = sampling_distribution(logits, 1.0, top_k=3, top_p=0.8)
    np.testing.assert_allclose(cut, [[0, 0, 5 / 13, 8 / 13]], rtol=1e-14)
    np.testing.assert_allclose(sampling_distribution(logits, 0.5)[0, 3], 64 / 94, rtol=1e-14)
    assert sampling_distribution(logits, 0.0).tolist() == [[0, 0, 0, 1]]
    assert sampling_distribution(np.full((1, 3), np.nan), 1.0).sum() == 1


@pytest.mark.parametrize(("draft", "expected"), [([2, 0], [2, 0, 1]), ([2, 1], [2, 0]), ([0, 0], [2]), ([], [2])])
def test_greedy_keeps_what_the_model_would_have_said(draft: list[int], expected: list[int]) -> None:
    logits = np.array([[0.0, 1, 5], [7, 7, 1], [0, 3, 2]])[: len(draft) + 1]  # a tie in row 1 goes to the lower id
    draft_ids = np.array(draft, int)
    assert speculative_greedy(draft_ids, logits).tolist() == expected
    zeros = np.zeros(len(draft) + 1)
    p = sampling_distribution(logits, 0.0)
    assert speculative_accept(draft_ids, None, p, zeros[1:], zeros).tolist() == expected


def test_shapes_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match="2 draft tokens need 3 rows of target_probs, 2 accept_uniforms and 3 draw"):
        speculative_accept(np.array([0, 1]), None, np.ones((2, 2)) / 2, np.zeros(2), np.zeros(3))
