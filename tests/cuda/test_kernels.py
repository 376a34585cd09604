"""Every kernel against its ref function, in every order of threads that the shim has, and under the sanitizers."""

from __future__ import annotations

import re
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


WATCHED = {  # by stem: kernels that are built for a sanitizer, and words of the cases that need no others
    "rmsnorm": (r"<bf16, [12]>", ("odd", "rounds")),
    "layernorm": (r"<bf16, [12]>", ("odd", "rounds")),
    "activation": (r"<bf16, kGelu>", ("gelu-odd", "gelu-one-short")),
    "embedding": (r"<bf16>", ("odd", "rounds")),
    "rope": (r"<bf16, (true|false), 4>", ("odd-partial", "gqa")),
}


@pytest.mark.parametrize("sanitizer", ["address", "thread"])
@pytest.mark.parametrize("stem", STEMS)
def test_under_a_sanitizer(stem: str, sanitizer: str) -> None:
    """address: each array is an allocation of its own size, and nothing beside it is touched. thread: no race.

    thread is slow to start, so it sees two cases.
    """
    pattern, words = WATCHED[stem]
    names = tuple(name for name in NAMES[stem] if re.search(pattern, name))
    watched = [case for case in cases(stem) if case.storage == "bfloat16" and any(w in case.name for w in words)]
    for case in watched if sanitizer == "address" else watched[:2]:
        assert case.check(Kernels(stem, names=names, sanitizer=sanitizer)) == []
