"""The all-reduce as int8 in packets: planted faults, and what is refused. Its bits: test_all_reduce_pieces.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from conformance import int8_all_reduce as cases_of
from conformance.case import Case
from conformance.machines import host_machine
from conformance.ranked import RankedOps, make_group
from engine.errors import KernelError
from engine.kernels.int8_all_reduce import can_send, int8_all_reduce, num_bundles
from tests.cuda.isolated import isolated
from tests.cuda.mutants import Mutant, mutants
from tests.cuda.test_all_reduce import finding, some_slow
from tests.cuda.test_mutants import copy_with

FEW = ("rotated-rows-window-of-3", "rotated-few-peer-of-3", "add-rotated-large-peer-of-2", "carried-window-of-3")
MUTANTS = (
    *mutants(
        "int8_all_reduce",
        "int8_all_reduce.cu",
        ("scales are taken as they are", " && scales.w == number", ""),
        ("the last rank's rest is nobody's", " + min(owner, num_groups % kWorld)", ""),
        (
            "sums go where shares went",
            "channel.outboxes[i] + own_slot, kWorld * num_bundles + bundle",
            "channel.outboxes[i] + own_slot, rank * num_bundles + bundle",
        ),
        ("the third scale is lost", "c[2].scale, 0,", "0, 0,"),
        (
            "the owner keeps what it did not send",
            "    finish(rank, bundle, part);",
            "    Part kept = part;\n    kept.codes[0].scale += 128;\n    finish(rank, bundle, kept);",
        ),
        (
            "one bundle a warp",
            "for (int bundle = begin; bundle < num_bundles; bundle += step)\n      finish",
            "for (int bundle = begin; bundle < min(num_bundles, step); bundle += step)\n      finish",
        ),
        ("shares go to the neighbour", "owner - (owner > rank)]", "0]"),
        ("a sum's error is not kept", "encode(rank, bundle, sums)", "encode(kWorld - 1, num_bundles, sums)"),
        ("past the slice", "group < slice(owner + 1) ? group", "group < num_groups ? group"),
    ),
)
QUICK = 3  # of the mutants, from the first on, are tried in every run


def few_cases() -> list[Case]:
    return [case.stored_as("bfloat16") for case in cases_of.cases() if case.name in FEW]


@pytest.mark.parametrize("mutant", some_slow(MUTANTS, QUICK), ids=str)
def test_a_planted_fault_is_found(mutant: Mutant, tmp_path: Path) -> None:
    assert isolated(finding, few_cases(), copy_with(mutant, tmp_path)), "all cases pass"


def test_what_does_not_fit_is_refused() -> None:
    ops = host_machine([]).ops
    assert isinstance(ops, RankedOps)
    channel = make_group(ops, 4, "window", 8192).channels[0]
    assert can_send(np.ones((1, 128), np.float16), channel)
    for shape in ((8, 48), (1, 96), (4096, 128)):  # no whole groups, a rank without one, too large
        assert not can_send(np.ones(shape, np.float16), channel)
        with pytest.raises(KernelError, match="whole groups of 32"):
            int8_all_reduce(np.ones(shape, np.float16), channel, device=ops.device)
    with pytest.raises(KernelError, match="x is float32"):
        int8_all_reduce(np.ones((1, 128), np.float32), channel, device=ops.device)


def test_bundles() -> None:
    assert [num_bundles(32 * groups, 2) for groups in (1, 2, 48, 49, 96)] == [1, 1, 1, 2, 2]
