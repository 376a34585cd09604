"""Sums over CPU ranks against ref, on ranks that are threads; what MPI itself does with them: see test_mpi."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from engine.comm import mpi_sums
from engine.comm.mpi_sums import WireFormat, make_sum
from ref.collectives import all_reduce
from ref.int8_all_reduce import int8_all_reduce
from tests.engine.rank_threads import on_ranks

Array = NDArray[Any]
SHAPES = ((1, 1), (1, 32), (3, 40), (5, 96), (2, 577), (0, 64))  # of groups of 32 some ranks have none, or one more


def shards(size: int, shape: tuple[int, ...], seed: int = 0) -> list[Array]:
    """Of very different magnitudes, so that another order of the sum has other bits."""
    random = np.random.default_rng([seed, size, *shape])
    scales = 10.0 ** random.integers(-3, 4, (size, *shape))
    return list((random.standard_normal((size, *shape)) * scales).astype(np.float32))


def expected(wire: WireFormat, arrays: list[Array]) -> Array:
    if wire.startswith("int8"):
        return int8_all_reduce(arrays, rotate=wire == "int8")[0]
    dtype = np.float32 if wire == "float32" else ml_dtypes.bfloat16
    return all_reduce([array.astype(dtype) for array in arrays])[0].astype(np.float32)


def summed(wire: WireFormat, arrays: list[Array]) -> list[Array]:
    return on_ranks(len(arrays), lambda comm: make_sum(comm, wire)(arrays[comm.rank]))


@pytest.mark.parametrize("one_shot_bytes", [0, 1 << 30], ids=["two shots", "one shot"])
@pytest.mark.parametrize("size", range(2, 9))
@pytest.mark.parametrize("wire", ["float32", "bfloat16", "int8", "int8-plain"])
def test_sum(wire: WireFormat, size: int, one_shot_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank has the bits of ref."""
    monkeypatch.setattr(mpi_sums, "ONE_SHOT_BYTES", one_shot_bytes)
    for shape in SHAPES:
        arrays = shards(size, shape)
        wanted = expected(wire, arrays)
        for found in summed(wire, arrays):
            assert found.dtype == np.float32
            np.testing.assert_array_equal(found, wanted)


def test_columns_of_another_array() -> None:
    """What a rank brings need not lie in one piece."""
    arrays = [np.ascontiguousarray(array).T for array in shards(3, (64, 5))]
    for wire in ("float32", "bfloat16", "int8"):
        np.testing.assert_array_equal(summed(wire, arrays)[1], expected(wire, arrays))


def test_one_rank_keeps_what_it_has() -> None:
    """Over any wire: nothing is sent."""
    (array,) = shards(1, (3, 40))
    for wire in ("float32", "bfloat16", "int8"):
        np.testing.assert_array_equal(summed(wire, [array])[0], array)


def test_order_is_seen() -> None:
    """The shards of these tests tell a sum in rank order from others."""
    arrays = shards(4, (5, 96))
    assert (expected("float32", arrays) != expected("float32", arrays[::-1])).any()


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "int8", "int8-plain"])
def test_a_nan_arrives_everywhere(wire: WireFormat) -> None:
    arrays = shards(3, (2, 64))
    arrays[1][1, 40] = np.nan
    for found in summed(wire, arrays):
        assert np.isnan(found[1, 40])
        assert np.isfinite(found[0]).all()
