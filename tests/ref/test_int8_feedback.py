"""ref.int8_feedback: values by hand, and that nothing is lost but what float32 rounds away."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ref.int8_all_reduce import GROUP, SMALLEST, from_groups, int8_all_reduce, to_groups
from ref.int8_all_reduce_bound import TRIP, UNIT
from ref.int8_feedback import int8_feedback_all_reduce, nothing_carried
from ref.numerics import relative_error
from tests.ref.test_int8_all_reduce import KINDS, hostile, one_group

Array = np.ndarray


def sums(
    steps: list[list[Array]], rotate: bool = True, storage: str | None = None, owners: bool | None = None
) -> tuple[list[Array], list[Array]]:
    """What rank 0 gets of each sum of a step, and what all carry in the end."""
    carried = [nothing_carried(*steps[0][0].shape) for _ in steps[0]]
    found = []
    for shards in steps:
        out, carried = int8_feedback_all_reduce(shards, carried, rotate=rotate, owners=owners, carried_storage=storage)
        for other in out:
            np.testing.assert_array_equal(other, out[0])
        found.append(out[0])
    return found, carried


def random_steps(seed: int, num_sums: int, world_size: int, shape: tuple[int, int]) -> list[list[Array]]:
    rng = np.random.default_rng(seed)
    return [[rng.standard_normal(shape).astype(np.float32) for _ in range(world_size)] for _ in range(num_sums)]


def test_two_ranks_by_hand() -> None:
    """Rank 0 owns the first group, rank 1 the second; scales are 1. Rank 0 has 0.4 to bring, rank 1 has 0.3.

    First group: rank 1 sends 0 and carries 0.3; rank 0's sum is 0.4, which is 0 when it is sent: it carries 0.4. Second
    time rank 1 has 0.6, sends 1, carries −0.4; rank 0 has 0.8, the sum is 1.8, 2 when it is sent: it carries −0.2.
    Second group: rank 0 carries 0.4, rank 1 the 0.3 of the sum; then rank 0 has 0.8 and sends 1, and the sum is 1.6.
    """
    brought = [np.concatenate(2 * [one_group(*values)], axis=1) for values in ((127, 0.4, 0), (0, 0.3, 127))]
    (out,), carried = sums([brought], rotate=False, owners=True)
    assert out[0, :3].tolist() == out[0, 32:35].tolist() == [127, 0, 127]
    np.testing.assert_allclose(np.array(carried)[:, :, 1], [[0.4, 0.4], [0.3, 0.3]], rtol=1e-6)
    (_, out), carried = sums([brought] * 2, rotate=False, owners=True)
    assert out[0, :3].tolist() == out[0, 32:35].tolist() == [127, 2, 127]
    np.testing.assert_allclose(np.array(carried)[:, :, 1], [[-0.2, -0.2], [-0.4, -0.4]], rtol=1e-6)


def test_two_ranks_without_owners_by_hand() -> None:
    """Both send 0 of what they have first, 0.4 and 0.3; then, with what they carry, 1 of 0.8 and 1 of 0.6."""
    brought = [one_group(127, 0.4), one_group(127, 0.3)]
    (first, second), carried = sums([brought] * 2, rotate=False)
    assert [out[0, 1] for out in (first, second)] == [0, 2]
    np.testing.assert_allclose(np.array(carried)[:, 0, 1], [-0.2, -0.4], rtol=1e-6)


def test_the_first_sum_is_as_without() -> None:
    """Nothing is carried into it; what is carried from it is not changed by the next."""
    (shards,) = random_steps(0, 1, 3, (4, 100))
    for rotate in (False, True):
        (out,), carried = sums([shards], rotate)
        np.testing.assert_array_equal(out, int8_all_reduce(shards, rotate=rotate)[0])
        kept = [owed.copy() for owed in carried]
        int8_feedback_all_reduce(shards, carried, rotate=rotate)
        np.testing.assert_array_equal(carried, kept)


@settings(deadline=None, max_examples=100)
@given(
    st.integers(2, 6),
    st.integers(1, 4),
    st.sampled_from([1, 32, 33, 100, 320]),
    st.lists(st.sampled_from(KINDS), min_size=6, max_size=6),
    st.integers(0, 2**32 - 1),
    st.booleans(),
    st.booleans(),
)
def test_nothing_is_lost(
    world_size: int, num_sums: int, hidden_size: int, kinds: list[str], seed: int, rotate: bool, owners: bool
) -> None:
    """Sums and what is carried at the end are the shards, up to the roundings of float32.

    What an element meets in a sum, with S = Σ |y| over ranks: the rotation there, 8 u ‖x‖₁/√32 (int8_all_reduce_bound);
    y, what is left out of it and of the sum, n additions, each at most u S; the rotation back, 8 u √32 S.
    """
    rng = np.random.default_rng(seed)
    steps = [[hostile(kinds[rank], rng, (2, hidden_size)) for rank in range(world_size)] for _ in range(num_sums)]
    out, carried = sums(steps, rotate, owners=owners)
    missing = sum(from_groups(owed, 2, hidden_size, rotate).astype(np.float64) for owed in carried)
    exact = np.sum(steps, axis=(0, 1), dtype=np.float64)
    groups = np.array([[to_groups(shard, rotate) for shard in shards] for shards in steps], np.float64)
    taken = np.array([[to_groups(shard, False) for shard in shards] for shards in steps], np.float64)
    sizes = np.max(np.abs(groups), axis=3).sum(axis=1)  # [num_sums, num_groups], of y, over ranks
    for k in range(1, num_sums):  # carried: 1/252 of each share, 1/252 of their sum; or all of what is too small
        sizes[k] += 2.02 * TRIP * sizes[k - 1] + (world_size + 1) * SMALLEST
    size = sizes.sum(axis=0)
    bound = (world_size + 3) * UNIT * size
    if rotate:
        there = 8 * UNIT * np.abs(taken).sum(axis=(0, 1, 3)) / math.sqrt(GROUP)
        bound = math.sqrt(GROUP) * (bound + there + 8 * UNIT * size * (1 + TRIP))
    bound = np.repeat(bound, GROUP).reshape(2, -1)[:, :hidden_size]
    assert (np.abs(np.sum(out, axis=0, dtype=np.float64) + missing - exact) <= bound).all()


@pytest.mark.parametrize("rotate", [False, True])
def test_what_is_carried_is_the_error_of_one_trip(rotate: bool) -> None:
    """At most 1/252 of a group's largest, on every rank, after any number of sums of the same numbers."""
    (shards,) = random_steps(1, 1, 3, (2, 96))
    _, carried = sums([shards] * 20, rotate)
    largest = max(float(np.abs(to_groups(shard, rotate)).max()) for shard in shards)
    for owed in carried:
        assert 0 < np.abs(owed).max() < 3 * largest * TRIP * 1.02


