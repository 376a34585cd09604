"""Codes that ranks copy to each other, where conformance does not look: the bits of ref, faults, what is refused."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from conformance import int8_codes as cases_of
from conformance.case import Case
from conformance.host_device import HostDevice
from engine.errors import KernelError
from engine.kernels.carried import CARRIED, Carried
from engine.kernels.int8_codes import codes_bytes, quantize_codes, sum_codes
from ref.int8_feedback import int8_feedback_all_reduce, nothing_carried
from tests.cuda.isolated import isolated
from tests.cuda.mutants import Mutant, mutants
from tests.cuda.test_all_reduce import finding, some_slow
from tests.cuda.test_all_reduce_pieces import hostile
from tests.cuda.test_mutants import copy_of_cuda, copy_with

FEW = ("carried-three-groups-of-3", "carried-several-rounds-of-2", "rotated-rows-of-2", "int8-one-group-of-2")
MUTANTS = (
    *mutants(
        "int8_codes",
        "int8_codes.cu",
        ("a share is not rotated", "if constexpr (kRotated) rotate(y);", ""),
        ("the scale of the neighbour", "from + size + place / 32 * 2", "from + size + (place / 32 ^ 1) * 2"),
        ("ranks in another order", "p == rank ? mine", "p == 0 ? mine"),
        (
            "the residual is left out",
            "sum[i] += share[i];\n    }\n    store",
            "sum[i] += 0.0f * share[i];\n    }\n    store",
        ),
        (
            "one round",
            "first += step) {  // whole warps",
            "first += size) {  // whole warps",
        ),
        (
            "lanes without a piece leave early",
            "    if constexpr (kRotated) rotate(sum);\n    if (!exists) continue;",
            "    if (!exists) continue;\n    if constexpr (kRotated) rotate(sum);",
        ),
        ("every other scale", "if (threadIdx.x % 4 == 0) *", "if (threadIdx.x % 8 == 0) *"),
    ),
    *mutants(
        "int8_codes",
        "include/carried.cuh",
        ("nothing is read", "&& carried.is_read;", "&& false;"),
        ("what is new is read", " && carried.is_read;", ";"),
        ("nothing is kept", "store_row(carried.errors", "if (false) store_row(carried.errors"),
        ("what was sent is kept", "y[begin + i] - sent[begin + i]", "sent[begin + i]"),
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


def test_the_bits_are_those_of_ref() -> None:
    """Of sums and of what is carried, of infinity, NaN, groups that travel as zeros, and the largest numbers too."""
    device, shape = HostDevice(), (9, 96)
    x = [hostile(rank, *shape) for rank in range(2)]
    errors = [np.full(shape, np.nan, CARRIED) for _ in x]
    carried = [nothing_carried(*shape) for _ in x]
    for call in range(3):
        codes = np.zeros((2, codes_bytes(x[0].size)), np.uint8)
        for rank in range(2):
            quantize_codes(x[rank], codes[rank], Carried(errors[rank], is_new=call == 0), device=device)
        with np.errstate(all="ignore"):
            expected, carried = int8_feedback_all_reduce(x, carried, storage="bfloat16")
        for rank in range(2):
            found = sum_codes(codes[rank], codes[1 - rank : 2 - rank], rank, x[rank], device=device)
            assert same(found, expected[rank])
            assert same(errors[rank].reshape(-1, 32), carried[rank])
            assert not np.isfinite(found[1:3].astype(np.float32)).all()


def same(found: np.ndarray, expected: np.ndarray) -> bool:
    found, expected = found.astype(np.float32), expected.astype(np.float32)
    return bool(((found == expected) | (np.isnan(found) & np.isnan(expected))).all())


def test_room_for_codes() -> None:
    assert [codes_bytes(32 * groups) for groups in (0, 1, 2, 8)] == [0, 48, 80, 272]


def test_what_does_not_fit_is_refused() -> None:
    device = HostDevice()
    x, codes = np.ones((4, 64), ml_dtypes.bfloat16), np.zeros(codes_bytes(256), np.uint8)
    quantize_codes(x, codes, device=device)
    with pytest.raises(KernelError, match="rows of 48 are no whole groups of 32"):
        quantize_codes(np.ones((2, 48), np.float16), codes, device=device)
    with pytest.raises(KernelError, match="x is float32"):
        quantize_codes(x.astype(np.float32), codes, device=device)
    with pytest.raises(KernelError, match=r"codes has shape \[271\]; expected \[272\]"):
        quantize_codes(x, codes[:-1], device=device)
    for errors, problem in (
        (np.zeros((4, 32), CARRIED), r"carried has shape \[4, 32\]; expected \[4, 64\]"),
        (np.zeros((4, 64), np.float16), "carried is float16; expected bfloat16"),
    ):
        with pytest.raises(KernelError, match=problem):
            quantize_codes(x, codes, Carried(errors, is_new=True), device=device)
    with pytest.raises(KernelError, match=r"others has shape \[272\]; expected \[any, 272\]"):
        sum_codes(codes, codes, 0, x, device=device)
    with pytest.raises(KernelError, match="residual is float16; expected bfloat16"):
        sum_codes(codes, codes[None], 0, x, np.ones((4, 64), np.float16), device=device)
