"""ref.rope: angles by hand for every kind, the pairing, and what rotation must preserve."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ref.rope import rope, rope_cos_sin, rope_inv_freq, rope_kv_write


def test_default_and_linear_by_hand() -> None:
    np.testing.assert_allclose(rope_inv_freq("default", 100.0, 4), [1, 0.1], rtol=1e-15)
    np.testing.assert_allclose(rope_inv_freq("linear", 100.0, 4, factor=4.0), [0.25, 0.025], rtol=1e-15)


@pytest.mark.parametrize(
    ("seq_len", "second"),
    [
        (1, 0.1),
        (10, 0.1),  # the original length itself is not scaled
        (11, 1 / 12),  # 2 · 11/10 − 1 = 1.2; to the power 4/2; theta 144
        (20, 1 / 30),  # 2 · 20/10 − 1 = 3; theta 900
    ],
)
def test_dynamic_by_hand(seq_len: int, second: float) -> None:
    inv_freq = rope_inv_freq("dynamic", 100.0, 4, factor=2.0, original_max_position_embeddings=10, seq_len=seq_len)
    np.testing.assert_allclose(inv_freq, [1, second], rtol=1e-14)


def test_llama3_bands_by_hand() -> None:
    """Frequencies 1, 0.1, 0.01 make 24.99, 2.4987 and 0.24987 turns in 157 tokens: kept, joined, divided by 8."""
    inv_freq = rope_inv_freq("llama3", 1000.0, 6, 8.0, 1.0, 4.0, original_max_position_embeddings=157)
    kept = (157 * 0.1 / (2 * math.pi) - 1) / 3
    assert kept == pytest.approx(0.499577, abs=1e-6)
    np.testing.assert_allclose(inv_freq, [1, (1 - kept) * 0.0125 + kept * 0.1, 0.00125], rtol=1e-12)


def test_an_unknown_kind_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'yarn'"):
        rope_inv_freq("yarn", 10000.0, 64)


def test_cos_sin_holds_cosines_first() -> None:
    table = rope_cos_sin(np.array([math.pi / 2, math.pi]), np.array([0, 1, 2]))
    np.testing.assert_allclose(table, [[1, 1, 0, 0], [0, -1, 1, 0], [-1, 1, 0, 0]], atol=1e-15)


def test_a_unit_vector_turns_in_its_plane() -> None:
    cos_sin = rope_cos_sin(np.array([1.0]), np.array([0, 3]))
    unit_vectors = np.broadcast_to(np.eye(2), (2, 2, 2))  # two tokens, two heads
    c, s = math.cos(3), math.sin(3)
    np.testing.assert_allclose(rope(unit_vectors, cos_sin), [[[1, 0], [0, 1]], [[c, s], [-s, c]]], rtol=1e-15)


def test_pairs_are_half_a_head_apart_and_the_rest_passes() -> None:
    x = np.array([[[1.0, 2, 3, 4, 9]]])
    quarter_turn = rope_cos_sin(np.array([math.pi / 2, 0]), np.array([1]))
    np.testing.assert_allclose(rope(x, quarter_turn), [[[-3, 2, 1, 4, 9]]], atol=1e-15)


@given(st.integers(0, 500), st.integers(0, 500), st.integers(0, 500))
def test_scores_depend_on_distance_alone(p: int, s: int, shift: int) -> None:
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 1, 1, 8))
    inv_freq = rope_inv_freq("default", 10000.0, 8)

    def score(q_position: int, k_position: int) -> float:
        turned_q = rope(q, rope_cos_sin(inv_freq, np.array([q_position])))
        turned_k = rope(k, rope_cos_sin(inv_freq, np.array([k_position])))
        return float(np.sum(turned_q * turned_k))

    # the angles, up to 1000, are off by 1000 · 2^-53 each; |q| · |k| is below 20
    assert score(p, s) == pytest.approx(score(p + shift, s + shift), abs=20 * 8 * 1000 * 2**-53)


def test_rope_kv_write_rotates_keys_not_values_and_skips_padding() -> None:
    rng = np.random.default_rng(1)
    q, k, v = rng.standard_normal((3, 2, 4)), rng.standard_normal((3, 1, 4)), rng.standard_normal((3, 1, 4))
    cos_sin = rope_cos_sin(rope_inv_freq("default", 100.0, 4), np.array([7, 8, 0]))
    k_cache, v_cache = np.full((2, 2, 2, 1, 4), np.nan)
    out = rope_kv_write(q, k, v, cos_sin, np.array([3, 0, -1]), k_cache, v_cache)
    np.testing.assert_array_equal(out, rope(q, cos_sin))
    np.testing.assert_array_equal(k_cache[1, 1], rope(k, cos_sin)[0])
    np.testing.assert_array_equal(k_cache[0, 0], rope(k, cos_sin)[1])
    np.testing.assert_array_equal(v_cache[1, 1], v[0])
    assert np.isnan(k_cache[0, 1]).all()
    assert np.isnan(v_cache[1, 0]).all()
