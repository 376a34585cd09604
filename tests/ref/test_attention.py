"""ref.attention: values by hand, then dense against a mask formula, then paged and split against dense."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ref.attention import (
    attention_combine,
    attention_decode,
    attention_decode_split,
    attention_dense,
    attention_prefill,
    logn_query,
    logn_scale,
)
from ref.kv_cache import kv_cache_slots, kv_cache_write

Array = np.ndarray


def by_mask(q: Array, k: Array, v: Array, sm_scale: float, window: int | None) -> Array:
    """The same as a matrix formula with a mask: a second, independent way."""
    q_len, kv_len, group = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    scores = np.einsum("qhd,khd->hqk", q, np.repeat(k, group, axis=1)) * sm_scale
    query = np.arange(kv_len - q_len, kv_len)[:, None]
    key = np.arange(kv_len)[None, :]
    hidden = key > query
    if window is not None:
        hidden |= key <= query - window
    weights = np.exp(np.where(hidden, -np.inf, scores))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, np.repeat(v, group, axis=1))


def paged(k: list[Array], v: list[Array], block_size: int, seed: int) -> tuple[Array, Array, Array]:
    """Caches with the sequences in shuffled blocks, NaN wherever no sequence owns the slot, and the block table."""
    num_blocks = [-(-len(x) // block_size) for x in k]
    order = np.random.default_rng(seed).permutation(sum(num_blocks) + 3)
    block_table = np.full((len(k), max(num_blocks, default=0) + 1), -1)
    k_cache, v_cache = np.full((2, len(order), block_size, *k[0].shape[1:]), np.nan)
    for s, wanted in enumerate(num_blocks):
        block_table[s, :wanted], order = order[:wanted], order[wanted:]
        slots = kv_cache_slots(block_table[s], np.arange(len(k[s])), block_size)
        kv_cache_write(k[s], v[s], slots, k_cache, v_cache)
    return k_cache, v_cache, block_table


def test_two_by_two_by_hand() -> None:
    """Keys 0 and ln 3, queries 1: the first sees itself alone, the second weighs 1 : 3."""
    k = np.array([0, math.log(3)]).reshape(2, 1, 1)
    v = np.array([1.0, 5.0]).reshape(2, 1, 1)
    out = attention_dense(np.ones((2, 1, 1)), k, v, 1.0)
    np.testing.assert_allclose(out.ravel(), [1, 4], rtol=1e-15)


def test_sm_scale_multiplies_the_scores() -> None:
    k = np.array([0, 2 * math.log(3)]).reshape(2, 1, 1)
    out = attention_dense(np.ones((1, 1, 1)), k, np.array([1.0, 5.0]).reshape(2, 1, 1), 0.5)
    np.testing.assert_allclose(out.ravel(), [4], rtol=1e-15)


def test_one_hot_keys_pick_their_value() -> None:
    k = np.eye(4)[:, None, :]
    v = np.array([10.0, 20, 30, 40]).reshape(4, 1, 1) * np.ones(4)
    out = attention_dense(1000 * np.eye(4)[[1, 3, 0, 2]][:, None, :], k, v, 1.0)
    # query 0 may see only key 0, query 1 only 0 and 1: what it looks for (key 3) is not there, so both weigh the same
    assert out[:, 0, 0].tolist() == [10, 15, 10, 30]


def test_grouped_heads_read_their_own_kv_head() -> None:
    v = np.array([[[1.0], [2.0]]])  # one key, two KV heads
    out = attention_dense(np.ones((1, 4, 1)), np.ones((1, 2, 1)), v, 1.0)
    assert out.ravel().tolist() == [1, 1, 2, 2]


@pytest.mark.parametrize(("kv_len", "expected"), [(2, 0.5), (3, 1.0), (4, 2.0), (5, 3.0)])
def test_window_edges(kv_len: int, expected: float) -> None:
    """Window 3, values 0, 1, 2, …, equal weights: with 2 and 3 keys all count, with 4 the oldest is out."""
    v = np.arange(float(kv_len)).reshape(-1, 1, 1)
    out = attention_dense(np.zeros((1, 1, 1)), np.zeros((kv_len, 1, 1)), v, 1.0, window=3)
    assert out.item() == pytest.approx(expected, rel=1e-15)


def test_probabilities_are_rounded_to_the_storage_type() -> None:
    v = np.array([1.0, 0, 0]).reshape(3, 1, 1)
    out = attention_dense(np.zeros((1, 1, 1)), np.zeros((3, 1, 1)), v, 1.0, storage="bfloat16")
    assert out.item() == 0.333984375  # 1/3 with 8 bits


@settings(deadline=None, max_examples=40)
@given(
    q_len=st.integers(1, 9),
    num_cached=st.integers(0, 9),
    window=st.none() | st.integers(1, 12),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1)]),
    seed=st.integers(0, 1000),
)
def test_dense_is_the_mask_formula(
    q_len: int, num_cached: int, window: int | None, heads: tuple[int, int], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((q_len, heads[0], 8))
    k, v = rng.standard_normal((2, q_len + num_cached, heads[1], 8))
    # 18 keys and 8 dimensions of size 1: rounding stays below 100 units of 2^-53
    expected = by_mask(q, k, v, 8**-0.5, window)
    np.testing.assert_allclose(attention_dense(q, k, v, 8**-0.5, window), expected, rtol=0, atol=100 * 2**-53)


@settings(deadline=None, max_examples=30)
@given(
    lens=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9)), min_size=1, max_size=4),
    block_size=st.integers(1, 5),
    window=st.none() | st.integers(1, 8),
    seed=st.integers(0, 1000),
)
def test_paged_prefill_is_dense(lens: list[tuple[int, int]], block_size: int, window: int | None, seed: int) -> None:
    """Any mix of lengths, shuffled blocks, NaN in all slots that nobody owns: bitwise the dense answer."""
    rng = np.random.default_rng(seed)
    q = [rng.standard_normal((new, 4, 8)) for new, _ in lens]
    k = [rng.standard_normal((new + old, 2, 8)) for new, old in lens]
    v = [rng.standard_normal((new + old, 2, 8)) for new, old in lens]
    k_cache, v_cache, block_table = paged(k, v, block_size, seed)
    cu_seqlens_q = np.cumsum([0] + [new for new, _ in lens])
    seq_lens = np.array([new + old for new, old in lens])
    out = attention_prefill(np.concatenate(q), k_cache, v_cache, block_table, cu_seqlens_q, seq_lens, 8**-0.5, window)
    expected = [attention_dense(q[s], k[s], v[s], 8**-0.5, window) for s in range(len(lens))]
    np.testing.assert_array_equal(out, np.concatenate(expected))


def test_rows_past_the_last_sequence_are_zero() -> None:
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 3, 1, 4))
    k_cache, v_cache, block_table = paged([k], [v], 2, 0)
    q = rng.standard_normal((5, 1, 4))
    out = attention_prefill(q, k_cache, v_cache, block_table, np.array([0, 3]), np.array([3]), 0.5)
    assert out[:3].all()
    assert not out[3:].any()


@settings(deadline=None, max_examples=30)
@given(
    seq_lens=st.lists(st.integers(0, 14), min_size=1, max_size=4),
    block_size=st.integers(1, 5),
    num_splits=st.integers(1, 6),
    window=st.none() | st.integers(1, 8),
)
def test_split_decode_is_dense(seq_lens: list[int], block_size: int, num_splits: int, window: int | None) -> None:
    rng = np.random.default_rng(len(seq_lens))
    q = rng.standard_normal((len(seq_lens), 4, 8))
    k = [rng.standard_normal((n, 2, 8)) for n in seq_lens]
    v = [rng.standard_normal((n, 2, 8)) for n in seq_lens]
    k_cache, v_cache, block_table = paged(k, v, block_size, 0)
    out = attention_decode(q, k_cache, v_cache, block_table, np.array(seq_lens), 8**-0.5, window, num_splits=num_splits)
    for s, seq_len in enumerate(seq_lens):
        if seq_len == 0:
            assert not out[s].any()
        else:
            expected = by_mask(q[s : s + 1], k[s], v[s], 8**-0.5, window)[0]
            np.testing.assert_allclose(out[s], expected, rtol=0, atol=100 * 2**-53)


def test_splits_are_whole_blocks_and_know_their_lse() -> None:
    """5 keys of score ln 1 … ln 5 in blocks of 2, 2 splits: keys 0–3 and key 4."""
    k = np.log(np.arange(1.0, 6.0)).reshape(5, 1, 1)
    v = np.array([0, 0, 0, 0, 1.0]).reshape(5, 1, 1)
    k_cache, v_cache, block_table = paged([k], [v], 2, 3)
    args = (np.ones((1, 1, 1)), k_cache, v_cache, block_table, np.array([5]), 1.0)
    partial_out, partial_lse = attention_decode_split(*args, num_splits=2)
    np.testing.assert_allclose(partial_out.ravel(), [0, 1], rtol=1e-15)
    np.testing.assert_allclose(partial_lse.ravel(), np.log([10, 5]), rtol=1e-15)
    np.testing.assert_allclose(attention_decode(*args, num_splits=2).item(), 1 / 3, rtol=1e-15)


def test_combine_by_hand() -> None:
    partial_out = np.array([1.0, 5.0, 7.0]).reshape(3, 1, 1, 1)
    partial_lse = np.array([0, math.log(3), -np.inf]).reshape(3, 1, 1)
    out, lse = attention_combine(partial_out, partial_lse)
    np.testing.assert_allclose([out.item(), lse.item()], [4, math.log(4)], rtol=1e-15)


def test_combine_of_nothing_is_zero() -> None:
    out, lse = attention_combine(np.zeros((2, 1, 1, 3)), np.full((2, 1, 1), -np.inf))
    assert not out.any()
    assert lse.item() == -math.inf


def test_values_may_have_a_width_of_their_own() -> None:
    """Keys of width 1 and scores 0 and ln 3, values of width 2: weights 1/4 and 3/4, dense and paged."""
    k = np.array([0, math.log(3)]).reshape(2, 1, 1)
    v = np.array([[[0.0, 8.0]], [[4.0, 0.0]]])
    args = (np.array([[0, 1]]), np.array([0, 1]), np.array([2]), 1.0)
    out = [
        attention_dense(np.ones((1, 1, 1)), k, v, 1.0),
        attention_prefill(np.ones((1, 1, 1)), k[:, None], v[:, None], *args),
        attention_decode(np.ones((1, 1, 1)), k[:, None], v[:, None], args[0], args[2], 1.0, num_splits=2),
    ]
    np.testing.assert_allclose(out, [[[[3, 2]]]] * 3, rtol=1e-15)


def test_logn_scale_by_hand() -> None:
    """Length 4: the query at 3 is the fourth and the last that stays; that at 15 sees 16 = 4² keys."""
    np.testing.assert_allclose(logn_scale(np.array([0, 3, 7, 15]), 4), [1, 1, 1.5, 2], rtol=1e-15)


def test_queries_grow_with_their_position() -> None:
    q = np.ones((3, 2, 4), np.float32)
    out = logn_query(q, np.array([15, 0, 7]), 4)
    assert out.dtype == np.float32
    np.testing.assert_allclose(out, q * np.array([2, 1, 1.5])[:, None, None], rtol=2**-23)
