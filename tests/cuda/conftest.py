"""Faults planted in copies of kernels are judged side by side: building a kernel keeps one core busy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from engine.system import usable_cores
from tests.cuda.isolated import isolated

Judge = Callable[[Any, Path], str]  # of a fault and a folder to plant it in: what is found, "" = nothing
Verdict = Callable[[Judge], str]


@pytest.fixture(scope="session")
def _team() -> Iterator[ThreadPoolExecutor]:
    team = ThreadPoolExecutor(usable_cores())
    yield team
    team.shutdown(cancel_futures=True)


@pytest.fixture(scope="module")
def _begun() -> dict[str, dict[str, Future[str]]]:
    """Name of a test → name with parameters → what is found."""
    return {}


@pytest.fixture
def verdict(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    _team: ThreadPoolExecutor,
    _begun: dict[str, dict[str, Future[str]]],
) -> Verdict:
    """verdict(judge) is judge(fault, folder) of the test's parameter `fault`, in a process of its own.

    The first call begins this for all faults of the test that were chosen, as many at once as there are cores.
    """
    test = request.node

    def of(judge: Judge) -> str:
        if test.originalname not in _begun:
            _begun[test.originalname] = {
                item.name: _team.submit(
                    isolated, judge, item.callspec.params["fault"], tmp_path_factory.mktemp("fault")
                )
                for item in request.session.items
                if isinstance(item, pytest.Function)
                and (item.module, item.originalname) == (test.module, test.originalname)
            }
        return _begun[test.originalname][test.name].result()

    return of
