"""The window of the host, with stand-ins for CuPy and the driver: who writes to it first, and what ranks say of it."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine.comm.segment import Segment
from engine.errors import ConfigError

PAGE = 4096


class CUDARuntimeError(RuntimeError):
    """As CuPy's."""


class Meeting:
    """Of threads."""

    def __init__(self, rank: int, said: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self._said, self._barrier = rank, len(said), said, barrier

    def allgather(self, value: Any) -> list[Any]:
        self._said[self.rank] = value
        self._barrier.wait(10)
        found = list(self._said)
        self._barrier.wait(10)
        return found


def meetings(size: int) -> list[Meeting]:
    said: list[Any] = [None] * size
    barrier = threading.Barrier(size)
    return [Meeting(rank, said, barrier) for rank in range(size)]


def together(of_rank: Callable[[Meeting], Any]) -> list[Any]:
    with ThreadPoolExecutor(2) as team:
        return [run.result(20) for run in [team.submit(of_rank, meeting) for meeting in meetings(2)]]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """host_window; `pinned` of its CuPy says what was pinned, and can refuse."""
    cupy: Any = ModuleType("cupy")
    cupy.pinned = []

    def register(address: int, num_bytes: int, flags: int) -> None:
        cupy.pinned.append((address, num_bytes))

    runtime = SimpleNamespace(hostRegister=register, hostUnregister=None, CUDARuntimeError=CUDARuntimeError)
    cupy.cuda = SimpleNamespace(runtime=runtime, UnownedMemory=lambda *_: None, MemoryPointer=lambda *_: None)
    cupy.ndarray = lambda shape, dtype, memory: np.zeros(shape, dtype)
    bindings: Any = ModuleType("cuda.bindings")
    bindings.driver = SimpleNamespace(cuMemHostGetDevicePointer=lambda address, flags: (0, address))
    gpu: Any = ModuleType("engine.kernels.gpu")
    gpu.check = lambda result, name: result[1]
    for name, stub in (("cupy", cupy), ("cuda.bindings", bindings), ("engine.kernels.gpu", gpu)):
        monkeypatch.setitem(sys.modules, name, stub)
    monkeypatch.delitem(sys.modules, "engine.comm.host_window", raising=False)
    yield importlib.import_module("engine.comm.host_window")
    sys.modules.pop("engine.comm.host_window", None)


def test_each_rank_writes_first_to_what_it_reads_most(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """One byte a page, before anybody pins it: the page is then of the rank's NUMA node."""
    written: list[tuple[int, int, int]] = []  # first page, how many, how many windows were pinned by then

    class Spied(np.ndarray):
        def __setitem__(self, key: Any, value: Any) -> None:
            super().__setitem__(key, value)
            begin = self.__array_interface__["data"][0] - self.base.__array_interface__["data"][0]
            written.append((begin // PAGE, len(range(*key.indices(len(self)))), len(sys.modules["cupy"].pinned)))

    frombuffer = np.frombuffer
    monkeypatch.setattr(module.np, "frombuffer", lambda *arguments: frombuffer(*arguments).view(Spied))
    places = [[slice(PAGE, 3 * PAGE), slice(8 * PAGE, 8 * PAGE + 10)], [slice(3 * PAGE, 5 * PAGE)]]
    together(lambda meeting: module.HostWindow(meeting, 10 * PAGE, places[meeting.rank]))
    assert sorted(written) == [(1, 2, 0), (3, 2, 0), (8, 1, 0)]
    assert [num_bytes for _, num_bytes in sys.modules["cupy"].pinned] == [10 * PAGE] * 2


def test_both_ranks_see_the_same_memory(module: ModuleType) -> None:
    first, second = together(lambda meeting: module.HostWindow(meeting, 100))
    first.host[5] = 7
    assert second.host[5] == 7
    assert len(first.host) == PAGE


@pytest.mark.parametrize("what", ["pin", "open"])
def test_a_rank_without_a_window_ends_it_for_all(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def refuse(*_: Any) -> None:
        raise (CUDARuntimeError("no pages") if what == "pin" else OSError("no way"))

    runtime: Any = sys.modules["cupy"].cuda.runtime  # type: ignore[attr-defined]
    if what == "pin":
        monkeypatch.setattr(runtime, "hostRegister", refuse)
    else:
        monkeypatch.setattr(Segment, "open", refuse)

    def of_rank(meeting: Meeting) -> str:
        with pytest.raises(ConfigError) as error:
            module.HostWindow(meeting, 10 * PAGE)
        return str(error.value)

    said = together(of_rank)
    assert said[0] == said[1]
    assert ("rank 1 has no window of the host of 0 MB: no pages" if what == "pin" else "no way") in said[0]
