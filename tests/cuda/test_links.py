"""Links of GPUs that reach each other in islands alone, over memory and kernels of this CPU: ranks are threads."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from conformance.host_device import HostDevice
from engine.comm.ways import ISLANDS, kernels_of, ways_of
from ref.collectives import all_reduce

SOCKETS = "aaaabbbb"  # which GPUs reach each other, by rank
HALF = np.dtype(ml_dtypes.bfloat16)


class Meeting:
    """Of threads."""

    def __init__(self, rank: int, said: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self._said, self._barrier = rank, len(said), said, barrier

    def allgather(self, value: Any) -> list[Any]:
        self._said[self.rank] = value
        self._barrier.wait(100)
        found = list(self._said)
        self._barrier.wait(100)
        return found


class Memory:
    """Stands in for HostWindow: what rank 0 has is everybody's. And for PeerMemory: members have each other's."""

    def __init__(self, meeting: Meeting, num_bytes: int, others: Sequence[Any] = ()) -> None:
        whole = meeting.allgather(np.zeros(num_bytes, np.uint8))
        self.array = self.host = whole[0]
        if isinstance(others, range):
            self.parts = [whole[rank] for rank in others]

    def close(self) -> None: ...


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """engine.comm.links, with stand-ins for what only a GPU has; `near` says who reaches whom."""
    cupy: Any = ModuleType("cupy")
    cupy.zeros = np.zeros
    cupy.cuda = SimpleNamespace(Device=lambda: SimpleNamespace(synchronize=lambda: None))
    window: Any = ModuleType("engine.comm.host_window")
    window.HostWindow = Memory
    peer: Any = ModuleType("engine.comm.peer")
    peer.PeerMemory = Memory
    peer.near = SOCKETS
    peer.problems_of = lambda meeting: [
        ["" if a == b else f"{a} is far from {b}" for b in peer.near] for a in peer.near
    ]
    copies: Any = ModuleType("engine.comm.copies")
    copies.Copies = None
    stubs = {"cupy": cupy, "engine.comm.host_window": window, "engine.comm.peer": peer, "engine.comm.copies": copies}
    for name, stub in stubs.items():
        monkeypatch.setitem(sys.modules, name, stub)
    monkeypatch.delitem(sys.modules, "engine.comm.links", raising=False)
    monkeypatch.setattr(importlib.import_module("engine.comm.links"), "ONE_TRIP_BYTES", 1 << 14)
    yield importlib.import_module("engine.comm.links")
    sys.modules.pop("engine.comm.links", None)


def together(size: int, of_rank: Callable[[Meeting], Any]) -> list[Any]:
    said: list[Any] = [None] * size
    barrier = threading.Barrier(size)
    with ThreadPoolExecutor(size) as team:
        runs = [team.submit(of_rank, Meeting(rank, said, barrier)) for rank in range(size)]
        return [run.result(120) for run in runs]


@pytest.mark.parametrize("near", ["aabb", "aaabbb", SOCKETS])
def test_ranks_of_islands_add_up(near: str, links: Any) -> None:
    """Through the memory that Links has cut out: not one bit is another, call after call, also after a failure."""
    sys.modules["engine.comm.peer"].near = near
    size, device = len(near), HostDevice()
    x = np.random.default_rng(3).standard_normal((3, size, 16, 512)).astype(HALF)

    def of_rank(meeting: Meeting) -> list[Any]:
        mine = links.Links(meeting, largest_island=1 << 30, has_copies=False)
        assert mine.island_size == size // 2
        assert list(mine.channels) == list(mine.exchanges) == ["window"]
        if meeting.rank == 0:
            kernels = kernels_of(mine.channels, mine.exchanges, HALF, islands=mine.islands)
            device.build([kernel for kernel in kernels if kernel.stem == "all_reduce_islands"])
        meeting.allgather(None)
        mine.set_patience(20.0)
        way = ways_of(mine.channels, mine.exchanges, None, device, islands=mine.islands)[ISLANDS]
        found = []
        for number, shards in enumerate(x):
            if number == 2:
                mine.forget()
            found.append(device.as_rank(meeting.rank, partial(way.sum, shards[meeting.rank], None, None)))
        assert mine.alarm.problem == ""
        return found

    expected = [all_reduce(list(shards))[0].tobytes() for shards in x]
    for found in together(size, of_rank):
        assert [array.tobytes() for array in found] == expected


@pytest.mark.parametrize(
    ("near", "largest", "names"),
    [("aaaa", 8, ["window", "peer"]), ("abcd", 8, ["window"]), ("aaaa", 1, ["window"])],
)
def test_where_all_reach_all_or_none_there_are_no_islands(
    near: str, largest: int, names: list[str], links: Any
) -> None:
    sys.modules["engine.comm.peer"].near = near
    for found in together(4, lambda meeting: links.Links(meeting, largest_island=largest, has_copies=False)):
        assert found.islands is None
        assert list(found.channels) == names
        assert ISLANDS not in ways_of(found.channels, found.exchanges, None, HostDevice(), islands=found.islands)


def test_two_islands_can_be_asked_for(links: Any) -> None:
    """As if GPUs of the two halves did not reach each other, which all do."""
    sys.modules["engine.comm.peer"].near = "aaaa"
    for found in together(4, lambda meeting: links.Links(meeting, largest_island=2, has_copies=False)):
        assert found.island_size == 2
        assert found.islands.island_size == 2
