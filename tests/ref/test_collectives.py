"""ref.collectives: values by hand, the order of sums, ragged slices, and what must hold between them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ref.collectives import (
    all_gather,
    all_reduce,
    all_reduce_bytes,
    all_to_all,
    broadcast,
    reduce_scatter,
    split_ranges,
    split_sizes,
)

Array = np.ndarray
WORLD_SIZES = (1, 2, 3, 4, 5, 6, 7, 8)


def shards(world_size: int, *shape: int, seed: int = 0, dtype: str = "float32") -> list[Array]:
    return list(np.random.default_rng(seed).standard_normal((world_size, *shape)).astype(dtype))


def test_split_by_hand() -> None:
    assert split_sizes(10, 3) == [4, 3, 3]
    assert split_sizes(896, 4, unit=128) == [256, 256, 256, 128]
    assert split_sizes(576, 2, unit=128) == [384, 192]  # 4.5 blocks: the half one is the last
    assert split_sizes(2, 4) == [1, 1, 0, 0]
    assert split_ranges(5, 2) == [range(0, 3), range(3, 5)]


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 500), st.integers(1, 9), st.integers(1, 40))
def test_a_split_is_whole_fair_and_on_units(total: int, world_size: int, unit: int) -> None:
    ranges = split_ranges(total, world_size, unit)
    assert [entry for part in ranges for entry in part] == list(range(total))
    assert all(part.stop % unit == 0 or part.stop == total for part in ranges)
    num_units = [-(-len(part) // unit) for part in ranges]
    assert max(num_units) - min(num_units) <= 1


@pytest.mark.parametrize(("total", "world_size", "unit"), [(4, 0, 1), (4, 2, 0), (-1, 2, 1)])
def test_a_split_that_makes_no_sense(total: int, world_size: int, unit: int) -> None:
    with pytest.raises(ValueError, match=f"cannot split {total} entries by {unit} on {world_size} ranks"):
        split_sizes(total, world_size, unit)


def test_sum_by_hand() -> None:
    summed = all_reduce([np.array([1.0, 2.0]), np.array([10.0, 20.0]), np.array([100.0, 200.0])])
    assert [each.tolist() for each in summed] == [[111, 222]] * 3


def test_sums_run_in_rank_order() -> None:
    """2²⁴ + 1 is 2²⁴ in float32, so where the large one stands decides what is left."""
    large, one = np.array([2.0**24], np.float32), np.array([1.0], np.float32)
    assert all_reduce([large, one, -large])[0] == 0
    assert all_reduce([large, -large, one])[0] == 1


def test_one_rounding_at_the_end() -> None:
    """1 + three times 2⁻⁹: each step in bfloat16 would stay at 1; the sum of all is nearest to 1 + 2⁻⁷."""
    small = np.array([2.0**-9], np.float32)
    assert all_reduce([np.array([1.0], np.float32), small, small, small], "bfloat16")[2] == 1 + 2.0**-7
    half = [np.array([1.0], np.float16), *[np.array([2.0**-12], np.float16)] * 3]
    assert all_reduce(half)[0] == np.float16(1 + 2.0**-10)
    assert all_reduce(half)[0].dtype == np.float16


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_two_shots_are_one_all_reduce(world_size: int) -> None:
    """Ragged slices along either axis, some of them empty."""
    parts = shards(world_size, 5, 7)
    whole = all_reduce(parts, "bfloat16")
    for axis in (0, 1):
        sliced = reduce_scatter(parts, axis, storage="bfloat16")
        assert [part.shape[axis] for part in sliced] == split_sizes((5, 7)[axis], world_size)
        for gathered, expected in zip(all_gather(sliced, axis), whole, strict=True):
            np.testing.assert_array_equal(gathered, expected)


def test_slices_of_any_size() -> None:
    parts = [np.arange(6.0), np.ones(6)]
    assert [part.tolist() for part in reduce_scatter(parts, sizes=[1, 5])] == [[1], [2, 3, 4, 5, 6]]
    with pytest.raises(ValueError, match=r"slices of \[1, 4\] do not make up axis 0, which has 6"):
        reduce_scatter(parts, sizes=[1, 4])


def test_results_share_no_memory() -> None:
    one, two = all_reduce(shards(2, 3))
    one[:] = 0
    assert two.all()
    source = shards(2, 3)
    broadcast(source, 1)[0][:] = 7
    assert not (source[1] == 7).any()


def test_all_to_all_by_hand() -> None:
    """The matrix of pieces is transposed: what stood in row s, place d, comes to row d, place s."""
    received = all_to_all([np.array([1, 2, 3]), np.array([4, 5, 6])], counts=[[1, 2], [3, 0]])
    assert [part.tolist() for part in received] == [[1, 4, 5, 6], [2, 3]]


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_there_and_back(world_size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 4, (world_size, world_size))
    sent = [rng.standard_normal((total, 2)) for total in counts.sum(axis=1)]
    received = all_to_all(sent, counts.tolist())
    assert [len(part) for part in received] == counts.sum(axis=0).tolist()
    for back, part in zip(all_to_all(received, counts.T.tolist()), sent, strict=True):
        np.testing.assert_array_equal(back, part)


def test_tokens_go_to_their_experts_and_back() -> None:
    """Expert parallelism in small: each rank holds some tokens and one expert, which multiplies by its own number."""
    factors, world_size = [2.0, 3.0, 5.0], 3
    tokens = [np.array([1.0, 2.0, 3.0, 4.0]), np.array([5.0]), np.array([])]
    experts = [np.array([2, 0, 2, 1]), np.array([0]), np.array([], int)]
    order = [np.argsort(chosen, kind="stable") for chosen in experts]
    counts = [np.bincount(chosen, minlength=world_size).tolist() for chosen in experts]
    arrived = all_to_all([part[by] for part, by in zip(tokens, order, strict=True)], counts)
    worked = [part * factor for part, factor in zip(arrived, factors, strict=True)]
    returned = all_to_all(worked, np.transpose(counts).tolist())
    for rank in range(world_size):
        out = np.empty_like(tokens[rank])
        out[order[rank]] = returned[rank]
        np.testing.assert_array_equal(out, tokens[rank] * np.array(factors)[experts[rank]])


def test_even_all_to_all_twice_changes_nothing() -> None:
    parts = shards(3, 9, 2)
    for back, part in zip(all_to_all(all_to_all(parts)), parts, strict=True):
        np.testing.assert_array_equal(back, part)


def test_broadcast() -> None:
    assert [part.tolist() for part in broadcast([np.array([1]), np.array([2])], root=1)] == [[2], [2]]
    with pytest.raises(ValueError, match="root is 2, but ranks are 0 to 1"):
        broadcast(shards(2, 3), root=2)


def test_ranks_that_disagree() -> None:
    """DST-07: a rank with one row more than its peers is told, not waited for."""
    with pytest.raises(ValueError, match=r"rank 1 brings float32 \[4\] where rank 0 brings float32 \[3\]"):
        all_reduce([np.zeros(3, np.float32), np.zeros(4, np.float32)])
    with pytest.raises(ValueError, match="rank 1 brings float64"):
        all_reduce([np.zeros(3, np.float32), np.zeros(3)])
    with pytest.raises(ValueError, match=r"rank 1 brings float64 \[5\]"):
        all_gather([np.zeros((2, 4)), np.zeros((2, 5))])
    with pytest.raises(ValueError, match="no shards"):
        all_reduce([])
    with pytest.raises(ValueError, match="counts has 1 rows for 2 ranks"):
        all_to_all(shards(2, 2), [[1, 1]])


def test_bytes_on_the_wire() -> None:
    """4096 bfloat16 on 4 ranks: 3/4 of 8 KiB there, and as much back."""
    assert all_reduce_bytes(4096, 4) == [12288] * 4
    assert all_reduce_bytes(5, 2, itemsize=4) == [4 * 5, 4 * 5]
    assert all_reduce_bytes(7, 1) == [0]
