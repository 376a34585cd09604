"""ref.kv_cache: where a token lands, and that nothing else is touched."""

import numpy as np
import pytest

from ref.kv_cache import kv_cache_copy, kv_cache_gather, kv_cache_slots, kv_cache_swap, kv_cache_write


def empty_caches(num_blocks: int, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    shape = (num_blocks, block_size, 1, 2)
    return np.full(shape, np.nan), np.full(shape, np.nan)


def test_slots_by_hand() -> None:
    """Blocks 5 and 2 of 4 tokens: position 3 is the last of block 5, position 4 the first of block 2."""
    assert kv_cache_slots(np.array([5, 2]), np.array([0, 3, 4, 7]), 4).tolist() == [20, 23, 8, 11]


def test_write_and_gather() -> None:
    k_cache, v_cache = empty_caches(3, 2)
    k = np.arange(6.0).reshape(3, 1, 2)
    kv_cache_write(k, -k, kv_cache_slots(np.array([2, 0]), np.arange(3), 2), k_cache, v_cache)
    assert k_cache[2, 1].tolist() == [[2, 3]]
    assert v_cache[0, 0].tolist() == [[-4, -5]]
    np.testing.assert_array_equal(kv_cache_gather(k_cache, np.array([2, 0]), 3), k)
    assert np.isnan(k_cache[1]).all()
    assert np.isnan(k_cache[0, 1]).all()


def test_gather_reads_no_table_entry_past_the_length() -> None:
    cache = np.arange(4.0).reshape(2, 2, 1, 1)
    assert kv_cache_gather(cache, np.array([1, -1, 99]), 2).ravel().tolist() == [2, 3]
    assert kv_cache_gather(cache, np.array([99]), 0).shape == (0, 1, 1)


def test_padding_is_not_written() -> None:
    k_cache, v_cache = empty_caches(1, 2)
    kv_cache_write(np.ones((2, 1, 2)), np.ones((2, 1, 2)), np.array([-1, 0]), k_cache, v_cache)
    assert k_cache[0, 0].tolist() == [[1, 1]]
    assert np.isnan(k_cache[0, 1]).all()


@pytest.mark.parametrize("slot", [-2, 4])
def test_a_slot_outside_the_cache_is_refused(slot: int) -> None:
    k_cache, v_cache = empty_caches(2, 2)
    with pytest.raises(IndexError, match=f"slot {slot} of token 0 is outside a cache of 4 slots"):
        kv_cache_write(np.ones((1, 1, 2)), np.ones((1, 1, 2)), np.array([slot]), k_cache, v_cache)


def test_copy_reads_before_it_writes() -> None:
    k_cache = np.arange(3.0)[:, None, None, None] * np.ones((3, 2, 1, 2))
    v_cache = -k_cache
    kv_cache_copy(k_cache, v_cache, np.array([0, 1]), np.array([1, 0]))
    assert k_cache[:, 0, 0, 0].tolist() == [1, 0, 2]
    assert v_cache[:, 1, 0, 1].tolist() == [-1, 0, -2]


def test_swap_out_and_back_in() -> None:
    """Blocks 2 and 0 to places 1 and 0 of a smaller cache, and from there to blocks 0 and 1."""
    k_cache, v_cache = np.arange(12.0).reshape(3, 2, 1, 2), -np.arange(12.0).reshape(3, 2, 1, 2)
    before = k_cache.copy()
    k_host, v_host = empty_caches(2, 2)
    kv_cache_swap(k_cache, v_cache, k_host, v_host, np.array([2, 0]), np.array([1, 0]))
    assert (k_cache == before).all()
    assert (k_host == before[[0, 2]]).all()
    assert (v_host == -before[[0, 2]]).all()
    kv_cache_swap(k_host, v_host, k_cache, v_cache, np.array([1, 0]), np.array([0, 1]))
    assert (k_cache == before[[2, 0, 2]]).all()
    assert (v_cache == -before[[2, 0, 2]]).all()


@pytest.mark.parametrize(
    ("src", "dst", "outside"),
    [(3, 0, "3 is outside a cache of 3"), (0, 2, "2 is outside a cache of 2"), (-1, 0, "-1 is")],
)
def test_a_block_that_is_not_there_is_refused(src: int, dst: int, outside: str) -> None:
    caches = (*empty_caches(3, 2), *empty_caches(2, 2))
    with pytest.raises(IndexError, match=f"block {outside}"):
        kv_cache_swap(*caches, np.array([src]), np.array([dst]))
