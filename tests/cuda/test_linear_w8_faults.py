"""Faults planted in linear_w8 are found by cases that need one kernel of it each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from conformance.check import check
from conformance.machines import host_machine
from tests.cuda.conftest import Verdict
from tests.cuda.mutants import Mutant
from tests.cuda.test_kernels import cases_of
from tests.cuda.test_mutants import copy_of_cuda, copy_with

PLAIN, GATED, BLOCKS = ("odd", "tiles-of-three", "splits"), ("gated-splits",), ("gated-nine-tokens-block",)


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong, in words; and the cases that are to find it, which one kernel computes."""

    what: str
    cases: tuple[str, ...]
    old: str
    new: str

    def __str__(self) -> str:
        return self.what.replace(" ", "-")


FAULTS = (
    Fault("scale of the first token", PLAIN, ": x_scales[token];", ": x_scales[0];"),
    Fault("rows of the first half twice", PLAIN, "place(16 * i + 8 + group, pair", "place(16 * i + group, pair"),
    Fault("a wait too weak", PLAIN, "cp_async_wait<kStages - 2>", "cp_async_wait<kStages - 1>"),
    Fault("next step over this one", PLAIN, "stage == 0 ? kStages - 1 : stage - 1;", "stage;"),
    Fault("sums of the last tile kept", PLAIN, "          sums[i][t][j] = 0;\n", ""),
    Fault("one buffer for all tiles", PLAIN, "    buffer ^= 1;\n", ""),
    Fault("last part lost", PLAIN, "other <= others; ++other", "other < others; ++other"),
    Fault("steps over an even share lost", PLAIN, "block * share + min(block, rest)", "block * share"),
    Fault("tokens that are not there written", PLAIN, "if (token < num_tokens) here[", "here["),
    Fault("scale of the gate for both", GATED, "(column + i * size) * w_scale_step", "column * w_scale_step"),
    Fault("gate and its factor swapped", GATED, "sum_of(in_tile + 8 * i)", "sum_of(in_tile + 8 - 8 * i)"),
    Fault("bias of the gate for both", GATED, "bias[column + i * size]", "bias[column]"),
    Fault("blocks of the gates for both", BLOCKS, "scale_of[t][kGated ? j / 2 : 0]", "scale_of[t][0]"),
)


def finding(names: tuple[str, ...], folder: Path) -> str:
    cases = [case for case in cases_of("linear_w8") if case.name.removesuffix("-bfloat16") in names]
    machine = host_machine(cases, folder=folder)
    for case in cases:
        if problems := check(case, machine.ops, memory=machine.memory).problems:
            return f"{case.name}: {problems[0]}"
    return ""


def judge(fault: Fault, folder: Path) -> str:
    return finding(
        fault.cases, copy_with(Mutant("linear_w8", fault.what, "linear_w8.cu", fault.old, fault.new), folder)
    )


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_planted_fault_is_found(fault: Fault, verdict: Verdict) -> None:
    assert verdict(judge), "all cases pass"


@pytest.mark.parametrize("names", [PLAIN, GATED, BLOCKS], ids=lambda names: names[0])
def test_nothing_is_found_in_a_true_copy(names: tuple[str, ...], tmp_path: Path) -> None:
    assert finding(names, copy_of_cuda(tmp_path)) == ""
