"""The all-reduce over islands, where conformance does not look: bits of ref, waits that end, planted faults."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from conformance import all_reduce_islands as cases_of
from conformance.case import Case
from conformance.host_build import CUDA
from conformance.machines import host_machine
from conformance.ranked import RankedOps, make_exchanges, make_island_exchanges
from engine.errors import KernelError
from engine.kernels import all_reduce_islands as kernels
from engine.kernels.all_reduce_pieces import all_reduce_pieces
from engine.kernels.channel import Slots, last_wait, make_islands
from ref.collectives import all_reduce
from tests.cuda import test_all_reduce as one_trip
from tests.cuda.isolated import isolated
from tests.cuda.mutants import Mutant, mutants
from tests.cuda.test_all_reduce import some_slow
from tests.cuda.test_mutants import copy_of_cuda, copy_with

FEW = (
    "rows-4-islands-of-2",
    "rows-2-islands-of-3",
    "add-ragged-2-islands-of-2",
    "add-few-2-islands-of-3",
    "add-large-2-islands-of-2",
)
MUTANTS = mutants(
    "all_reduce_islands",
    "all_reduce_islands.cu",
    ("every island begins anew", "p == 0 && before < 0 ?", "p == 0 ?"),
    ("the island before is not awaited", "== kIsland ? before :", "== kIsland ? -1 :"),
    ("nobody waits for the whole sum", "threadIdx.x == 0 ? last : -1", "-1"),
    (
        "islands hand on what they have rounded",
        "values[i] = sum[part * 4 + i]",
        "values[i] = to_float(from_float<T>(sum[part * 4 + i]))",
    ),
    ("the rest of a division belongs to nobody", " + min(owner, num_pieces % kIsland)", ""),
    ("a chunk goes past its slice", "min(chunk, end - begin)", "chunk"),
    ("shares are announced before they are written", "    __syncthreads();\n    const int peer", "    const int peer"),
    (
        "what is handed on is announced before it is written",
        "    __syncthreads();\n    if (exchange.rank == last)",
        "    if (exchange.rank == last)",
    ),
    (
        "what goes round is announced before it is written",
        "    __syncthreads();\n    announce_sums",
        "    announce_sums",
    ),
    ("the last island keeps the sum", "i < exchange.num_outboxes; ++i)", "i < kIsland - 1; ++i)"),
    ("halves of a piece are one", "from + (part * chunk + piece) * 16), values", "from + piece * 16), values"),
    ("members are not awaited", "exchange.gather_from, member_of_thread()", "exchange.gather_from, -1"),
    ("the residual is left out", "values[i] += other[i]", "values[i] += 0.0f * other[i]"),
    ("a stage more than there are", "min(exchange.num_stages, num_steps)", "min(exchange.num_stages + 1, num_steps)"),
    ("the last chunks are not passed on", "passed < num_steps && rank", "passed < num_steps - 1 && rank"),
)
CHANCES = 12
QUICK = 4  # of the mutants, from the first on, are tried in every run


def few_cases() -> list[Case]:
    """And one in float32, which other_bits takes too."""
    found = {case.name: case for case in cases_of.cases()}
    return [*(found[name].stored_as("bfloat16") for name in FEW), found["few-2-islands-of-2"].stored_as("float32")]


def ranked(folder: Path) -> RankedOps:
    found = host_machine(few_cases(), folder=folder).ops
    assert isinstance(found, RankedOps)
    return found


def other_bits(ops: RankedOps, world_size: int, island_size: int) -> str:
    """How sums of numbers whose order matters differ from ref, in float32, and in bfloat16 from all ranks in pieces."""
    rng = np.random.default_rng(world_size)
    whole = rng.standard_normal((world_size, 9, 96)).astype(np.float32) * 10.0 ** rng.integers(
        -3, 4, (world_size, 1, 1)
    )
    for dtype in (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)):
        x = list(whole.astype(dtype))
        group = make_island_exchanges(ops, world_size, island_size, cases_of.SLOTS)
        run = [
            partial(kernels.all_reduce_islands, part, group.channels[r], device=ops.device) for r, part in enumerate(x)
        ]
        expected = all_reduce(x)[0]
        for rank, found in enumerate(ops.together(run)):
            if wrong := int((found != expected).sum()):
                return f"{wrong} numbers of rank {rank} are others in {dtype}"
    return ""


def finding(folder: Path, chances: int) -> str:
    few = few_cases()
    return (
        one_trip.finding(few, folder)
        or other_bits(ranked(folder), 6, 2)
        or one_trip.finding((chances - 1) * few, folder)
    )


@pytest.mark.parametrize("mutant", some_slow(MUTANTS, QUICK), ids=str)
def test_a_planted_fault_is_found(mutant: Mutant, tmp_path: Path) -> None:
    """A fault that shows when one rank is ahead of another has more than one chance to show."""
    assert isolated(finding, copy_with(mutant, tmp_path), CHANCES), "all cases pass"


def test_nothing_is_found_in_a_true_copy(tmp_path: Path) -> None:
    assert isolated(finding, copy_of_cuda(tmp_path), 1) == ""


@pytest.fixture(scope="module")
def ops() -> RankedOps:
    return ranked(CUDA)


@pytest.mark.parametrize(("world_size", "island_size"), cases_of.ISLANDS)
def test_the_bits_are_those_of_ref(world_size: int, island_size: int, ops: RankedOps) -> None:
    """Sums in rank order in float32, rounded once: islands change the way, and no bit."""
    assert other_bits(ops, world_size, island_size) == ""


def test_the_bits_are_those_of_all_ranks_in_pieces(ops: RankedOps) -> None:
    """With the residual, which both round apart."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((4, 9, 96)).astype(ml_dtypes.bfloat16)
    residual = rng.standard_normal((9, 96)).astype(ml_dtypes.bfloat16)
    found = []
    for function, group in (
        (kernels.all_reduce_islands, make_island_exchanges(ops, 4, 2, cases_of.SLOTS)),
        (all_reduce_pieces, make_exchanges(ops, 4, "window", cases_of.SLOTS)),
    ):
        run = [partial(function, x[r], group.channels[r], residual.copy(), device=ops.device) for r in range(4)]
        found += ops.together(run)
    assert {array.tobytes() for array in found} == {found[0].tobytes()}


