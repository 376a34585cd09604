"""ref.mla and ref.mla_latent: both forms by hand, and equal over pages; queries with and without q_lora (KRN-03)."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ref.kv_cache import kv_cache_slots
from ref.linear import linear
from ref.mla import mla_decode, mla_dense, mla_prefill, mla_sm_scale, mla_split_kv_b
from ref.mla_latent import latent_cache_write, mla_latent, mla_query, mla_rope, mla_rope_latent_write
from ref.rmsnorm import rmsnorm
from ref.rope import rope, rope_cos_sin, rope_inv_freq

Array = np.ndarray
N_HEADS, NOPE, ROPE, V_DIM, RANK = 3, 6, 4, 5, 8


def paged(latents: list[Array], block_size: int, seed: int) -> tuple[Array, Array]:
    """Latents in shuffled blocks, NaN wherever no sequence owns the slot, and the block table."""
    counts = [-(-len(x) // block_size) for x in latents]
    order = np.random.default_rng(seed).permutation(sum(counts) + 2)
    cache = np.full((len(order), block_size, latents[0].shape[1]), np.nan)
    block_table = np.full((len(latents), max(counts) + 1), -1)
    for s, count in enumerate(counts):
        block_table[s, :count], order = order[:count], order[count:]
        slots = kv_cache_slots(block_table[s], np.arange(len(latents[s])), block_size)
        latent_cache_write(latents[s], slots, cache)
    return cache, block_table


@pytest.mark.parametrize(
    ("mscale_all_dim", "expected"),
    [
        (0.707, (1 + 0.0707 * math.log(40)) ** 2),
        (1.0, (1 + 0.1 * math.log(40)) ** 2),
        (0.0, 1.0),  # mscale alone, or neither, leaves the scores
    ],
)
def test_sm_scale_of_deepseek(mscale_all_dim: float, expected: float) -> None:
    """KRN-03: m(mscale_all_dim)² / √192."""
    assert mla_sm_scale(192, 40.0, mscale_all_dim) == pytest.approx(expected / math.sqrt(192), rel=1e-15)
    assert mla_sm_scale(64) == 0.125


def test_both_forms_by_hand() -> None:
    """One head, rank 1, one nope and two rope elements: kv_b = (2, 10) makes key 2c and value 10c.

    Latents c = 0 and ½ ln 3, r = 0: scores of q_nope = 1 are 0 and ln 3, weights 1/4 and 3/4, values 0 and 5 ln 3.
    """
    latent = np.array([[0, 0, 0], [math.log(3) / 2, 0, 0]])
    q, kv_b = np.array([[[1.0, 9.0, 9.0]]]), np.array([[2.0], [10.0]])
    expected = 3.75 * math.log(3)
    np.testing.assert_allclose(mla_dense(q, latent, kv_b, 1.0).item(), expected, rtol=1e-15)
    out = mla_decode(q, latent[None], kv_b, np.array([[0]]), np.array([2]), 1.0)
    np.testing.assert_allclose(out.item(), expected, rtol=1e-15)


def test_the_rope_part_is_one_key_for_all_heads() -> None:
    """kv_b is 0 for keys and 1 for values, so r alone decides: query (1, 0) has score ln 3 there, (0, 1) has 0."""
    latent = np.array([[4.0, 0, 0], [8.0, math.log(3), 0]])
    q, kv_b = np.array([[[7.0, 1, 0], [7.0, 0, 1]]]), np.array([[0.0], [1], [0], [1]])
    np.testing.assert_allclose(mla_dense(q, latent, kv_b, 1.0).ravel(), [7, 6], rtol=1e-15)
    out = mla_decode(q, latent[None], kv_b, np.array([[0]]), np.array([2]), 1.0)
    np.testing.assert_allclose(out.ravel(), [7, 6], rtol=1e-15)


def test_kv_b_proj_holds_keys_then_values_head_by_head() -> None:
    w_uk, w_uv = mla_split_kv_b(np.arange(8.0).reshape(8, 1), 2, 3)
    assert w_uk[..., 0].tolist() == [[0, 1, 2], [4, 5, 6]]
    assert w_uv[..., 0].tolist() == [[3], [7]]


@settings(deadline=None, max_examples=30)
@given(
    lens=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 9)), min_size=1, max_size=4),
    block_size=st.integers(1, 5),
    num_splits=st.integers(1, 4),
    q_lora=st.booleans(),
    interleaved=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_absorbed_is_expanded(
    lens: list[tuple[int, int]], block_size: int, num_splits: int, q_lora: bool, interleaved: bool, seed: int
) -> None:
    """From hidden states to heads: paged prefill, paged decode of each sequence's last token and dense agree.

    Sums of at most 14 terms of size ~1, and softmax weights that turn an error of scores into one as large: 1e-12 is
    above 4000 units of 2^-52.
    """
    rng = np.random.default_rng(seed)
    hidden_size, q_rank = 12, 7
    q_a, q_norm = rng.standard_normal((q_rank, hidden_size)), rng.standard_normal(q_rank)
    q_proj = rng.standard_normal((N_HEADS * (NOPE + ROPE), q_rank if q_lora else hidden_size)) / 3
    lora = {"q_a_proj": q_a, "q_a_layernorm": q_norm} if q_lora else {}
    kv_a_proj, kv_norm = rng.standard_normal((RANK + ROPE, hidden_size)) / 3, rng.standard_normal(RANK)
    kv_b = rng.standard_normal((N_HEADS * (NOPE + V_DIM), RANK)) / 3
    inv_freq, scale = rope_inv_freq("default", 100.0, ROPE), mla_sm_scale(NOPE + ROPE, 40.0, 0.707)

    q, latents, dense = [], [], []
    for new, old in lens:
        hidden = rng.standard_normal((new + old, hidden_size))
        cos_sin = rope_cos_sin(inv_freq, np.arange(new + old))
        kv_a = linear(hidden, kv_a_proj)
        latents.append(mla_latent(kv_a, kv_norm, 1e-6, cos_sin, interleaved=interleaved))
        q.append(mla_query(hidden, q_proj, N_HEADS, cos_sin, **lora, interleaved=interleaved)[old:])
        dense.append(mla_dense(q[-1], latents[-1], kv_b, scale))
    cache, block_table = paged(latents, block_size, seed)
    seq_lens, cu_seqlens_q = np.array([sum(x) for x in lens]), np.cumsum([0] + [new for new, _ in lens])
    prefilled = mla_prefill(np.concatenate(q), cache, kv_b, block_table, cu_seqlens_q, seq_lens, scale)
    np.testing.assert_array_equal(prefilled, np.concatenate(dense))
    last = np.stack([x[-1] for x in q])
    decoded = mla_decode(last, cache, kv_b, block_table, seq_lens, scale, num_splits=num_splits)
    assert decoded.shape == (len(lens), N_HEADS, V_DIM)
    np.testing.assert_allclose(decoded, prefilled[cu_seqlens_q[1:] - 1], rtol=0, atol=1e-12)


def test_query_with_and_without_its_own_short_vector() -> None:
    rng = np.random.default_rng(0)
    hidden, cos_sin = rng.standard_normal((2, 5)), rope_cos_sin(np.array([1.0]), np.array([0, 3]))
    q_a, norm, q_b = rng.standard_normal((3, 5)), rng.standard_normal(3), rng.standard_normal((2 * 4, 3))
    through = mla_query(hidden, q_b, 2, cos_sin, q_a_proj=q_a, q_a_layernorm=norm, eps=0.5)
    by_hand = (rmsnorm(hidden @ q_a.T, norm, 0.5) @ q_b.T).reshape(2, 2, 4)
    np.testing.assert_array_equal(through, mla_rope(by_hand, cos_sin))
    direct = mla_query(hidden, q_b @ q_a, 2, cos_sin)
    np.testing.assert_allclose(direct[0], (hidden @ q_a.T @ q_b.T).reshape(2, 2, 4)[0], rtol=1e-12)
    np.testing.assert_array_equal(through[..., :2], by_hand[..., :2])
    np.testing.assert_array_equal(through[..., 2:], rope(by_hand[..., 2:], cos_sin, interleaved=True))


def test_latent_norms_what_is_not_rotated_and_turns_the_rest() -> None:
    """(3, 4) has root mean square sqrt(12.5); (5, 6) turns a quarter."""
    quarter_turn = rope_cos_sin(np.array([math.pi / 2]), np.array([1]))
    latent = mla_latent(np.array([[3.0, 4, 5, 6]]), np.array([1.0, 2]), 0.0, quarter_turn)
    np.testing.assert_allclose(latent, [[3 / math.sqrt(12.5), 8 / math.sqrt(12.5), -6, 5]], atol=1e-14)


def test_the_cache_skips_padding_and_refuses_slots_outside() -> None:
    cache = np.full((2, 2, 1), np.nan)
    latent_cache_write(np.array([[1.0], [2.0], [3.0]]), np.array([3, -1, 0]), cache)
    np.testing.assert_array_equal(cache.ravel(), [3, np.nan, np.nan, 1])
    with pytest.raises(IndexError, match="slot 4 of token 0 is outside a cache of 4 slots"):
        latent_cache_write(np.zeros((1, 1)), np.array([4]), cache)


def test_rope_latent_write_is_its_three_steps() -> None:
    rng = np.random.default_rng(1)
    q, kv_a = rng.standard_normal((2, 2, 5)), rng.standard_normal((2, 3 + 2))
    cos_sin = rope_cos_sin(np.array([1.0]), np.array([2, 3]))
    cache = np.zeros((1, 2, 5))
    out = mla_rope_latent_write(q, kv_a, np.ones(3), 1e-6, cos_sin, np.array([1, 0]), cache)
    np.testing.assert_array_equal(out, mla_rope(q, cos_sin))
    np.testing.assert_array_equal(cache[0, ::-1], mla_latent(kv_a, np.ones(3), 1e-6, cos_sin))


def test_storage_rounds_what_a_kernel_would_store() -> None:
    """Value 1 + 2^-8 is no bfloat16: expanded it is stored as 1, absorbed the sum of latents is exact, and times it."""
    q, kv_b = np.zeros((1, 1, 3)), np.array([[1.0], [1 + 2.0**-8]])
    latent = np.array([[1.0, 0, 0]])
    assert mla_dense(q, latent, kv_b, 1.0, storage="bfloat16").item() == 1
    args = (latent[None], kv_b, np.array([[0]]), np.array([1]), 1.0)
    assert mla_decode(q, *args, storage="bfloat16").item() == 1 + 2.0**-8


def test_a_sequence_without_keys_and_padding_rows_are_zero() -> None:
    cache, kv_b = np.full((1, 2, 3), np.nan), np.ones((2, 1))
    q = np.ones((1, 1, 3))
    assert mla_decode(q, cache, kv_b, np.array([[0]]), np.array([0]), 1.0).tolist() == [[[0]]]
    assert mla_prefill(q, cache, kv_b, np.array([[0]]), np.array([0, 0]), np.array([0]), 1.0).tolist() == [[[0]]]
