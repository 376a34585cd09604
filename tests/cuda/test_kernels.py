"""Every kernel against its ref function, in every order of threads that the shim has, and under the sanitizers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cuda.cases import Case, cases
from tests.cuda.launchers import NAMES, Kernels

STEMS = tuple(NAMES)
ORDERS: tuple[dict[str, Any], ...] = (
    {"schedule": "in_step"},
    {"schedule": "greedy"},
    *({"schedule": "random", "seed": seed} for seed in range(2)),
)


@pytest.mark.parametrize("case", [case for stem in STEMS for case in cases(stem)], ids=str)
def test_case(case: Case) -> None:
    for how in ORDERS:
        assert case.check(Kernels(case.stem, how=how)) == [], how