def test_errors_of_many_sums_do_not_add_up() -> None:
    """The stream after 60 sums, over 3 ranks: 0.09 % off instead of 0.7 %, and what is left is one sum's error.

    Each sum's relative error is 0.7 % (tests/ref/test_int8_all_reduce.py); of independent sums the whole's is that too,
    and with feedback that of one of them, 1/√60 of the whole.
    """
    steps = random_steps(2, 60, 3, (8, 256))
    exact = np.sum(steps, axis=(0, 1), dtype=np.float64)
    without = np.sum([int8_all_reduce(shards)[0] for shards in steps], axis=0, dtype=np.float64)
    out, carried = sums(steps, storage="bfloat16")
    stream = np.sum(out, axis=0, dtype=np.float64)
    assert relative_error(without, exact) == pytest.approx(0.0072, rel=0.05)
    assert relative_error(stream, exact) == pytest.approx(0.0072 / math.sqrt(60), rel=0.05)
    made_good = stream + sum(from_groups(owed, 8, 256, True) for owed in carried)
    assert relative_error(made_good, exact) < 0.0072 / 60 * 2.0**-8 * 60  # each sum may lose 2⁻⁹ of what is carried


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_trouble_stays_to_the_end_of_the_step(bad: float) -> None:
    """In its group, and nowhere else."""
    good, hurt = random_steps(4, 2, 3, (2, 64))
    hurt[1][1, 40] = bad
    (_, first, second), carried = sums([good, hurt, good])
    for out in (first, second):
        assert np.isnan(out[1, 32:]).all()
        assert np.isfinite(out[0]).all()
        assert np.isfinite(out[1, :32]).all()
    assert np.isnan(carried[1][3]).all()


def test_small_groups_come_in_the_end() -> None:
    """What is below 2⁻¹⁰⁰ does not travel; carried, it does when there is enough of it."""
    shards = [one_group(2.0**-102), np.zeros((1, 32), np.float32)]
    shards = [np.concatenate([np.zeros((1, 32), np.float32), shard], axis=1) for shard in shards]
    out, _ = sums([shards] * 4, rotate=False, owners=True)
    assert [float(found[0, 32]) for found in out[:3]] == [0, 0, 0]
    assert out[3][0, 32] == pytest.approx(2.0**-100, rel=0.01)


def test_one_rank_carries_nothing() -> None:
    (shards,) = random_steps(5, 1, 1, (2, 40))
    (out,), carried = sums([shards])
    np.testing.assert_array_equal(out, shards[0])
    assert not np.any(carried)


def test_the_result_is_rounded_to_its_storage() -> None:
    (shards,) = random_steps(6, 1, 2, (2, 64))
    nothing = [nothing_carried(2, 64)] * 2
    halves = [shard.astype(np.float16) for shard in shards]
    out, carried = int8_feedback_all_reduce(halves, nothing)
    assert out[0].dtype == np.float16
    assert carried[0].dtype == np.float32
    stored = int8_feedback_all_reduce(shards, nothing, storage="bfloat16")[0][0]
    np.testing.assert_array_equal(stored, int8_all_reduce(shards, storage="bfloat16")[0])


def test_shapes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="no shards"):
        int8_feedback_all_reduce([], [])
