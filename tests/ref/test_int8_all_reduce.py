"""ref.int8_all_reduce: values by hand, the same bits everywhere, and a bound that no input passes."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ref.collectives import all_reduce_bytes
from ref.int8_all_reduce import (
    dequantize_groups,
    from_groups,
    hadamard,
    int8_all_reduce,
    quantize_groups,
    to_groups,
    wire_bytes,
)
from ref.int8_all_reduce_bound import TRIP, error_bound
from ref.numerics import bf16_bits, bf16_to_float32, relative_error

Array = np.ndarray


def one_group(*values: float) -> Array:
    group = np.zeros((1, 32), np.float32)
    group[0, : len(values)] = values
    return group


def sylvester() -> Array:
    """H by its definition: doubled five times from [[1]]."""
    matrix = np.ones((1, 1))
    for _ in range(5):
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / math.sqrt(32)


def hostile(kind: str, rng: np.random.Generator, shape: tuple[int, int]) -> Array:
    """What a bound likes least."""
    noise = rng.standard_normal(shape)
    signs = np.where(np.arange(shape[1]) % 2, -1.0, 1.0)
    exponents = rng.integers(-149, 100, shape)
    outlier = np.where(rng.random(shape) < 1 / 32, 1e4, 1) * noise
    return {
        "noise": noise,
        "outlier": outlier,
        "lone": np.where(np.arange(shape[1]) == shape[1] // 2, 3e30, 0.0) * np.ones(shape),
        "alternating": signs * np.ones(shape) * rng.choice([1.0, 127.5, 1e-3]),
        "halfway": (rng.integers(-127, 127, shape) + 0.5) * (127.0 / 127.5),
        "constant": np.full(shape, rng.uniform(-5, 5)),
        "denormal": noise * 1e-40,
        "tiny": noise * 2.0**-100,
        "every size": np.ldexp(noise, exponents),
        "zero": np.zeros(shape),
    }[kind].astype(np.float32)


KINDS = (
    "noise",
    "outlier",
    "lone",
    "alternating",
    "halfway",
    "constant",
    "denormal",
    "tiny",
    "every size",
    "zero",
)


def test_hadamard_is_its_matrix_and_its_own_inverse() -> None:
    np.testing.assert_allclose(hadamard(np.eye(32, dtype=np.float32)), sylvester(), rtol=1e-6)
    np.testing.assert_allclose(sylvester() @ sylvester(), np.eye(32), atol=1e-15)
    x = np.random.default_rng(0).standard_normal((5, 32)).astype(np.float32)
    np.testing.assert_allclose(hadamard(x), x @ sylvester(), atol=2e-6)
    np.testing.assert_allclose(hadamard(hadamard(x)), x, atol=4e-6)
    assert hadamard(one_group(math.sqrt(32)))[0] == pytest.approx(1)  # one outlier is spread evenly


def test_quantize_by_hand() -> None:
    """absmax 127 gives scale 1 exactly; halves go to the even integer."""
    q, scale = quantize_groups(one_group(127, -127, 0.5, 1.5, -2.5, 2.6))
    assert q[0, :6].tolist() == [127, -127, 0, 2, -2, 3]
    assert bf16_to_float32(scale).tolist() == [1.0]


def test_the_scale_is_rounded_up() -> None:
    """127.5/127 lies between the bfloat16 1 and 1 + 2⁻⁷: the upper one is taken, and 127.5 is 126.5 steps."""
    q, scale = quantize_groups(one_group(127.5, 64))
    assert bf16_to_float32(scale).tolist() == [1 + 2.0**-7]
    assert q[0, :2].tolist() == [127, 64]  # 126.512 and 63.504 steps


@settings(deadline=None, max_examples=200)
@given(st.floats(2.0**-100, 2.0**127, width=32), st.integers(0, 2**32 - 1))
def test_one_trip(largest: float, seed: int) -> None:
    """No value saturates, the scale is the smallest bfloat16 that will do, and the loss is below largest/252."""
    group = np.random.default_rng(seed).uniform(-1, 1, (1, 32)).astype(np.float32) * np.float32(largest)
    group[0, seed % 32] = largest
    q, scale = quantize_groups(group)
    step = bf16_to_float32(scale).astype(np.float64)
    assert np.abs(q.astype(int)).max() == np.rint(largest / step[0]) <= 127
    assert largest <= 127 * step[0] * (1 + 2.0**-23)
    assert 127 * bf16_to_float32(scale - np.uint16(1)).astype(np.float64)[0] < largest
    error = np.abs(q * step[:, None] - group.astype(np.float64))
    assert error.max() <= step[0] * (0.5 + 2.0**-16) <= largest * TRIP


def test_one_trip_may_cost_that_much() -> None:
    """Largest 127.0001: the scale is rounded up to 1 + 2⁻⁷, and 62.5 steps become 62."""
    group = one_group(127.0001, 62.5 * (1 + 2.0**-7))
    error = np.abs(dequantize_groups(*quantize_groups(group)) - group)
    assert 0.999 * 127.0001 * TRIP < error[0, 1] <= 127.0001 * TRIP


def test_groups_without_substance() -> None:
    """Zero, and below 2⁻¹⁰⁰: scale 0, q 0, and zeros come out; QNT-09."""
    for value in (0.0, 1e-45, 2.0**-101):
        q, scale = quantize_groups(one_group(value, -value))
        assert not q.any()
        assert scale.tolist() == [0]
        assert not dequantize_groups(q, scale).any()
    q, scale = quantize_groups(one_group(2.0**-100))
    assert dequantize_groups(q, scale)[0, 0] == pytest.approx(2.0**-100, rel=1 / 252)


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_trouble_is_not_hidden(bad: float, rotate: bool) -> None:
    """One bad number makes its whole group NaN on all ranks, and no other group."""
    shards = [np.ones((2, 64), np.float32) for _ in range(3)]
    shards[1][1, 40] = bad
    for out in int8_all_reduce(shards, rotate=rotate):
        assert np.isnan(out[1, 32:]).all()
        assert np.isfinite(out[0]).all()
        assert np.isfinite(out[1, :32]).all()


def test_a_sum_that_overflows_is_not_hidden() -> None:
    shards = [np.full((1, 32), 3e38, np.float32)] * 2
    assert np.isnan(int8_all_reduce(shards, rotate=False, owners=True)[0]).all()
    assert np.isinf(int8_all_reduce(shards, rotate=False)[0]).all()


def test_two_ranks_without_owners_by_hand() -> None:
    """Both shares are rounded, each once, on both ranks: 0.3 of 127 to 0, 0.6 to 1; their sum is not."""
    mine, other = one_group(127, 0.3, 0.6, 0), one_group(0, 0.6, 0.3, -127)
    for out in int8_all_reduce([mine, other], rotate=False):
        assert out[0, :4].tolist() == [127, 1, 1, -127]
        assert not out[0, 4:].any()


def test_more_ranks_without_owners_add_what_all_have_sent() -> None:
    shards = list(np.random.default_rng(9).standard_normal((4, 2, 96)).astype(np.float32))
    arrived = [dequantize_groups(*quantize_groups(to_groups(shard, True))) for shard in shards]
    total = ((arrived[0] + arrived[1]) + arrived[2]) + arrived[3]
    out = int8_all_reduce(shards, owners=False)
    np.testing.assert_array_equal(out[3], from_groups(total, 2, 96, True))
    assert (out[0] != int8_all_reduce(shards)[0]).any()
    np.testing.assert_array_equal(int8_all_reduce(shards)[0], int8_all_reduce(shards, owners=True)[0])


def test_two_ranks_by_hand() -> None:
    """Rank 0 owns the first group, rank 1 the second. The owner's 0.3 counts in full, the other's is rounded to 0."""
    mine = np.concatenate([one_group(100, 0.3), one_group(100, 0.3)], axis=1)
    other = np.concatenate([one_group(127, 0.3), one_group(127, 0.3)], axis=1)
    q, scale = quantize_groups(one_group(227, 0.3))
    from_rank_0 = dequantize_groups(q, scale)[0]
    q, scale = quantize_groups(to_groups(mine, False))
    arrived = dequantize_groups(q, scale)[1]
    q, scale = quantize_groups(one_group(arrived[0] + 127, arrived[1] + np.float32(0.3)))
    from_rank_1 = dequantize_groups(q, scale)[0]
    out = int8_all_reduce([mine, other], rotate=False, owners=True)
    np.testing.assert_array_equal(out[0][0], np.concatenate([from_rank_0, from_rank_1]))


def test_the_owner_part_is_exact_in_the_sum() -> None:
    """A group whose other shards are zero is rounded once, as if it had been alone."""
    x = np.random.default_rng(1).standard_normal((1, 64)).astype(np.float32)
    zero = np.zeros_like(x)
    once = dequantize_groups(*quantize_groups(to_groups(x, False)))
    out = int8_all_reduce([np.where(np.arange(64) < 32, x, 0), np.where(np.arange(64) < 32, 0, x), zero], rotate=False)
    np.testing.assert_array_equal(out[2], from_groups(once, 1, 64, False))


@settings(deadline=None, max_examples=150)
@given(
    st.integers(1, 9),
    st.integers(1, 3),
    st.sampled_from([1, 31, 32, 33, 64, 100, 896]),
    st.lists(st.sampled_from(KINDS), min_size=9, max_size=9),
    st.integers(0, 2**32 - 1),
    st.booleans(),
    st.sampled_from([None, True, False]),
)
def test_the_bound_is_never_passed(
    world_size: int, num_tokens: int, hidden_size: int, kinds: list[str], seed: int, rotate: bool, owners: bool | None
) -> None:
    rng = np.random.default_rng(seed)
    shards = [hostile(kinds[rank], rng, (num_tokens, hidden_size)) for rank in range(world_size)]
    out = int8_all_reduce(shards, rotate=rotate, owners=owners)
    exact = np.sum([shard.astype(np.float64) for shard in shards], axis=0)
    assert (np.abs(out[0] - exact) <= error_bound(shards, rotate=rotate, owners=owners)).all()
    for other in out[1:]:
        assert other.tobytes() == out[0].tobytes()


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_bound_holds_where_all_ranks_are_alike(kind: str, rotate: bool) -> None:
    """Errors of equal shards add up instead of cancelling."""
    shard = hostile(kind, np.random.default_rng(3), (4, 128))
    exact = 5 * shard.astype(np.float64)
    out = int8_all_reduce([shard] * 5, rotate=rotate)[0]
    assert (np.abs(out - exact) <= error_bound([shard] * 5, rotate=rotate)).all()


def test_the_plain_bound_is_near_the_truth() -> None:
    """An input that loses half a step on each trip comes within 3 % of the bound: no smaller factor would do.

    Largest 127.0001: the scale is rounded up to s = 1 + 2⁻⁷. 62.5 s arrives as 62 s = 62.484. The sum's largest is
    126 s = 126.98, so its scale is 1 and 62.484 becomes 62: 0.988 is lost of 62.988, and the bound is 1.01.
    """
    foreign = one_group(127.0001, *[62.5 * (1 + 2.0**-7)] * 31)
    shards = [np.zeros_like(foreign), foreign]
    how = {"rotate": False, "owners": True}
    out, bound = int8_all_reduce(shards, **how)[0], error_bound(shards, **how)
    assert out[0, 1] == 62
    assert 0.97 * bound[0, 1] < foreign[0, 1] - out[0, 1] <= bound[0, 1]


def test_float64_shards_pay_for_the_way_into_float32() -> None:
    rng = np.random.default_rng(8)
    shards = list(rng.standard_normal((3, 2, 50)))
    for rotate in (False, True):
        out = int8_all_reduce(shards, rotate=rotate)[0]
        assert out.dtype == np.float64
        assert (np.abs(out - sum(shards)) <= error_bound(shards, rotate=rotate)).all()


def test_one_rank_is_exact() -> None:
    x = np.random.default_rng(2).standard_normal((3, 40))
    np.testing.assert_array_equal(int8_all_reduce([x])[0], x)
    assert not error_bound([x]).any()


def test_the_result_is_rounded_once_to_its_storage() -> None:
    shards = list(np.random.default_rng(4).standard_normal((3, 2, 96)).astype(np.float32))
    wide, stored = int8_all_reduce(shards)[0], int8_all_reduce(shards, storage="bfloat16")[0]
    np.testing.assert_array_equal(stored, bf16_to_float32(bf16_bits(wide)))
    halves = [shard.astype(np.float16) for shard in shards]
    assert int8_all_reduce(halves)[0].dtype == np.float16


def test_no_rows() -> None:
    for rotate in (False, True):
        assert int8_all_reduce([np.zeros((0, 64))] * 3, rotate=rotate)[0].shape == (0, 64)
        assert error_bound([np.zeros((0, 64))] * 3, rotate=rotate).shape == (0, 64)


def test_rotation_saves_hidden_states_with_outlier_channels() -> None:
    """One channel a group 50 times as large as the rest, as hidden states have: the error falls by half or more."""
    rng = np.random.default_rng(5)
    shards = [rng.standard_normal((64, 256)).astype(np.float32) for _ in range(4)]
    for shard in shards:
        shard[:, ::32] *= 50
    exact = np.sum([shard.astype(np.float64) for shard in shards], axis=0)
    plain, rotated = (relative_error(int8_all_reduce(shards, rotate=r)[0], exact) for r in (False, True))
    assert rotated < plain / 2
    assert plain == pytest.approx(0.017, rel=0.05)
    assert rotated == pytest.approx(0.0036, rel=0.05)


def test_shapes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="no shards"):
        int8_all_reduce([])
    with pytest.raises(ValueError, match=r"rank 0 brings shape \[4\]; wanted \[num_tokens, hidden_size\]"):
        int8_all_reduce([np.zeros(4)])
    with pytest.raises(ValueError, match=r"rank 1 brings float64 \[2, 5\] where rank 0 brings float64 \[2, 4\]"):
        int8_all_reduce([np.zeros((2, 4)), np.zeros((2, 5))])


def test_bytes_on_the_wire() -> None:
    """One row of 4096 is 128 groups; on 4 ranks each sends 96 groups, then its 32 sums to 3 others."""
    assert wire_bytes(1, 4096, 4) == [(96 + 96) * 34] * 4
    assert wire_bytes(1, 4096, 4)[0] / all_reduce_bytes(4096, 4)[0] == 34 / 64
    assert wire_bytes(7, 100, 1) == [0]
    assert wire_bytes(1, 33, 3) == [34 * (1 + 2), 34 * (1 + 2), 34 * 2]  # two groups, and a rank that owns none
