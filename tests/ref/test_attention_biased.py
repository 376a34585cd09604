"""ref.attention_biased: what sees what, and which number is added."""

import numpy as np

from ref.attention_biased import attention_biased, attention_biased_dense, position_bias

TABLE = np.arange(10, dtype=np.float64)[:, None]  # 8 buckets, two crossings, one head: a row's number is its bias


def test_biases_of_two_soft_vectors_and_two_tokens() -> None:
    """Buckets 0 and 1 are the own place and the one before, 5 the one behind (half of 8, and 1); from 2 on wider."""
    bias = position_bias(0, 4, num_soft=2, bias_table=TABLE, max_distance=16)[0]
    expected = [[0, 5, 9, 9], [1, 0, 9, 9], [8, 8, 0, 5], [8, 8, 1, 0]]
    assert bias.tolist() == expected
    assert position_bias(3, 4, num_soft=2, bias_table=TABLE, max_distance=16)[0].tolist() == expected[3:]


def values_seen(q_len: int, num_rows: int, prefix_len: int) -> np.ndarray:
    """1 where the query (row) gives the key (column) weight: values are unit vectors."""
    q, k = np.zeros((q_len, 1, num_rows)), np.zeros((num_rows, 1, num_rows))
    v = np.eye(num_rows)[:, None, :]
    out = attention_biased_dense(q, k, v, prefix_len, 1.0, np.zeros((10, 1)), num_soft=1, max_distance=16)
    return (out[:, 0] > 0).astype(int)


def test_a_prompt_sees_itself_both_ways_and_later_tokens_what_is_before() -> None:
    assert values_seen(4, 4, prefix_len=2).tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    assert values_seen(1, 4, prefix_len=2).tolist() == [[1, 1, 1, 1]]
    assert values_seen(2, 4, prefix_len=2).tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]


def test_weights_by_hand() -> None:
    """Scores 0 and a bias of ln 3 for the key before: weights 3/4 and 1/4."""
    table = np.zeros((10, 1))
    table[1] = np.log(3)
    q, k, v = np.zeros((1, 1, 2)), np.zeros((2, 1, 2)), np.eye(2)[:, None, :]
    out = attention_biased_dense(q, k, v, 0, 1.0, table, num_soft=0, max_distance=16)
    np.testing.assert_allclose(out[0, 0], [0.75, 0.25], rtol=1e-12)


def test_pages_in_any_order_give_the_same() -> None:
    rng = np.random.default_rng(0)
    k, v = rng.normal(size=(2, 5, 2, 4))
    q = rng.normal(size=(3, 2, 4))
    table = rng.normal(size=(10, 2))
    k_cache, v_cache = np.full((2, 4, 2, 2, 4), np.nan)
    blocks = np.array([[3, 1, 0]])
    for place in range(5):
        k_cache[blocks[0, place // 2], place % 2], v_cache[blocks[0, place // 2], place % 2] = k[place], v[place]
    sequences = blocks, np.array([0, 3]), np.array([5]), np.array([2])
    paged = attention_biased(q, k_cache, v_cache, *sequences, 0.5, table, 1, 16)
    np.testing.assert_array_equal(paged, attention_biased_dense(q, k, v, 2, 0.5, table, 1, 16))
