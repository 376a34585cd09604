"""Ranks as threads of one process: what engine.comm.mpi_sums uses of MPI, over queues."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class Wires:
    """A queue from each rank to each; and those of the groups into which ranks are split."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: dict[int, Wires] = defaultdict(Wires)
        self._queues: dict[tuple[str, int, int], SimpleQueue[Array]] = defaultdict(SimpleQueue)

    def queue(self, kind: str, source: int, dest: int) -> SimpleQueue[Array]:
        with self._lock:
            return self._queues[kind, source, dest]

    def group(self, color: int) -> Wires:
        with self._lock:
            return self._groups[color]


class Done:
    def Test(self) -> bool:
        return True


class Arriving:
    """Is done when what comes has been put where it belongs."""

    def __init__(self, sources: Sequence[tuple[SimpleQueue[Array], Array]]) -> None:
        self._sources = list(sources)

    def Test(self) -> bool:
        while self._sources and not self._sources[0][0].empty():
            queue, place = self._sources.pop(0)
            arrived = queue.get()
            assert arrived.nbytes == place.nbytes, "a rank sends more or less than another expects"
            place[...] = arrived.view(place.dtype).reshape(place.shape)
        return not self._sources


class ThreadComm:
    """One rank's end. Methods and arguments are those of mpi4py.MPI.Intracomm."""

    def __init__(self, wires: Wires, rank: int, size: int) -> None:
        self._wires, self.rank, self.size = wires, rank, size

    def Split(self, color: int, key: int) -> ThreadComm:
        """Once. Keys count the ranks of a color."""
        mine = np.array([color, key])
        everyone = np.empty((self.size, 2), mine.dtype)
        arriving = self.Iallgather(mine, everyone)
        while not arriving.Test():
            time.sleep(1e-4)
        size = int(np.count_nonzero(everyone[:, 0] == color))
        return ThreadComm(self._wires.group(color), key, size)

    def Ibcast(self, buf: Array, root: int) -> Done | Arriving:
        if self.rank != root:
            return Arriving([(self._wires.queue("all", root, self.rank), buf)])
        for dest in range(self.size):
            if dest != root:
                self._put("all", buf, dest)
        return Done()

    def Isend(self, buf: Array, dest: int) -> Done:
        return self._put("point", buf, dest)

    def Irecv(self, buf: Array, source: int) -> Arriving:
        return Arriving([(self._wires.queue("point", source, self.rank), buf)])

    def Iallgather(self, sendbuf: Array, recvbuf: Array) -> Arriving:
        counts = [recvbuf.size // self.size] * self.size
        return self.Iallgatherv(sendbuf, [recvbuf.reshape(-1), counts])

    def Iallgatherv(self, sendbuf: Array, recvbuf: Any) -> Arriving:
        whole, counts = recvbuf
        for dest in range(self.size):
            self._put("all", sendbuf, dest)
        return self._all(np.split(whole, np.cumsum(counts)[:-1]))

    def Ialltoallv(self, sendbuf: Any, recvbuf: Any) -> Arriving:
        sent, counts = sendbuf
        for dest, piece in enumerate(np.split(sent, np.cumsum(counts)[:-1])):
            self._put("all", piece, dest)
        whole, counts = recvbuf
        return self._all(np.split(whole.reshape(-1), np.cumsum(counts)[:-1]))

    def Igather(self, sendbuf: Array, recvbuf: Array, root: int) -> Done | Arriving:
        done = self._put("all", sendbuf, root)
        return self._all(list(recvbuf)) if self.rank == root else done

    def _put(self, kind: str, array: Array, dest: int) -> Done:
        self._wires.queue(kind, self.rank, dest).put(np.array(array))
        return Done()

    def _all(self, places: list[Array]) -> Arriving:
        return Arriving([(self._wires.queue("all", source, self.rank), place) for source, place in enumerate(places)])


def on_ranks(size: int, work: Callable[[ThreadComm], Any]) -> list[Any]:
    """What work gives on each of so many ranks."""
    wires = Wires()
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: work(ThreadComm(wires, rank, size)), range(size)))
