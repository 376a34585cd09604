"""When a rank dies, fails, hangs or loses its launcher: it is named once, in the log of the lowest rank that lives, and
every rank of the job ends.

Each rank has a thread that watches the processes of its host through pidfds, beats, and reads the board. Who names
tells its front end first, so that it answers "not healthy" for as long as it is there.
"""

from __future__ import annotations

import atexit
import faulthandler
import logging
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from engine.comm.alarm import Alarms
from engine.comm.board import Doing, Record, State
from engine.comm.launcher import launchers
from engine.comm.naming import HANG_S, late, where
from engine.errors import ConfigError, GlintError, StopSignal

logger = logging.getLogger(__name__)

BEAT_S = 0.1  # between two looks at the board
SILENT_S = 1.0  # a rank that has not beaten for so long may be stopped
LINGER_S = 1.0  # while /health says that the engine is dead
PF_EXITING = 0x4  # of Linux's flags of a process
LOOKS, LOOK_S = 10, 2e-3  # at the status of one that ends
STDERR = 2
PATIENCE_S = 3.0  # of a rank that waits to be ended by the one who names


class Followed(SystemExit):
    """Raised in ranks other than 0 where there is nothing left for them to do. It ends the process if not caught."""


class AgreedError(ConfigError):
    """All ranks know of it, and end by themselves."""