@pytest.mark.parametrize("missing", [0, 1, 3])
def test_a_rank_that_is_waited_for_in_vain_is_named(missing: int, ops: RankedOps) -> None:
    """Some wait for one that waits itself, of their island or another: at the end of every chain is who is missing."""
    x = np.ones((64, 96), ml_dtypes.bfloat16)
    group = make_island_exchanges(ops, 4, 2, cases_of.SLOTS, patience_s=0.5)
    there = [rank for rank in range(4) if rank != missing]
    ops.together([partial(kernels.all_reduce_islands, x, group.channels[r], device=ops.device) for r in there])
    assert {report.number for report in group.reports()} == {1}
    alarm = np.frombuffer(group.alarm.tobytes(), np.uint32)
    waits = {rank: wait.peer for rank in there if (wait := last_wait(alarm, rank)) is not None}
    assert waits
    assert set(waits.values()) - set(waits) == {missing}


def test_what_does_not_fit_is_refused(ops: RankedOps) -> None:
    x = np.ones((8, 64), np.float16)
    exchange = make_exchanges(ops, 4, "window", cases_of.SLOTS).channels[0]
    with pytest.raises(KernelError, match="islands of 0 with 3 stages"):
        kernels.all_reduce_islands(x, exchange, device=ops.device)
    few = make_island_exchanges(ops, 4, 2, Slots(2, 2, 512)).channels[0]
    with pytest.raises(KernelError, match="islands of 2 with 2 stages; it needs 3"):
        kernels.all_reduce_islands(x, few, device=ops.device)
    exchange = make_island_exchanges(ops, 4, 2, cases_of.SLOTS).channels[0]
    with pytest.raises(KernelError, match="residual has shape"):
        kernels.all_reduce_islands(x, exchange, np.ones((4, 64), np.float16), device=ops.device)
    for world_size, size in ((5, 2), (2, 2), (4, 1), (10, 2)):
        with pytest.raises(KernelError, match=f"{world_size} ranks in islands of {size}"):
            make_islands(0, world_size, inboxes=[x] * size, windows=[], state=x, alarm=x, slots=cases_of.SLOTS)
