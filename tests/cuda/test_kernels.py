"""The kernels where the cases of conformance (tests/conformance/test_kernel_cases.py) do not look."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from conformance.case import Case
from conformance.check import check
from conformance.host_device import ORDERS, HostDevice
from conformance.machines import Machine, host_machine
from conformance.suite import cases
from engine.cpu import sampling
from engine.kernels.table import kernel_ops
from engine.system import usable_cores
from tests.cuda.edges import EDGES

SHARP = ("odd", "wider-than-a-block", "one-short-of-16-bytes", "gqa", "dim80", "padding")  # ends that are easy to miss
STEMS = ("rmsnorm", "layernorm", "activation", "embedding", "rope", "kv_cache", "attention_logn")


def cases_of(stem: str, storage: str = "bfloat16") -> list[Case]:
    return [case for case in cases("host") if case.stem == stem and case.storage == storage and "host" not in case.skip]


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("edge", [edge for edges in EDGES.values() for edge in edges], ids=lambda edge: edge.__name__)
def test_edge(edge: Callable[[Any], list[str]], order: tuple[str, int]) -> None:
    assert edge(kernel_ops(HostDevice(*order), sampling)) == []


def sharp(stem: str, sanitizer: str) -> list[Case]:
    """thread is slow to start, so it sees two cases."""
    found = [case for case in cases_of(stem) if any(word in case.name for word in SHARP)]
    return found if sanitizer == "address" else [found[0], found[-1]]


@pytest.fixture(scope="module")
def watched(request: pytest.FixtureRequest) -> Iterator[dict[tuple[str, str], Future[Machine]]]:
    """Stem and sanitizer of each test that was chosen → where its cases run. Several are built at once."""
    name = test_under_a_sanitizer.__name__
    items = [item for item in request.session.items if getattr(item, "originalname", "") == name]
    chosen = [(item.callspec.params["stem"], item.callspec.params["sanitizer"]) for item in items]
    with ThreadPoolExecutor(usable_cores()) as team:
        yield {one: team.submit(host_machine, sharp(*one), sanitizer=one[1]) for one in chosen}


@pytest.mark.parametrize("sanitizer", ["address", "thread"])
@pytest.mark.parametrize("stem", STEMS)
def test_under_a_sanitizer(stem: str, sanitizer: str, watched: dict[tuple[str, str], Future[Machine]]) -> None:
    """address: each array is an allocation of its own size, and nothing beside it is touched. thread: no race."""
    machine = watched[stem, sanitizer].result()
    for case in sharp(stem, sanitizer):
        result = check(case, machine.ops, memory=machine.memory, repeats=False)
        assert not result.problems, f"{case.name}: {result.problems}"
