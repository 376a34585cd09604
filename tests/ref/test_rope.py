"""ref.rope and ref.rope_scaling: angles by hand for every kind, both pairings, and what rotation must preserve."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ref.rmsnorm import rmsnorm
from ref.rope import qk_norm_rope_kv_write, rope, rope_cos_sin, rope_inv_freq, rope_kv_write
from ref.rope_scaling import longrope_attention_factor, yarn_attention_factor, yarn_mscale

Array = np.ndarray


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
    """KRN-04: one table a sequence, below and above the limit."""
    inv_freq = rope_inv_freq("dynamic", 100.0, 4, factor=2.0, original_max_position_embeddings=10, seq_len=seq_len)
    np.testing.assert_allclose(inv_freq, [1, second], rtol=1e-14)


def test_llama3_bands_by_hand() -> None:
    """Frequencies 1, 0.1, 0.01 make 24.99, 2.4987 and 0.24987 turns in 157 tokens: kept, joined, divided by 8."""
    inv_freq = rope_inv_freq("llama3", 1000.0, 6, 8.0, 1.0, 4.0, original_max_position_embeddings=157)
    kept = (157 * 0.1 / (2 * math.pi) - 1) / 3
    assert kept == pytest.approx(0.499577, abs=1e-6)
    np.testing.assert_allclose(inv_freq, [1, (1 - kept) * 0.0125 + kept * 0.1, 0.00125], rtol=1e-12)


def yarn(theta: float = 10.0, head_dim: int = 8, factor: float = 4.0, **changes: Any) -> Array:
    """Pair i turns by 10^(−i/4) a token; 20π tokens are 10 turns of pair 0, and 10^(1−b) turns need i = 4b."""
    return rope_inv_freq(
        "yarn", theta, head_dim, factor, original_max_position_embeddings=changes.pop("length", 63), **changes
    )


def test_yarn_by_hand() -> None:
    """63 tokens ≈ 20π: beta_fast 10 falls on pair 0.005, down to 0; beta_slow 10^0.5 on pair 2.005, up to 3."""
    inv_freq = yarn(beta_fast=10.0, beta_slow=math.sqrt(10))
    plain = 10.0 ** (-np.arange(4) / 4)
    share = np.array([1, 2 / 3 + 1 / 3 / 4, 1 / 3 + 2 / 3 / 4, 1 / 4])  # 0, 1/3, 2/3 and 1 of the way to / 4
    np.testing.assert_allclose(inv_freq, plain * share, rtol=1e-14)


def test_yarn_without_truncation_keeps_fractions_of_a_pair() -> None:
    inv_freq = yarn(beta_fast=10.0, beta_slow=math.sqrt(10), truncate=False)
    low = 4 * math.log10(63 / (20 * math.pi))
    slow = np.clip((np.arange(4) - low) / 2, 0, 1)  # half a power of ten is two pairs, wherever low lies
    np.testing.assert_allclose(inv_freq, 10.0 ** (-np.arange(4) / 4) * (1 - slow + slow / 4), rtol=1e-13)


@pytest.mark.parametrize(
    ("length", "share"),
    [
        (5, [1, 0.25, 0.25, 0.25]),  # 4 · log10(5 / 2π) = −0.4, up to 0: both edges are pair 0
        (2, [1, 1, 1, 1]),  # −1.99, up to −1: the far edge lies before the near one
    ],
)
def test_yarn_edges_that_meet_or_cross(length: int, share: list[float]) -> None:
    np.testing.assert_allclose(yarn(length=length), 10.0 ** (-np.arange(4) / 4) * share, rtol=1e-14)


def test_yarn_far_edge_lies_no_further_than_the_head_is_wide() -> None:
    """5000 tokens: 400 turns are pair 1.19, down to 1; 1 turn is pair 11.6, cut to 8 − 1; of 6 steps two are seen."""
    expected = 10.0 ** (-np.arange(4) / 4) * [1, 1, 1 - 1 / 6 * 3 / 4, 1 - 2 / 6 * 3 / 4]
    np.testing.assert_allclose(yarn(length=5000, beta_fast=400.0), expected, rtol=1e-14)


@pytest.mark.parametrize(
    ("mscales", "expected"),
    [
        ({}, 0.1 * math.log(40) + 1),  # Qwen: neither key
        ({"mscale": 0.707, "mscale_all_dim": 0.707}, 1.0),  # DeepSeek V2
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),  # DeepSeek V3
        ({"mscale": 0.707}, 0.0707 * math.log(40) + 1),
        ({"mscale": 1.0, "mscale_all_dim": 0.5}, (0.1 * math.log(40) + 1) / (0.05 * math.log(40) + 1)),
    ],
)
def test_yarn_attention_factor(mscales: dict[str, float], expected: float) -> None:
    """KRN-03: the size of cos and sin is m(mscale) / m(mscale_all_dim), once; scores grow by its square."""
    factor = yarn_attention_factor(40.0, **mscales)
    assert factor == pytest.approx(expected, rel=1e-15)
    table = rope_cos_sin(yarn(), np.array([0, 7, 5000]), factor)
    np.testing.assert_allclose(table[:, :4] ** 2 + table[:, 4:] ** 2, factor**2, rtol=1e-14)
    x = np.ones((3, 1, 8))
    np.testing.assert_allclose(np.sum(rope(x, table) ** 2, axis=-1), 8 * factor**2, rtol=1e-14)


def test_yarn_that_does_not_stretch_scales_nothing() -> None:
    assert yarn_mscale(1.0, 5.0) == yarn_attention_factor(0.5) == 1.0


@pytest.mark.parametrize(("seq_len", "divisors"), [(1, [1, 2]), (64, [1, 2]), (65, [4, 10]), (1000, [4, 10])])
def test_longrope_chooses_by_length(seq_len: int, divisors: list[int]) -> None:
    """KRN-10: short list up to the original length, long list above it."""
    inv_freq = rope_inv_freq(
        "longrope",
        100.0,
        4,
        original_max_position_embeddings=64,
        seq_len=seq_len,
        short_factor=[1, 2],
        long_factor=[4, 10],
    )
    np.testing.assert_allclose(inv_freq, np.array([1, 0.1]) / divisors, rtol=1e-15)


def test_longrope_one_table_serves_every_chunk_of_a_sequence() -> None:
    """KRN-10: rows of a chunk are rows of the whole; the choice depends on the sequence, not on the chunk."""
    lists = {"short_factor": [1, 2], "long_factor": [4, 10], "original_max_position_embeddings": 4}
    table = rope_inv_freq("longrope", 100.0, 4, seq_len=6, **lists)
    chunks = [rope_cos_sin(table, np.arange(start, start + 2), 1.25) for start in (0, 2, 4)]
    np.testing.assert_array_equal(np.concatenate(chunks), rope_cos_sin(table, np.arange(6), 1.25))


def test_longrope_attention_factor_by_hand() -> None:
    """KRN-10: 64 → 4096 is a factor of 64, and ln 64 / ln 64 = 1."""
    assert longrope_attention_factor(4096, 64) == pytest.approx(math.sqrt(2), rel=1e-15)
    assert longrope_attention_factor(64, 64) == longrope_attention_factor(32, 64) == 1.0


def test_longrope_list_of_the_wrong_length_is_named() -> None:
    with pytest.raises(ValueError, match="long_factor of longrope has 3 numbers; 2 pairs rotate"):
        rope_inv_freq(
            "longrope",
            100.0,
            4,
            original_max_position_embeddings=8,
            seq_len=9,
            short_factor=[1, 1],
            long_factor=[1, 1, 1],
        )


@pytest.mark.parametrize("kind", ["mrope", "proportional", "su"])
def test_an_unknown_kind_is_refused_by_name(kind: str) -> None:
    """KRN-05: mrope is an error, not plain rope in silence."""
    with pytest.raises(ValueError, match=f"'{kind}' is not supported; known are default, linear"):
        rope_inv_freq(kind, 10000.0, 64)


@pytest.mark.parametrize("kind", ["dynamic", "llama3", "yarn", "longrope"])
def test_the_original_length_must_be_given(kind: str) -> None:
    with pytest.raises(ValueError, match=f"'{kind}' needs original_max_position_embeddings, found 0"):
        rope_inv_freq(kind, 10000.0, 64, 2.0)


@pytest.mark.parametrize("head_dim", [0, 5])
def test_what_rotates_comes_in_pairs(head_dim: int) -> None:
    with pytest.raises(ValueError, match=f"{head_dim} elements of a head cannot rotate in pairs"):
        rope_inv_freq("default", 10000.0, head_dim)


def test_cos_sin_holds_cosines_first() -> None:
    table = rope_cos_sin(np.array([math.pi / 2, math.pi]), np.array([0, 1, 2]))
    np.testing.assert_allclose(table, [[1, 1, 0, 0], [0, -1, 1, 0], [-1, 1, 0, 0]], atol=1e-15)


def test_a_unit_vector_turns_in_its_plane() -> None:
    cos_sin = rope_cos_sin(np.array([1.0]), np.array([0, 3]))
    unit_vectors = np.broadcast_to(np.eye(2), (2, 2, 2))  # two tokens, two heads
    c, s = math.cos(3), math.sin(3)
    np.testing.assert_allclose(rope(unit_vectors, cos_sin), [[[1, 0], [0, 1]], [[c, s], [-s, c]]], rtol=1e-15)


def test_pairs_are_half_a_head_apart_and_the_rest_passes() -> None:
    """Partial rotary: 4 of 5 elements rotate."""
    x = np.array([[[1.0, 2, 3, 4, 9]]])
    quarter_turn = rope_cos_sin(np.array([math.pi / 2, 0]), np.array([1]))
    np.testing.assert_allclose(rope(x, quarter_turn), [[[-3, 2, 1, 4, 9]]], atol=1e-15)


def test_interleaved_pairs_are_neighbours_and_the_rest_passes() -> None:
    """KRN-04: the other pairing; (1, 2) turns by 90°, (3, 4) does not."""
    x = np.array([[[1.0, 2, 3, 4, 9]]])
    quarter_turn = rope_cos_sin(np.array([math.pi / 2, 0]), np.array([1]))
    np.testing.assert_allclose(rope(x, quarter_turn, interleaved=True), [[[-2, 1, 3, 4, 9]]], atol=1e-15)
    assert x.tolist() == [[[1, 2, 3, 4, 9]]]


def test_interleaved_is_half_split_of_rows_in_another_order() -> None:
    x = np.random.default_rng(2).standard_normal((5, 3, 10))
    order = np.r_[0:8:2, 1:8:2, 8:10]  # evens, odds, and what does not rotate
    cos_sin = rope_cos_sin(rope_inv_freq("default", 100.0, 8), np.arange(5))
    np.testing.assert_array_equal(rope(x, cos_sin, interleaved=True)[..., order], rope(x[..., order], cos_sin))


@given(st.integers(0, 500), st.integers(0, 500), st.integers(0, 500), st.booleans())
def test_scores_depend_on_distance_alone(p: int, s: int, shift: int, interleaved: bool) -> None:
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 1, 1, 8))
    inv_freq = rope_inv_freq("default", 10000.0, 8)

    def score(q_position: int, k_position: int) -> float:
        turned_q = rope(q, rope_cos_sin(inv_freq, np.array([q_position])), interleaved=interleaved)
        turned_k = rope(k, rope_cos_sin(inv_freq, np.array([k_position])), interleaved=interleaved)
        return float(np.sum(turned_q * turned_k))

    # the angles, up to 1000, are off by 1000 · 2^-53 each; |q| · |k| is below 20
    assert score(p, s) == pytest.approx(score(p + shift, s + shift), abs=20 * 8 * 1000 * 2**-53)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_kv_write_rotates_keys_not_values_and_skips_padding(interleaved: bool) -> None:
    rng = np.random.default_rng(1)
    q, k, v = rng.standard_normal((3, 2, 4)), rng.standard_normal((3, 1, 4)), rng.standard_normal((3, 1, 4))
    cos_sin = rope_cos_sin(rope_inv_freq("default", 100.0, 4), np.array([7, 8, 0]))
    k_cache, v_cache = np.full((2, 2, 2, 1, 4), np.nan)
    out = rope_kv_write(q, k, v, cos_sin, np.array([3, 0, -1]), k_cache, v_cache, interleaved=interleaved)
    np.testing.assert_array_equal(out, rope(q, cos_sin, interleaved=interleaved))
    np.testing.assert_array_equal(k_cache[1, 1], rope(k, cos_sin, interleaved=interleaved)[0])
    np.testing.assert_array_equal(k_cache[0, 0], rope(k, cos_sin, interleaved=interleaved)[1])
    np.testing.assert_array_equal(v_cache[1, 1], v[0])
    assert np.isnan(k_cache[0, 1]).all()
    assert np.isnan(v_cache[1, 0]).all()


def test_qk_norm_rope_kv_write_norms_each_head_before_it_turns() -> None:
    """k = (3, 4) has root mean square sqrt(12.5); by weights (1, 2) and a quarter turn it becomes (−8, 3) / that."""
    q, k, v = np.array([[[2.0, 2.0], [0, 5.0]]]), np.array([[[3.0, 4.0]]]), np.array([[[7.0, 9.0]]])
    k_cache, v_cache = np.zeros((2, 1, 1, 1, 2))
    cos_sin = rope_cos_sin(np.array([math.pi / 2]), np.array([1]))
    args = (q, k, v, np.array([1.0, 3.0]), np.array([1.0, 2.0]), 0.0, cos_sin, np.array([0]))
    out = qk_norm_rope_kv_write(*args, k_cache, v_cache)
    np.testing.assert_allclose(k_cache.ravel(), np.array([-8, 3]) / math.sqrt(12.5), atol=1e-15)
    np.testing.assert_allclose(out, [[[-3, 1], [-3 * math.sqrt(2), 0]]], atol=1e-15)
    assert v_cache.ravel().tolist() == [7, 9]
    rounded = qk_norm_rope_kv_write(*args, k_cache, v_cache, storage="bfloat16")
    assert rounded[0, 1, 0] == -4.25  # −4.2426 with 8 bits
    assert k_cache[0, 0, 0, 0] == -2.265625  # −2.26274
    np.testing.assert_array_equal(out, rope(rmsnorm(q, np.array([1.0, 3.0]), 0.0), cos_sin))
