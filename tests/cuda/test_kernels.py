"""The kernels where the cases of conformance (tests/conformance/test_kernel_cases.py) do not look."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from conformance.case import Case
from conformance.check import check
from conformance.host_device import ORDERS, HostDevice
from conformance.machines import host_machine
from conformance.suite import cases
from engine.cpu import sampling
from engine.kernels.table import kernel_ops
from tests.cuda.edges import EDGES

SHARP = ("odd", "wider-than-a-block", "one-short-of-16-bytes", "gqa", "dim80", "padding")  # ends that are easy to miss
STEMS = ("rmsnorm", "layernorm", "activation", "embedding", "rope", "kv_cache", "attention_logn")


def cases_of(stem: str, storage: str = "bfloat16") -> list[Case]:
    return [case for case in cases("host") if case.stem == stem and case.storage == storage and "host" not in case.skip]


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("edge", [edge for edges in EDGES.values() for edge in edges], ids=lambda edge: edge.__name__)
def test_edge(edge: Callable[[Any], list[str]], order: tuple[str, int]) -> None:
    assert edge(kernel_ops(HostDevice(*order), sampling)) == []


@pytest.mark.parametrize("sanitizer", ["address", "thread"])
@pytest.mark.parametrize("stem", STEMS)
def test_under_a_sanitizer(stem: str, sanitizer: str) -> None:
    """address: each array is an allocation of its own size, and nothing beside it is touched. thread: no race.

    thread is slow to start, so it sees two cases.
    """
    sharp = [case for case in cases_of(stem) if any(word in case.name for word in SHARP)]
    sharp = sharp if sanitizer == "address" else [sharp[0], sharp[-1]]
    machine = host_machine(sharp, sanitizer=sanitizer)
    for case in sharp:
        result = check(case, machine.ops, memory=machine.memory, repeats=False)
        assert not result.problems, f"{case.name}: {result.problems}"
