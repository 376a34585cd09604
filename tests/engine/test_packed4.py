"""The order of 4-bit weights for kernels."""

import numpy as np
import pytest

from engine.packed4 import blank4, is_group_size, pack4, packed_rows, unpack4


def test_one_number_is_where_the_layout_says() -> None:
    """Row 9 = 1 + 8·1 and column 26 = 16·1 + 8·1 + 2·1 + 0: lane 4·1 + 1, word 1, bit 4·(1 + 2·1) + 16·0."""
    q = np.zeros((64, 128), np.uint8)
    q[9, 26] = 5
    weight = pack4(q, np.ones((64, 1), np.float16), None)["weight"]
    assert weight.shape == (4, 2, 32, 4)
    assert weight[0, 0, 5, 1] == 5 << 12
    assert np.count_nonzero(weight) == 1


def test_scales_of_a_tile_lie_in_pairs() -> None:
    scales = np.arange(128, dtype=np.float16).reshape(64, 2)  # 2 · row + group
    packed = pack4(np.zeros((64, 128), np.uint8), scales, None)["scales"]
    assert packed.shape == (2, 1, 8, 4, 2)
    assert packed[1, 0, 3, 2].tolist() == [2 * (32 + 3) + 1, 2 * (32 + 3 + 8) + 1]


def test_a_gated_weight_has_eight_rows_of_each_kind_in_turn() -> None:
    assert packed_rows(32, gated=True).tolist() == [*range(8), *range(16, 24), *range(8, 16), *range(24, 32)]


@pytest.mark.parametrize(
    ("out_features", "in_features", "group_size", "gated"),
    [(64, 128, 64, False), (80, 200, 200, True), (24, 96, 32, False), (144, 256, 128, True)],
)
def test_unpacking_is_the_inverse(out_features: int, in_features: int, group_size: int, gated: bool) -> None:
    rng = np.random.default_rng(0)
    q = rng.integers(0, 16, (out_features, in_features)).astype(np.uint8)
    scales = rng.random((out_features, in_features // group_size)).astype(np.float16)
    zeros = rng.integers(0, 16, scales.shape).astype(np.uint8)
    tensors = pack4(q, scales, zeros, gated=gated)
    for found, wanted in zip(unpack4(tensors, out_features, in_features, gated=gated), (q, scales, zeros), strict=True):
        np.testing.assert_array_equal(found, wanted)
    blank = blank4(out_features, in_features, group_size, zeros=True)
    assert {name: (array.shape, array.dtype) for name, array in blank.items()} == {
        name: (array.shape, array.dtype) for name, array in tensors.items()
    }


def test_sizes_of_groups() -> None:
    """Divisors of the columns that the kernels have, or all of them."""
    sizes = (16, 32, 64, 96, 128, 192, 256, 384, 768)
    assert [size for size in sizes if is_group_size(size, 768)] == [32, 64, 128, 256, 768]
    assert not is_group_size(64, 160)
