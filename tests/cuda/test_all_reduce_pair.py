"""The all-reduce between two ranks, in chunks and as int8 in packets: planted faults, hostile numbers, refusals."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from conformance import all_reduce_pair as chunks
from conformance import int8_all_reduce_pair as packets
from conformance.case import Case
from conformance.machines import host_machine
from conformance.ranked import RankedOps, make_exchanges, make_group
from engine.errors import KernelError
from engine.kernels import all_reduce_pair as kernels
from engine.kernels.channel import Slots
from ref.int8_all_reduce import int8_all_reduce
from tests.cuda.isolated import isolated
from tests.cuda.mutants import Mutant, mutants
from tests.cuda.test_all_reduce import finding, some_slow
from tests.cuda.test_all_reduce_pieces import hostile
from tests.cuda.test_mutants import copy_of_cuda, copy_with

FEW = (
    "numbers-rows-window",
    "add-numbers-large-peer",
    "add-rotated-large-window",
    "int8-rows-peer",
    "carried-window-of-2",
)
FEW_PACKETS = ("rotated-rows-window", "add-rotated-large-peer", "int8-few-peer", "carried-peer-of-2")
MUTANTS = mutants(
    "all_reduce_pair",
    "all_reduce_pair.cu",
    ("the other's chunk is not awaited", "    await<2>(", "    if (false) await<2>("),
    ("one half of the slots", "static_cast<int>(number & 1) * half", "0 * half"),
    ("the residual is left out", "has_old ? sum[n] + other[n] : sum[n]", "sum[n]"),
    ("a bundle is announced before it is there", "    __syncthreads();\n    if (threadIdx", "    if (threadIdx"),
    ("what is ahead is taken for this", "    mine = next;", "    mine = step % 2 == 0 ? next : mine;"),
    ("scales of two rounds are one", "round % 2 == 0 ? codes.scale : two |", "round % 2 == 0 ? codes.scale : 0u |"),
    ("odd lanes have no scale", "Of::kCodeBytes + lane / 2 * 8) = scales", "Of::kCodeBytes + lane / 4 * 8) = scales"),
    ("nothing is read of what is carried", "if (carried.is_read) owed", "if (false) owed"),
    (
        "what is carried is that of the first bundle",
        "owed.load(carried.errors, first, size)",
        "owed.load(carried.errors, 0, size)",
    ),
    ("the end of an array is lost", "(size + Of::kSize - 1) / Of::kSize", "size / Of::kSize"),
)
PACKET_MUTANTS = mutants(
    "int8_all_reduce_pair",
    "int8_all_reduce_pair.cu",
    ("nobody looks at flags", "all &= packets[i].w == number", "all &= true"),
    ("scales change places", "is_first ? scale : other)", "is_first ? other : scale)"),
    ("one bundle a warp", "bundle < num_bundles; bundle += step)", "bundle < min(num_bundles, step); bundle += step)"),
    (
        "errors go where those of the first round go",
        "keep_carried(carried, place(round)",
        "keep_carried(carried, place(0)",
    ),
    ("own numbers are not those that were sent", "    mine = next;\n", ""),
    ("the residual is left out", "residual != nullptr ? sum[half * 8 + i] + old[i] :", "false ? 0.0f :"),
)
CHANCES = 12
QUICK = 3  # of the mutants, from the first on, are tried in every run


def few_cases() -> list[Case]:
    return [case.stored_as("bfloat16") for case in chunks.cases() if case.name in FEW]


def few_packets() -> list[Case]:
    return [case.stored_as("bfloat16") for case in packets.cases() if case.name in FEW_PACKETS]


@pytest.mark.parametrize("mutant", some_slow(MUTANTS, QUICK), ids=str)
def test_a_planted_fault_is_found(mutant: Mutant, tmp_path: Path) -> None:
    """A fault that shows when one rank is a call ahead of the other has more than one chance to show."""
    assert isolated(finding, CHANCES * few_cases(), copy_with(mutant, tmp_path)), "all cases pass"


@pytest.mark.parametrize("mutant", some_slow(PACKET_MUTANTS, QUICK), ids=str)
def test_a_planted_fault_is_found_in_packets(mutant: Mutant, tmp_path: Path) -> None:
    assert isolated(finding, few_packets(), copy_with(mutant, tmp_path)), "all cases pass"


def test_nothing_is_found_in_a_true_copy(tmp_path: Path) -> None:
    assert isolated(finding, few_cases(), copy_of_cuda(tmp_path)) == ""


@pytest.fixture(scope="module")
def ops() -> RankedOps:
    found = host_machine([*few_cases(), *few_packets()]).ops
    assert isinstance(found, RankedOps)
    return found


@pytest.mark.parametrize("kernel", ["chunks", "packets"])
def test_the_bits_are_those_of_ref(kernel: str, ops: RankedOps) -> None:
    x = [hostile(rank, 9, 96) for rank in range(2)]
    with np.errstate(all="ignore"):
        expected = int8_all_reduce(x, storage="bfloat16")[0]
    if kernel == "chunks":
        group = make_exchanges(ops, 2, "peer", chunks.SLOTS, has_owners=False)
        function = kernels.int8_all_reduce_pair
    else:
        group, function = make_group(ops, 2, "peer", 4 * x[0].nbytes), kernels.int8_packets
    run = [partial(function, x[rank], group.channels[rank], device=ops.device) for rank in range(2)]
    for found in ops.together(run):
        same = (found == expected) | (np.isnan(found.astype(np.float32)) & np.isnan(expected.astype(np.float32)))
        assert same.all(), np.argwhere(~same)[:5]
        assert not np.isfinite(found[1:3].astype(np.float32)).all()


def test_a_rank_that_is_waited_for_in_vain_is_named(ops: RankedOps) -> None:
    x = np.ones((64, 96), ml_dtypes.bfloat16)
    group = make_exchanges(ops, 2, "window", chunks.SLOTS, patience_s=0.3, has_owners=False)
    ops.together([partial(kernels.all_reduce_pair, x, group.channels[0], device=ops.device)])
    assert {(report.rank, report.peer, report.number) for report in group.reports()} == {(0, 1, 1)}


def test_grids_fit(ops: RankedOps) -> None:
    """Blocks come before warps; a block's warps fit in a slot."""
    for slots in (Slots(64, 8, 34816), chunks.SLOTS):
        exchange = make_exchanges(ops, 2, "window", slots, has_owners=False).channels[0]
        for bundle_bytes in (kernels.BUNDLE_BYTES, kernels.INT8_BUNDLE_BYTES):
            for bundles in (1, 2, 3, 64, 1000, 1 << 20):
                blocks, warps = kernels.grid(bundles, bundle_bytes, exchange)
                assert 1 <= blocks <= slots.num_lanes
                assert 1 <= warps <= kernels.MAX_WARPS
                assert warps * bundle_bytes <= slots.slot_bytes


