"""The cases must be able to fail: each planted fault is found by at least one of them, in at least one order."""

from __future__ import annotations

import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from conformance.check import check
from conformance.host import KernelFault, Library
from conformance.host_build import CUDA
from conformance.host_device import ORDERS, HostDevice
from conformance.machines import host_machine, kernels_of
from tests.cuda.conftest import Verdict
from tests.cuda.edges import EDGES
from tests.cuda.isolated import planted
from tests.cuda.mutants import GEMM, MUTANTS, Mutant
from tests.cuda.test_kernels import STEMS, cases_of
from tests.cuda.test_shim import KERNELS
from tests.cuda.usual import usual


def finding(stem: str, folder: Path, storage: str) -> str:
    """The first case or edge that a copy of cuda/ fails, and how; "" if it passes all."""
    of_stem = cases_of(stem, storage)
    quick = usual([(case, kernels_of([case], HostDevice())) for case in of_stem])
    for some in (quick, of_stem):
        machine = host_machine(some, folder=folder)
        for case in some:
            problems = check(case, machine.ops, memory=machine.memory).problems
            if problems:
                return f"{case.name}: {problems[0]}"
    for edge in EDGES.get(stem, ()):
        try:
            problems = tuple(edge(machine.ops))
        except KernelFault as fault:
            problems = (str(fault),)
        if problems:
            return f"{edge.__name__}: {problems[0]}"
    return ""


def copy_of_cuda(folder: Path) -> Path:
    return Path(shutil.copytree(CUDA, folder / "cuda"))


def copy_with(mutant: Mutant, folder: Path) -> Path:
    """A copy of cuda/ with one fault in it."""
    copy = copy_of_cuda(folder)
    file = copy / mutant.file
    file.write_text(planted(file.read_text("utf-8"), mutant.old, mutant.new), "utf-8")
    return copy


def judge(fault: Mutant, folder: Path) -> str:
    return finding(fault.stem, copy_with(fault, folder), fault.storage)


@pytest.mark.parametrize("fault", MUTANTS, ids=str)
def test_a_planted_fault_is_found(fault: Mutant, verdict: Verdict) -> None:
    assert verdict(judge), "all cases pass"


@pytest.mark.parametrize("stem", STEMS)
def test_nothing_is_found_in_a_true_copy(stem: str, tmp_path: Path) -> None:
    assert finding(stem, copy_of_cuda(tmp_path), "bfloat16") == ""


def wrong_product(source: Path) -> str:
    """What is wrong with the kernel of gemm.cu in any order, or, where nothing is, under AddressSanitizer; or ""."""
    rng = np.random.default_rng(2)
    a, b = (rng.standard_normal((n, 160)).astype(ml_dtypes.bfloat16) for n in (70, 67))
    expected = a.astype(np.float64) @ b.astype(np.float64).T
    for schedule, seed, sanitizer in (*((*order, "") for order in ORDERS), ("in_step", 0, "address")):
        whole = np.full((72, 67), -7.0, np.float32)
        whole[1:71] = np.nan
        arguments = [a, b, whole[1:71], *map(np.int32, (70, 67, 160))]
        try:
            Library(source, ["gemm<bf16>"], sanitizer).launch(
                "gemm<bf16>", (2, 2), (128,), arguments, 0, schedule, seed
            )
        except KernelFault as fault:
            return str(fault)
        if not (np.abs(whole[1:71] - expected) < 1e-3).all() or not (whole[[0, 71]] == -7).all():
            return f"wrong numbers, {schedule} {seed}"
    return ""


def judge_product(fault: tuple[str, str, str], folder: Path) -> str:
    _, old, new = fault
    source = folder / "gemm.cu"
    source.write_text(planted((KERNELS / "gemm.cu").read_text("utf-8"), old, new), "utf-8")
    return wrong_product(source)


@pytest.mark.parametrize("fault", GEMM, ids=[fault.replace(" ", "-") for fault, _, _ in GEMM])
def test_a_planted_fault_of_a_pipeline_is_found(fault: tuple[str, str, str], verdict: Verdict) -> None:
    assert verdict(judge_product), "nothing is found"


def test_the_true_pipeline_is_right() -> None:
    assert wrong_product(KERNELS / "gemm.cu") == ""
