"""Ranks copy arrays to each other: whichever lane is ahead, every rank gets all, and the words are as they were."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.comm import copy_order
from engine.comm.copy_order import FREE, LEAST_BYTES, NUM_LANES, NUM_PLACES, PIECES, PLACE_BYTES, Piece, cut, exchange

Bytes = NDArray[np.uint8]
Op = tuple[Callable[[], bool], Callable[[], None]]  # whether it can be done now, and what it does


class Host:
    """What ranks share: words, and places that say when they are read while they are torn."""

    def __init__(self, size: int) -> None:
        self.words = np.zeros((size, size, copy_order.NUM_PLACES), int)
        self.places = np.zeros((size, copy_order.NUM_PLACES, copy_order.PLACE_BYTES), np.uint8)


class Queue:
    """A lane that does nothing until it is asked to."""

    def __init__(self, host: Host, rank: int, x: Bytes, found: Bytes) -> None:
        self.ops: deque[Op] = deque()
        self._host, self._rank, self._x, self._found = host, rank, x, found

    def wait(self, sender: int, receiver: int, place: int, value: int) -> None:
        self.ops.append((lambda: self._host.words[sender, receiver, place] == value, lambda: None))

    def write(self, sender: int, receiver: int, place: int, value: int) -> None:
        def do() -> None:
            self._host.words[sender, receiver, place] = value

        self.ops.append((lambda: True, do))

    def put(self, piece: Piece) -> None:
        def do() -> None:
            self._host.places[self._rank, piece.place, : piece.size] = self._x[piece.begin :][: piece.size]

        self.ops.append((lambda: True, do))

    def take(self, sender: int, piece: Piece) -> None:
        def do() -> None:
            self._found[sender, piece.begin :][: piece.size] = self._host.places[sender, piece.place, : piece.size]

        self.ops.append((lambda: True, do))


def run(queues: list[Queue], rng: np.random.Generator) -> None:
    """One thing of any lane after another, as long as there is one that can be done."""
    while any(queue.ops for queue in queues):
        ready = [queue for queue in queues if queue.ops and queue.ops[0][0]()]
        assert ready, "all lanes wait"
        queue = ready[int(rng.integers(len(ready)))]
        queue.ops.popleft()[1]()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Places that are used again and again within an array."""
    monkeypatch.setattr(copy_order, "NUM_PLACES", 4)
    monkeypatch.setattr(copy_order, "PLACE_BYTES", 8)
    monkeypatch.setattr(copy_order, "LEAST_BYTES", 4)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("num_lanes", [1, 2])
def test_every_rank_gets_the_arrays_of_all(size: int, num_lanes: int) -> None:
    """Three calls that a rank may be ahead with, as its streams are: each rank's lanes end before its next call."""
    rng = np.random.default_rng(size)
    for _ in range(6):
        host = Host(size)
        for num_bytes in (1, 61, 200):
            arrays = rng.integers(1, 256, (size, num_bytes), np.uint8)
            found = np.zeros((size, size, num_bytes), np.uint8)
            queues: list[Queue] = []
            for rank in range(size):
                lanes = [Queue(host, rank, arrays[rank], found[rank]) for _ in range(2 * num_lanes)]
                exchange(copy_order.cut(num_bytes), lanes[:num_lanes], lanes[num_lanes:], rank, size)
                queues += lanes
            run(queues, rng)
            for rank in range(size):
                others = np.arange(size) != rank
                assert (found[rank][others] == arrays[others]).all()
            assert (host.words == FREE).all(), "a graph can be launched again"


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("lost", ["wait", "write"])
def test_the_words_are_needed(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without waiting something is torn in one of some orders; without writing all lanes wait."""
    monkeypatch.setattr(Queue, lost, lambda *arguments: None)
    with pytest.raises(AssertionError):
        test_every_rank_gets_the_arrays_of_all(2, 2)


@pytest.mark.parametrize("num_bytes", [2, LEAST_BYTES, LEAST_BYTES + 2, 16 << 20, (64 << 20) + 6])
def test_pieces(num_bytes: int) -> None:
    """They make up the array; each fits in its place; places are used in turn; few of them where that is possible."""
    pieces = cut(num_bytes)
    ends = np.cumsum([piece.size for piece in pieces])
    assert ends[-1] == num_bytes
    assert [piece.begin for piece in pieces] == [0, *ends[:-1]]
    assert all(0 < piece.size <= PLACE_BYTES for piece in pieces)
    assert [piece.place for piece in pieces] == [i % NUM_PLACES for i in range(len(pieces))]
    assert len(pieces) <= max(PIECES, -(-num_bytes // PLACE_BYTES))


def test_a_lane_has_its_places_to_itself() -> None:
    """A lane does things in order: a place that two lanes wrote could be full of the later piece first."""
    assert NUM_PLACES % NUM_LANES == 0
