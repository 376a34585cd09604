"""Sums over CPU ranks against ref, on ranks that are threads; what MPI itself does with them: see test_mpi."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from engine.comm import mpi_sums
from engine.comm.communicator import ALONE, StepSum
from engine.comm.mpi_sums import WireFormat, make_sum
from ref.collectives import all_reduce
from ref.int8_all_reduce import int8_all_reduce
from ref.int8_feedback import int8_feedback_all_reduce, nothing_carried
from tests.engine.rank_threads import ThreadComm, on_ranks

Array = NDArray[Any]
SHAPES = ((1, 1), (1, 32), (3, 40), (5, 96), (2, 577), (0, 64))  # of groups of 32 some ranks have none, or one more
STEP = tuple(StepSum(0, is_first=number == 0, is_last=number == 3) for number in range(4))


def shards(size: int, shape: tuple[int, ...], seed: int = 0) -> list[Array]:
    """Of very different magnitudes, so that another order of the sum has other bits."""
    random = np.random.default_rng([seed, size, *shape])
    scales = 10.0 ** random.integers(-3, 4, (size, *shape))
    return list((random.standard_normal((size, *shape)) * scales).astype(np.float32))


def expected(wire: WireFormat, arrays: list[Array]) -> list[Array]:
    """Of the sums of STEP, to each of which ranks bring the same."""
    if wire == "int8":
        carried, sums = [nothing_carried(*arrays[0].shape) for _ in arrays], []
        for _ in STEP[:-1]:
            out, carried = int8_feedback_all_reduce(arrays, carried)
            sums.append(out[0])
        return [*sums, all_reduce(arrays)[0]]
    if wire == "int8-plain":
        return [int8_all_reduce(arrays, rotate=False)[0] for _ in STEP]
    dtype = np.float32 if wire == "float32" else ml_dtypes.bfloat16
    return [all_reduce([array.astype(dtype) for array in arrays])[0].astype(np.float32) for _ in STEP]


def summed(wire: WireFormat, arrays: list[Array], sums: Sequence[StepSum] = STEP) -> list[list[Array]]:
    """What each rank has of these sums."""

    def work(comm: ThreadComm) -> list[Array]:
        add = make_sum(comm, wire)
        return [add(arrays[comm.rank], which) for which in sums]

    return on_ranks(len(arrays), work)


@pytest.mark.parametrize("one_shot_bytes", [0, 1 << 30], ids=["two shots", "one shot"])
@pytest.mark.parametrize("size", range(2, 9))
@pytest.mark.parametrize("wire", ["float32", "bfloat16", "int8", "int8-plain"])
def test_sum(wire: WireFormat, size: int, one_shot_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank has the bits of ref, of each sum of a step."""
    monkeypatch.setattr(mpi_sums, "ONE_SHOT_BYTES", one_shot_bytes)
    for shape in SHAPES:
        arrays = shards(size, shape)
        wanted = expected(wire, arrays)
        for found in summed(wire, arrays):
            assert {one.dtype for one in found} == {np.dtype(np.float32)}
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
        np.testing.assert_array_equal(summed(wire, [array])[0], [array] * len(STEP))


def test_order_is_seen() -> None:
    """The shards of these tests tell a sum in rank order from others."""
    arrays = shards(4, (5, 96))
    assert (expected("float32", arrays)[0] != expected("float32", arrays[::-1])[0]).any()


def test_halves_carry_errors_of_their_own() -> None:
    """Sums of two halves by turns are what each half's are alone; a step after them begins anew."""
    first, second = shards(3, (3, 64)), shards(3, (5, 64), seed=1)
    by_turns = [StepSum(row, which.is_first, which.is_last) for which in STEP for row in (0, 3)]

    def work(comm: ThreadComm) -> list[Array]:
        add = make_sum(comm, "int8")
        step = [add((first if which.first_row == 0 else second)[comm.rank], which) for which in by_turns]
        return step + [add(second[comm.rank], which) for which in STEP]

    alone = [expected("int8", first), expected("int8", second)]
    assert (alone[1][1] != alone[1][0]).any(), "what is carried is seen"
    for found in on_ranks(3, work):
        for number, one in enumerate(found[: 2 * len(STEP)]):
            np.testing.assert_array_equal(one, alone[number % 2][number // 2])
        np.testing.assert_array_equal(found[2 * len(STEP) :], alone[1])


def test_a_step_that_ended_early_is_forgotten() -> None:
    arrays = shards(2, (3, 64))
    found = summed("int8", arrays, [*STEP[:2], *STEP])[0]
    np.testing.assert_array_equal(found[2:], expected("int8", arrays))
    np.testing.assert_array_equal(summed("int8", arrays, [ALONE])[0][0], all_reduce(arrays)[0])


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "int8", "int8-plain"])
def test_a_nan_arrives_everywhere(wire: WireFormat) -> None:
    arrays = shards(3, (2, 64))
    arrays[1][1, 40] = np.nan
    for of_rank in summed(wire, arrays):
        for found in of_rank:
            assert np.isnan(found[1, 40])
            assert np.isfinite(found[0]).all()
