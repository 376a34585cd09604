"""Which rank this is, of how many, and on which host: what MPI says, and what ranks agree on before there are steps.

MPI is imported by name, and only where its launcher has started more than one rank.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import logging
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol, TypeVar

from engine.comm.board import RECORD_BYTES, Record
from engine.comm.failure import STDERR, AgreedError, Followed, Watch
from engine.comm.launcher import hold_connections
from engine.comm.leftovers import SHARED_MEMORY, names_of, sweep
from engine.comm.mpi_sums import MpiComm
from engine.comm.segment import Segment
from engine.env import launched_rank, launched_ranks
from engine.errors import ConfigError, EngineDeadError

logger = logging.getLogger(__name__)
T = TypeVar("T")
FIRST_NAP_S, LONGEST_NAP_S = 50e-6, 2e-3
SHARED_BYTES = 4 << 20  # of shared memory a rank; MPICH takes one MiB, and what messages lie in
JOIN_S = 60.0  # for all ranks to come
TAG = 7


class World(MpiComm, Protocol):
    """What is used of mpi4py.MPI.Intracomm besides."""

    def Dup(self) -> World: ...
    def Abort(self, errorcode: int = 0) -> None: ...
    def Iprobe(self, source: int, tag: int) -> bool: ...
    def isend(self, obj: Any, dest: int, tag: int) -> Any: ...
    def alltoall(self, sendobj: Any) -> Any: ...
    def recv(self, *, source: int, tag: int) -> Any: ...


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of a job. All methods are called by all of them, in the same order."""

    rank: int = 0
    size: int = 1
    host_ranks: tuple[int, ...] = (0,)  # those of this host, in order
    least_per_host: int = 1  # ranks of the host that has the fewest
    world: World | None = None  # for the communicator of the backend; None: there is but this rank
    control: World | None = None  # for what ranks agree on
    watch: Watch | None = None  # ends all where one fails

    @property
    def host_rank(self) -> int:
        """Which of the ranks of this host."""
        return self.host_ranks.index(self.rank)

    def gather(self, value: T, what: str, deadline_s: float = 600.0) -> list[T]:
        """What every rank brings, by rank, on every rank.

        Raises:
            EngineDeadError: not all have come in time; rank 0 says which are missing from what.
        """
        if self.control is None:
            return [value]
        if self.watch is None:
            return self._gather(self.control, value, what, deadline_s)
        self.watch.mine.meet()
        try:
            return self._gather(self.control, value, what, deadline_s)
        finally:
            self.watch.mine.idle()

    def _gather(self, control: World, value: T, what: str, deadline_s: float) -> list[T]:
        deadline = time.monotonic() + deadline_s
        if self.rank != 0:
            request = control.isend(value, 0, TAG)
            if not _nap_until(lambda: control.Iprobe(0, TAG), deadline + deadline_s):
                raise EngineDeadError(f"rank {self.rank}: no word from rank 0 in {what}")
            values: list[T] = control.recv(source=0, tag=TAG)
            request.wait()
            return values
        missing = set(range(1, self.size))
        found: dict[int, T] = {0: value}

        def has_all() -> bool:
            for rank in sorted(missing):
                if control.Iprobe(rank, TAG):
                    found[rank] = control.recv(source=rank, tag=TAG)
                    missing.discard(rank)
            return not missing

        if not _nap_until(has_all, deadline):
            late = ", ".join(map(str, sorted(missing)))
            raise EngineDeadError(f"{what}: rank {late} did not come within {deadline_s:.0f} s")
        values = [found[rank] for rank in range(self.size)]
        for request in [control.isend(values, rank, TAG) for rank in range(1, self.size)]:
            request.wait()
        return values

    def share(self, num_bytes: int, what: str) -> Segment:
        """Memory that the ranks of a host have in common, of zeros."""
        made = Segment.make(num_bytes) if self.host_rank == 0 else None
        addresses = self.gather(None if made is None else made.address, what)
        address = addresses[self.host_ranks[0]]
        assert address is not None, "the first rank of this host made one"
        segment, problems = made, []
        try:
            segment = made or Segment.open(address)
        except OSError as error:
            problems.append(f"the shared memory of this host cannot be opened: {error}")
        self.agree(problems, what)
        assert segment is not None, "or there was a problem"
        segment.close_file()
        return segment

    def minimum(self, value: int, what: str) -> int:
        """The least that any rank brings."""
        return min(self.gather(value, what))

    def guard(self) -> AbstractContextManager[None]:
        """What is raised inside ends all ranks of many, see Watch.guard."""
        return nullcontext() if self.watch is None else self.watch.guard()

    def within(self, seconds: float, what: str) -> AbstractContextManager[None]:
        """What takes longer inside ends all ranks of many, see Watch.within."""
        return nullcontext() if self.watch is None else self.watch.within(seconds, what)

    def agree(self, problems: Sequence[str], what: str) -> None:
        """Goes on where no rank has a problem.

        Raises:
            ConfigError: on rank 0, with the problems of all; what only some have names them.
            Followed: on the others.
        """
        said: dict[str, list[int]] = {}
        for rank, texts in enumerate(self.gather(problems, what)):
            for text in texts:
                said.setdefault(text, []).append(rank)
        lines = [
            text if len(ranks) == self.size else f"rank {', '.join(map(str, ranks))}: {text}"
            for text, ranks in said.items()
        ]
        if not lines:
            return
        if self.rank != 0:
            raise Followed(1)
        raise AgreedError("\n".join(lines))


