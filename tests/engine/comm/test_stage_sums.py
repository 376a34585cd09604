"""Which way each sum of a step goes, and what it carries."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.comm.communicator import StepSum
from engine.comm.stage_sums import Plans, StageSums, plans_of
from engine.comm.ways import Plan, Sum, Trial, Way
from engine.errors import ConfigError
from engine.kernels.carried import CARRIED, Carried

KIB = 1024
NAMES = ("window", "window-int8", "window-copies", "window-copies-int8")
FIRST, MIDDLE, LAST = (StepSum(0, is_first=number == 0, is_last=number == 2) for number in range(3))


class Noted:
    """Ways that note what they were given."""

    def __init__(self) -> None:
        self.said: list[tuple[str, bool, Carried | None]] = []
        self.ways = {name: Way(name, self._sum(name)) for name in NAMES}

    def _sum(self, name: str) -> Sum:
        def add(x: Any, residual: Any, carried: Carried | None) -> Any:
            self.said.append((name, residual is not None, carried))
            return x

        return add


def plans() -> Plans:
    int8, exact, copies_int8, copies = (Plan((KIB,), (NAMES[number],)) for number in (1, 0, 3, 2))
    return Plans(int8, copies_int8, exact, copies)


def test_a_step_carries_its_errors_from_sum_to_sum() -> None:
    """Rows of each half are its own; the first sum reads none; the last one and the embedding's are exact."""
    noted, errors = Noted(), np.zeros((8, 32), CARRIED)
    sums = StageSums(noted.ways, plans(), errors)
    x = np.zeros((3, 32), np.float16)
    sums.exact(x)
    for which in (FIRST, MIDDLE, LAST):
        sums(x, x, which)
    sums(x, None, StepSum(5, is_first=True, is_last=False, is_beside=True))
    sums(x, None, StepSum(5, is_first=False, is_last=True, is_beside=True))
    assert [(name, has_residual) for name, has_residual, _ in noted.said] == [
        ("window", False),
        ("window-int8", True),
        ("window-int8", True),
        ("window", True),
        ("window-copies-int8", False),
        ("window-copies", False),
    ]
    carried = [one for _, _, one in noted.said[1:]]
    assert [one.is_new for one in carried if one] == [True, False, False, True, False]
    for one, first_row in zip(carried, (0, 0, 0, 5, 5), strict=True):
        assert one is not None
        assert one.errors.shape == (3, 32)
        assert one.errors.base is errors
        assert one.errors.ctypes.data == errors[first_row:].ctypes.data


def test_without_errors_nothing_is_carried() -> None:
    """As int8-plain: the last sum goes as the others do."""
    noted = Noted()
    sums = StageSums(noted.ways, plans())
    x = np.zeros((3, 32), np.float16)
    sums(x, x, LAST)
    assert noted.said == [("window-int8", True, None)]


def test_a_norm_is_fused_where_that_is_quicker() -> None:
    """Up to the bytes that its way says; int8, and larger arrays, have a kernel of its own for the norm."""
    noted = Noted()
    exact = plans().exact
    normed = np.ones((3, 32), np.float16)
    ways = noted.ways | {
        "window": Way("window", noted.ways["window"].sum, fused=lambda x, residual, weight, eps: (normed, residual))
    }
    sums = StageSums(ways, Plans(exact, exact, exact, exact), fused_bytes={"window": 192})
    x, weight = np.zeros((3, 32), np.float16), np.ones(32, np.float16)
    residual = x + np.float16(2)
    both = sums.and_norm(x, residual, weight, 1e-5, MIDDLE)
    assert both is not None
    assert both[0] is normed
    assert both[1] is residual
    assert sums.and_norm(np.zeros((4, 32), np.float16), residual, weight, 1e-5, MIDDLE) is None
    assert StageSums(ways, plans(), fused_bytes={"window": 192}).and_norm(x, residual, weight, 1e-5, MIDDLE) is None
    carries = StageSums(ways, plans(), np.zeros((8, 32), CARRIED), {"window": 192})
    assert carries.and_norm(x, residual, weight, 1e-5, MIDDLE) is None
    assert carries.and_norm(x, residual, weight, 1e-5, LAST) is not None  # that one is exact
    assert not noted.said


def test_plans() -> None:
    trials = [Trial(name, KIB, us) for name, us in zip(NAMES, (5.0, 4.0, 7.0, 6.5), strict=True)]
    found = plans_of(trials, lambda way: True, 64)
    assert [plan.names[0] for plan in found.all] == ["window-int8", "window-int8", "window", "window-copies"]
    assert found.names == {"window-int8", "window", "window-copies"}
    assert found.of(is_exact=True, is_beside=True) is found.exact_beside
    only_exact = plans_of(trials, lambda way: not way.endswith("int8"), 64)
    assert only_exact.plan == only_exact.exact
    with pytest.raises(ConfigError, match="there is no way"):
        plans_of(trials, lambda way: way.endswith("int8"), 64)