class Watch:
    """Watches the ranks of this host, of which this process is one."""

    def __init__(self, rank: int, host_ranks: Sequence[int], records: Sequence[Record], abort: Callable[[], None]):
        """
        Args:
            records: of the ranks of this host, which all have come.
            abort: ends the ranks of other hosts; may never return.
        """
        self.mine = records[host_ranks.index(rank)]
        self.tell: Callable[[str], None] = lambda reason: None  # who else must know, before the end
        self.alarms = Alarms()  # of kernels that wait for other ranks
        self.is_followed = False  # this is rank 0, and the others wait for the plans of its engine
        self._rank, self._abort = rank, abort
        self._all = dict(zip(host_ranks, records, strict=True))
        self._peers = {number: record for number, record in self._all.items() if number != rank}
        self._files = {number: os.pidfd_open(record.pid) for number, record in self._peers.items()}
        self._launchers = {os.pidfd_open(pid): (pid, name) for pid, name in launchers()}
        self._ending = threading.Lock()

    def start(self) -> None:
        """From now on, until the process ends: then this rank is done, unless it has failed."""
        atexit.register(self.mine.end, State.DONE)
        threading.excepthook = self._on_thread_error
        sys.excepthook = self._on_error
        threading.Thread(target=self._run, name="ranks-watch", daemon=True).start()

    @contextmanager
    def guard(self) -> Iterator[None]:
        """What is raised inside ends the job; AgreedError and Followed end this rank alone, as they should."""
        try:
            yield
        except (AgreedError, Followed):
            raise
        except GlintError as error:
            self.fail(str(error))
        except StopSignal as stop:
            logger.info("stopped by %s before it was ready", stop.args[0].name)
            self.end_all("", 128 + int(stop.args[0]))
        except SystemExit as error:
            logger.exception("rank %d: sys.exit", self._rank)
            self.fail(f"it called sys.exit({error.code!r})")
        except BaseException as error:
            logger.exception("rank %d: an exception that nothing catches", self._rank)
            self.fail(f"{type(error).__name__}: {error}")

    @contextmanager
    def within(self, seconds: float, what: str) -> Iterator[None]:
        """What takes longer inside ends the job, once the log says where each rank waits."""
        timer = threading.Timer(seconds, self._give_up, (seconds, what))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _give_up(self, seconds: float, what: str) -> NoReturn:
        faulthandler.dump_traceback(STDERR)  # of more than 100 threads it leaves the oldest out, and so the main one
        traceback.print_stack(sys._current_frames()[threading.main_thread().ident or 0])
        self.fail(f"{what} took longer than {seconds:.0f} s; where it waits is above")

    def fail(self, reason: str) -> NoReturn:
        """This rank cannot go on; ends all."""
        self.mine.end(State.FAILED, reason)
        if self._names():
            self.end_all(f"rank {self._rank} (pid {os.getpid()}) has failed: {reason}")
        time.sleep(PATIENCE_S)
        os._exit(1)

    def end_all(self, reason: str, code: int = 1) -> NoReturn:
        """Says why, and ends every rank of the job, this one with the code."""
        if not self._ending.acquire(blocking=False):
            threading.Event().wait()  # another thread is at it
        if reason:
            self.tell(reason)  # before MPICH's launcher reads the line below, sees who is dead, and kills this rank too
        self.alarms.give()  # a process whose kernels wait takes longer to end
        if reason:
            logger.error("%s; all ranks end", reason)
            time.sleep(LINGER_S)
        self.mine.end(State.LEAVING)
        threading.Timer(PATIENCE_S, os._exit, (code or 1,)).start()
        for file in self._files.values():
            with suppress(OSError):
                signal.pidfd_send_signal(file, signal.SIGKILL)
        self._abort()
        os._exit(code)

    def _run(self) -> None:
        poller = select.poll()
        for file in (*self._files.values(), *self._launchers):
            poller.register(file, select.POLLIN)
        dead: set[int] = set()
        while True:
            looked = time.monotonic()
            found = [file for file, _ in poller.poll(BEAT_S * 1e3)]
            self.mine.beat()
            self.mine.show(self.alarms.wait)
            for file in found:
                poller.unregister(file)
            found += [file for number, file in self._files.items() if _is_ending(self._peers[number].pid)]
            reason = self._launcher_gone(found) or self._dead(found, dead) or self._failed() or self._missed(dead)
            reason = reason or self.alarms.problem
            silent: Set[int] = frozenset()
            if not reason and time.monotonic() - looked < SILENT_S:  # or this process was stopped, as others may be
                silent = self._stopped()
                reason = late(self._all, silent)
            if reason and self.mine.state is not State.DONE:
                self._act(reason, dead | silent)

    def _act(self, reason: str, silent: Set[int]) -> NoReturn:
        if self._names(silent):
            self.end_all(reason)
        time.sleep(PATIENCE_S)
        logger.error("rank %d ends: %s", self._rank, reason)
        os._exit(1)

    def _names(self, silent: Set[int] = frozenset()) -> bool:
        """Whether this is the lowest rank of this host, those aside that cannot speak."""
        return all(self._rank < number for number in self._peers if number not in silent)

    def _launcher_gone(self, found: Sequence[int]) -> str:
        for file in found:
            if file in self._launchers:
                pid, name = self._launchers[file]
                return f"the launcher {name} (pid {pid}) is gone"
        return ""

    def _dead(self, found: Sequence[int], dead: set[int]) -> str:
        """Why a rank whose process is gone should not be; dead gets the numbers of those that are gone."""
        reason = ""
        for number, file in self._files.items():
            if file not in found:
                continue
            dead.add(number)
            record = self._peers[number]
            if record.state is State.FAILED:
                reason = reason or _said(number, record)
            elif record.state is State.ALIVE:
                reason = reason or f"rank {number} (pid {record.pid}) {_how_it_ended(record.pid)}{where(record)}"
        return reason

    def _failed(self) -> str:
        for number, record in self._peers.items():
            if record.state is State.FAILED:
                return _said(number, record)
        return ""

    def _missed(self, dead: Set[int]) -> str:
        """Whether this rank waits for others before there are steps, and one of them has ended."""
        if not dead or self.mine.doing is not Doing.MEETING or self.mine.seconds_since_change < HANG_S:
            return ""
        number = min(dead)
        return f"rank {number} (pid {self._peers[number].pid}) has ended, and others wait for it"

    def _stopped(self) -> set[int]:
        """Ranks that a signal or a debugger has stopped."""
        return {
            number
            for number, record in self._peers.items()
            if record.seconds_since_beat > SILENT_S and _is_stopped(record.pid)
        }

    def _on_error(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """What nothing in the main thread has caught."""
        if issubclass(kind, KeyboardInterrupt):
            self.end_all("", 128 + signal.SIGINT)
        if not issubclass(kind, AgreedError):
            logger.error("rank %d: an exception that nothing catches", self._rank, exc_info=(kind, error, trace))
            self.fail(f"{kind.__name__}: {error}")
        sys.__excepthook__(kind, error, trace)

    def _on_thread_error(self, arguments: threading.ExceptHookArgs) -> None:
        if arguments.exc_value is None or isinstance(arguments.exc_value, SystemExit):
            return  # a thread that ends itself
        name = "" if arguments.thread is None else arguments.thread.name
        logger.error("rank %d: an exception in thread %s", self._rank, name, exc_info=arguments.exc_value)
        self.fail(f"{type(arguments.exc_value).__name__} in thread {name}: {arguments.exc_value}")


def _said(number: int, record: Record) -> str:
    return f"rank {number} (pid {record.pid}) has failed{where(record)}: {record.text}"


def _how_it_ended(pid: int) -> str:
    """From the status that Linux shows for as long as nobody has asked for it."""
    for _ in range(LOOKS):
        with suppress(OSError, IndexError, ValueError):
            fields = _stat(pid)
            status = int(fields[49])
            if os.WIFSIGNALED(status):
                return f"was killed by {signal.Signals(os.WTERMSIG(status)).name}"
            if status or fields[0] == "Z":
                return f"ended with exit code {os.WEXITSTATUS(status)}"
            time.sleep(LOOK_S)  # it is about to be said
    return "is gone"


def _is_ending(pid: int) -> bool:
    """Whether it has begun to: a GPU's memory is given back before a pidfd says that it is over, which takes a while
    (0.4 s for little memory)."""
    with suppress(OSError):
        fields = _stat(pid)
        return fields[0] in "ZX" or bool(int(fields[6]) & PF_EXITING)
    return False


def _is_stopped(pid: int) -> bool:
    with suppress(OSError):
        return _stat(pid)[0] in "Tt"
    return False


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the name, see proc(5): the state, which is the third, is the first here."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
