"""The all-reduce in pieces, where conformance does not look: the very bits of ref, waits that end, planted faults."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from conformance import all_reduce_pieces as cases_of
from conformance.case import Case
from conformance.machines import host_machine
from conformance.ranked import RankedOps, make_exchanges, make_group
from engine.errors import KernelError
from engine.kernels import all_reduce_pieces as kernels
from engine.kernels import int8_all_reduce as packets
from engine.kernels.channel import Slots, make_exchange
from ref.int8_all_reduce import int8_all_reduce
from tests.cuda.isolated import isolated
from tests.cuda.mutants import Mutant, mutants
from tests.cuda.test_all_reduce import finding, some_slow
from tests.cuda.test_mutants import copy_of_cuda, copy_with

FEW = (
    "numbers-rows-window-of-3",
    "rotated-few-peer-of-3",
    "rotated-rows-window-of-3",
    "add-rotated-large-peer-of-2",
    "carried-window-of-3",
)
MUTANTS = (
    *mutants(
        "all_reduce_pieces",
        "all_reduce_pieces.cu",
        ("the rest of a division belongs to nobody", " + min(rank, num_units % kWorld)", ""),
        ("a chunk goes past its slice", "return min(chunk, slice(owner + 1) - first(owner, step))", "return chunk"),
        (
            "shares are announced before they are written",
            "    __syncthreads();\n    const int peer = static_cast<int>(threadIdx.x);\n    if (peer < kWorld && peer",
            "    const int peer = static_cast<int>(threadIdx.x);\n    if (peer < kWorld && peer",
        ),
        (
            "sums are announced before they are written",
            "    __syncthreads();\n    const int outbox",
            "    const int outbox",
        ),
        ("shares are not rotated", "if constexpr (kWire == kRotated) rotate(values);\n#pragma", "#pragma"),
        ("a sum's error is not kept", "encode(place, exists, sum)", "encode(place, false, sum)"),
        ("the owner keeps what it did not send", "if constexpr (kWire != kPlain) dequantize(codes, sum);", ""),
        ("the first rank is added last", "if (p == exchange.rank) share[i]", "if (p == exchange.rank % 2) share[i]"),
        (
            "scales are those of the neighbour",
            "chunk * kGroup + piece / kUnit * 2)}, values",
            "chunk * kGroup + (piece / kUnit ^ 1) * 2)}, values",
        ),
        ("the residual is left out", "values[i] += other[i]", "values[i] += 0.0f * other[i]"),
    ),
    *mutants(
        "all_reduce_pieces",
        "include/exchange.cuh",
        ("nobody waits", "    while (static_cast<long long>", "    while (false && static_cast<long long>"),
        ("flags do not say the step", "static_cast<unsigned>(step + 1)", "1u"),
        ("flags do not say the number", "static_cast<unsigned long long>(number) << 32 | ", ""),
        ("a stage too few", "stage % exchange.num_stages)", "stage % (exchange.num_stages - 1))"),
    ),
    *mutants(
        "all_reduce_pieces",
        "include/hadamard.cuh",
        (
            "a round of the rotation is left out",
            "lanes < kGroup / kCount; lanes *= 2)\n#pragma",
            "lanes < kGroup / kCount / 2; lanes *= 2)\n#pragma",
        ),
        ("scales are rounded down", " + 0xffffu) >> 16", ") >> 16"),
        (
            "the largest of a pair of lanes",
            "lanes < kGroup / kCount; lanes *= 2) bits",
            "lanes < kGroup / kCount / 2; lanes *= 2) bits",
        ),
    ),
)
QUICK = 5  # of the mutants, from the first on, are tried in every run


def few_cases() -> list[Case]:
    return [case.stored_as("bfloat16") for case in cases_of.cases() if case.name in FEW]


@pytest.mark.parametrize("mutant", some_slow(MUTANTS, QUICK), ids=str)
def test_a_planted_fault_is_found(mutant: Mutant, tmp_path: Path) -> None:
    assert isolated(finding, few_cases(), copy_with(mutant, tmp_path)), "all cases pass"


def test_nothing_is_found_in_a_true_copy(tmp_path: Path) -> None:
    assert isolated(finding, few_cases(), copy_of_cuda(tmp_path)) == ""


@pytest.fixture(scope="module")
def ops() -> RankedOps:
    found = host_machine(few_cases()).ops
    assert isinstance(found, RankedOps)
    return found


def hostile(seed: int, num_tokens: int, hidden_size: int) -> Any:
    """Rows with infinity, NaN, groups that travel as zeros, subnormal numbers, the largest there are."""
    x = np.random.default_rng(seed).standard_normal((num_tokens, hidden_size)).astype(np.float32)
    x[1, 3], x[2, 40] = np.inf, np.nan
    x[3] *= 2.0**-102
    x[4] = 2.0**-130
    x[5] = np.where(x[5] > 0, 1e38, 1e-38)
    x[6] = 0.0
    return x.astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("kernel", ["pieces", "packets"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_bits_are_those_of_ref(world_size: int, kernel: str, ops: RankedOps) -> None:
    x = [hostile(rank, 9, 96) for rank in range(world_size)]
    with np.errstate(all="ignore"):
        expected = int8_all_reduce(x, owners=True, storage="bfloat16")[0]
    if kernel == "pieces":
        group, function = make_exchanges(ops, world_size, "peer", cases_of.SLOTS), kernels.int8_all_reduce
    else:
        group, function = make_group(ops, world_size, "peer", 4 * x[0].nbytes), packets.int8_all_reduce
    run = [partial(function, x[rank], group.channels[rank], device=ops.device) for rank in range(world_size)]
    for found in ops.together(run):
        same = (found == expected) | (np.isnan(found.astype(np.float32)) & np.isnan(expected.astype(np.float32)))
        assert same.all(), np.argwhere(~same)[:5]
        assert not np.isfinite(found[1:3].astype(np.float32)).all()


def test_a_rank_that_is_waited_for_in_vain_is_named(ops: RankedOps) -> None:
    x = np.ones((64, 96), ml_dtypes.bfloat16)
    group = make_exchanges(ops, 3, "window", cases_of.SLOTS, patience_s=0.3)
    run = [partial(kernels.all_reduce_pieces, x, group.channels[rank], device=ops.device) for rank in range(2)]
    ops.together(run)
    assert {(report.peer, report.number) for report in group.reports()} == {(2, 1)}


def test_chunks_cover_a_slice(ops: RankedOps) -> None:
    """And fit in a slot; blocks come before chunks, chunks before their size."""
    for slots in (Slots(), cases_of.SLOTS, Slots(slot_bytes=512)):
        exchange = make_exchanges(ops, 2, "window", slots).channels[0]
        for unit_pieces, unit_bytes in ((1, 16), (4, 34)):
            for units in (1, 7, 8, 100, 1000, 12345, 1 << 22):
                chunk, blocks = kernels.chunks(units, unit_pieces, unit_bytes, exchange)
                assert chunk % 8 == 0
                assert 0 < chunk * unit_bytes <= slots.slot_bytes
                assert 1 <= blocks <= slots.num_lanes
                assert (blocks - 1) * chunk < units


def test_what_does_not_fit_is_refused(ops: RankedOps) -> None:
    group = make_exchanges(ops, 2, "window", cases_of.SLOTS)
    exchange = group.channels[0]
    with pytest.raises(KernelError, match="rows of 48 are no whole groups of 32"):
        kernels.int8_all_reduce(np.ones((8, 48), ml_dtypes.bfloat16), exchange, device=ops.device)
    with pytest.raises(KernelError, match="x is float32; expected bfloat16 or float16"):
        kernels.int8_all_reduce(np.ones((8, 64), np.float32), exchange, device=ops.device)
    wrong = np.ones((4, 64), np.float16)
    with pytest.raises(KernelError, match="residual has shape"):
        kernels.all_reduce_pieces(np.ones((8, 64), np.float16), exchange, wrong, device=ops.device)
    with pytest.raises(KernelError, match="2 to 8"):
        make_exchange(0, 9, inboxes=[], is_window=True, state=None, alarm=None, slots=Slots())