def _nap_until(condition: Callable[[], bool], deadline: float) -> bool:
    """Whether it came true in time. Naps grow, so that who waits long burns no core."""
    nap = FIRST_NAP_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(nap)
        nap = min(2 * nap, LONGEST_NAP_S)
    return True


def host_name() -> str:
    """Equal where processes see each other's memory: one kernel, one namespace of processes and of networks."""
    return " ".join(
        (
            Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            os.readlink("/proc/self/ns/pid"),
            os.readlink("/proc/self/ns/net"),
        )
    )


def join_ranks(environ: Mapping[str, str]) -> Ranks:
    """The ranks that the MPI launcher has started; one rank, without MPI, where there was no launcher.

    Raises:
        ConfigError: mpi4py or an MPI library is not there, or the library is not the launcher's.
    """
    launched = launched_ranks(environ)
    if launched > 1:
        sweep()
        _check_shared_memory(launched)
    return Ranks() if launched == 1 else _join(launched)


@cache  # MPI is there once in a process
def _join(launched: int) -> Ranks:
    if launched_rank(os.environ) == 0:
        logger.info("MPI starts; all of its %d ranks must come within %.0f s", launched, JOIN_S)
    # MPI waits for all ranks with the interpreter locked, so no thread of Python could end this
    faulthandler.dump_traceback_later(JOIN_S, exit=True, file=STDERR)
    try:
        mpi = importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"started by MPI with {launched} ranks, but mpi4py does not load: {error}; "
            "pip install 'glint-llm[mpi]' brings it and MPICH"
        ) from error
    finally:
        faulthandler.cancel_dump_traceback_later()
    world: World = mpi.COMM_WORLD
    if world.size != launched:
        library = mpi.Get_library_version().split("\n")[0].strip()
        raise ConfigError(
            f"the launcher started {launched} ranks, but MPI sees {world.size}: it is not the launcher of the library "
            f"that mpi4py loads ({library}); start with that one's"
        )
    control = world.Dup()
    ranks = Ranks(world.rank, world.size, (world.rank,), 1, world, control)
    hosts = ranks.gather(host_name(), "the start")
    control.alltoall([None] * world.size)  # by now each has opened what it shares with each
    _drop_names()
    host = tuple(rank for rank, name in enumerate(hosts) if name == hosts[world.rank])
    ranks = replace(ranks, host_ranks=host, least_per_host=min(Counter(hosts).values()))

    def exchange(text: str) -> list[str]:
        texts = ranks.gather(text, "the start")
        return [texts[rank] for rank in host]

    hold_connections(os.environ, ranks.host_rank, len(host), exchange)
    num_records = len(host)
    segment = ranks.share(num_records * RECORD_BYTES, "the start")
    records = [Record(segment, number) for number in range(num_records)]
    records[ranks.host_rank].come()
    ranks.gather(None, "the start")
    is_alone = num_records == world.size
    watch = Watch(world.rank, ranks.host_ranks, records, (lambda: None) if is_alone else (lambda: world.Abort(1)))
    watch.start()
    return replace(ranks, watch=watch)


def _check_shared_memory(num_ranks: int) -> None:
    """Raises ConfigError where MPI would die of a bus error."""
    needed = SHARED_BYTES * num_ranks
    free = shutil.disk_usage(SHARED_MEMORY).free
    if free < needed:
        raise ConfigError(
            f"{SHARED_MEMORY} has {free / 1e6:.0f} MB free, and MPI needs {needed / 1e6:.0f} MB of it for {num_ranks} "
            "ranks; make it larger (docker run --shm-size=1g), or remove what is left there"
        )


def _drop_names() -> None:
    """Takes away the names of MPI's shared memory, which all have mapped by now: it would stay after a kill -9."""
    for path in names_of(Path("/proc/self/maps").read_text()):
        with contextlib.suppress(OSError):  # another rank was quicker
            os.unlink(path)
