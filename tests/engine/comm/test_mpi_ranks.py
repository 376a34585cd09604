"""The communicator of CPU ranks over MPI itself, and on ranks that are threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from conformance.golden_models import llama_config
from engine.comm.communicator import ALONE, Communicator, OneRank
from engine.comm.mpi_ranks import MpiRanks
from engine.comm.mpi_sums import WireFormat
from engine.config import ParallelConfig
from engine.model_config.read import model_config_from_hf
from engine.ops import cpu_ops
from engine.weights import Norm
from ref.rmsnorm import rmsnorm
from tests.engine.comm.test_mpi_sums import STEP, expected, shards
from tests.engine.rank_threads import ThreadComm, on_ranks
from tests.mpi import mpirun

Array = NDArray[Any]
CONFIG = model_config_from_hf(llama_config(hidden_size=48, vocab_size=61), {}, "here")


def test_over_mpi() -> None:
    """All sums in both ways, arrays of all sizes; two stages of two, with several residuals on their way."""
    printed = mpirun(4, "-m", "tests.engine.comm.over_mpi", timeout=120)
    assert printed.split() == ["ok"] * 4


def make(comm: ThreadComm, tp: int, pp: int, wire: WireFormat = "float32") -> MpiRanks:
    return MpiRanks(cpu_ops(), comm, ParallelConfig(comm.rank, tp, pp), CONFIG, wire)


@pytest.mark.parametrize("wire", ["float32", "int8", "int8-plain"])
def test_sums_are_added_and_normed(wire: WireFormat) -> None:
    """What the embedding gives is exact whatever the wire is."""
    partials, (residual,) = shards(3, (5, 48)), shards(1, (5, 48), seed=1)
    weight = np.linspace(0.5, 1.5, 48, dtype=np.float32)

    def work(comm: ThreadComm) -> tuple[list[tuple[Array, Array]], Array, Array]:
        ranks = make(comm, 3, 1, wire)
        part, norm = partials[comm.rank], Norm(weight, 1e-6)
        embedded = ranks.reduce(part)
        normed = [ranks.reduce_add_norm(part, residual.copy(), norm, which) for which in STEP[:-1]]
        return normed, ranks.reduce_add(part, residual, STEP[-1]), embedded

    totals = [total + residual for total in expected(wire, partials)]
    for normed, added, embedded in on_ranks(3, work):
        for (hidden, summed), total in zip(normed, totals, strict=False):
            np.testing.assert_array_equal(summed, total)
            np.testing.assert_allclose(hidden, rmsnorm(total, weight, 1e-6), rtol=1e-6)
        np.testing.assert_array_equal(added, totals[-1])
        np.testing.assert_array_equal(embedded, expected("float32", partials)[0])


@pytest.mark.parametrize("tp", [1, 2, 3, 8])
def test_logits_are_side_by_side_on_rank_0(tp: int) -> None:
    """61 ids on 8 ranks are 8 each; what pads the last rank's is cut off."""
    rows = -(-61 // tp)
    whole = np.arange(4 * 61, dtype=np.float32).reshape(4, 61)
    padded = np.pad(whole, ((0, 0), (0, rows * tp - 61)), constant_values=1e9)

    def work(comm: ThreadComm) -> Array | None:
        return make(comm, tp, 1).gather_logits(padded[:, comm.rank * rows : (comm.rank + 1) * rows])

    first, *others = on_ranks(tp, work)
    np.testing.assert_array_equal(first, whole)
    assert first.flags.c_contiguous
    assert others == [None] * (tp - 1)


def test_no_logits() -> None:
    first, _ = on_ranks(2, lambda comm: make(comm, 2, 1).gather_logits(np.zeros((0, 31), np.float32)))
    assert first.shape == (0, 61)


def test_ids_of_rank_0_are_shared() -> None:
    ids = np.array([5, 0, 2**31 - 1], np.int32)
    for found in on_ranks(3, lambda comm: make(comm, 3, 1).share_ids(ids if comm.rank == 0 else None, 3)):
        np.testing.assert_array_equal(found, ids)


@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (1, 4), (2, 3)])
def test_residuals_go_from_stage_to_stage(tp: int, pp: int) -> None:
    """From the last ranks, which embed, to rank 0's; each share to the same share of the next stage."""

    def work(comm: ThreadComm) -> Array:
        ranks, parallel = make(comm, tp, pp), ParallelConfig(comm.rank, tp, pp)
        residual = np.full((2, 48), 100 * parallel.tp_rank, np.float32) if ranks.is_first else ranks.receive(2)
        residual = residual + 1
        if not ranks.is_last:
            ranks.send(residual)
        return residual

    found = [int(residual[0, 0]) for residual in on_ranks(tp * pp, work)]
    assert found == [100 * (rank % tp) + pp - rank // tp for rank in range(tp * pp)]


def test_what_is_sent_may_be_changed_by_nobody() -> None:
    """A view of a larger array is sent as it is, in one piece."""

    def work(comm: ThreadComm) -> Array | None:
        ranks = make(comm, 1, 2)
        if not ranks.is_first:
            return ranks.receive(3)
        ranks.send(np.arange(6 * 48, dtype=np.float32).reshape(6, 48)[::2])
        return None

    np.testing.assert_array_equal(on_ranks(2, work)[0], np.arange(6 * 48).reshape(6, 48)[::2])


def test_one_rank_is_all_stages() -> None:
    one: Communicator = OneRank(cpu_ops())
    x = np.ones((2, 4), np.float32)
    assert one.is_first
    assert one.is_last
    assert one.reduce(x) is x
    assert one.gather_logits(x) is x
    assert one.share_ids(x, 2) is x
    one.close()
    np.testing.assert_array_equal(one.reduce_add(x, x, ALONE), x + x)
    for call in (lambda: one.send(x), lambda: one.receive(2)):
        with pytest.raises(NotImplementedError, match="first stage and the last"):
            call()