def test_what_does_not_fit_is_refused(ops: RankedOps) -> None:
    exchange = make_exchanges(ops, 2, "window", chunks.SLOTS, has_owners=False).channels[0]
    with pytest.raises(KernelError, match="rows of 48 are no whole groups of 32"):
        kernels.int8_all_reduce_pair(np.ones((8, 48), ml_dtypes.bfloat16), exchange, device=ops.device)
    with pytest.raises(KernelError, match="x is float32; expected bfloat16 or float16"):
        kernels.int8_all_reduce_pair(np.ones((8, 64), np.float32), exchange, device=ops.device)
    wrong = np.ones((4, 64), np.float16)
    with pytest.raises(KernelError, match="residual has shape"):
        kernels.all_reduce_pair(np.ones((8, 64), np.float16), exchange, wrong, device=ops.device)
    three = make_exchanges(ops, 3, "window", chunks.SLOTS).channels[0]
    with pytest.raises(KernelError, match="3 ranks; it is for two"):
        kernels.all_reduce_pair(np.ones((8, 64), np.float16), three, device=ops.device)
    channel = make_group(ops, 2, "window", 8192).channels[0]
    most = kernels.most_packet_bytes(channel)
    assert kernels.int8_packets(np.zeros((0, 1024), np.float16), channel, device=ops.device).size == 0
    with pytest.raises(KernelError, match="do not fit"):
        kernels.int8_packets(np.ones((most // 2048 + 1, 1024), np.float16), channel, device=ops.device)
