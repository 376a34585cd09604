"""Who is named: a rank that is waited for, stopped, or gone, told from a board that a test writes."""

from __future__ import annotations

import logging
import os
import platform
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NoReturn

import pytest

from engine.comm import failure
from engine.comm.board import RECORD_BYTES, TEXT_BYTES, Doing, Record, State
from engine.comm.failure import AgreedError, Followed, Watch
from engine.comm.launcher import launchers
from engine.comm.naming import late
from engine.comm.segment import Segment
from engine.errors import ConfigError
from tests.serve.servers import until


class EndedError(BaseException):
    """In place of the end of the process."""


@dataclass
class Job:
    """Ranks of which this process is one; the others are processes that sleep."""

    watch: Watch
    records: list[Record]
    sleepers: list[subprocess.Popen[bytes]]
    ends: list[int] = field(default_factory=list)
    told: list[str] = field(default_factory=list)


@contextmanager
def job(rank: int, size: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    segment = Segment.make(size * RECORD_BYTES)
    records = [Record(segment, number) for number in range(size)]
    sleepers = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(size - 1)]
    for number, sleeper in zip([n for n in range(size) if n != rank], sleepers, strict=True):
        records[number].come()
        segment.words[number * RECORD_BYTES // 8] = sleeper.pid
    records[rank].come()
    made = Job(Watch(rank, tuple(range(size)), records, lambda: None), records, sleepers)
    made.watch.tell = made.told.append

    def end(code: int) -> NoReturn:
        made.ends.append(code)
        raise EndedError

    monkeypatch.setattr(failure.os, "_exit", end)
    monkeypatch.setattr(failure.time, "sleep", lambda seconds: None)
    try:
        yield made
    finally:
        for sleeper in sleepers:
            sleeper.kill()
            sleeper.communicate()
        for thread in threading.enumerate():
            if isinstance(thread, threading.Timer):
                thread.cancel()


def ago(records: list[Record], number: int, seconds: float) -> None:
    """It has done so for so long."""
    words = records[number]._words
    words[5] -= int(seconds * 1e9)


def test_nobody_is_late_while_nobody_waits_long(monkeypatch: pytest.MonkeyPatch) -> None:
    with job(0, 3, monkeypatch) as ranks:
        assert late(ranks.watch._all, set()) == ""
        for record in ranks.records:
            record.announce(4)
            record.begin()
        ranks.records[0].wait()
        ago(ranks.records, 0, 1.9)
        assert late(ranks.watch._all, set()) == ""


def test_the_rank_that_computes_while_others_wait_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """After 2 s, or 5 times the planned time."""
    with job(0, 3, monkeypatch) as ranks:
        for record in ranks.records:
            record.announce(4)
            record.begin()
            record.wait()
            record.go_on()
        for number in (0, 2):
            ranks.records[number].wait()
            ago(ranks.records, number, 2.5)
        named = late(ranks.watch._all, set())
        assert f"rank 1 (pid {ranks.sleepers[0].pid}) hangs in step 4, collective 1: " in named
        assert "has waited for 2.5 s in step 4, collective 2 (limit 2.0 s)" in named
        ranks.records[0].plan(1.0)
        assert late(ranks.watch._all, set()) == ""
        ago(ranks.records, 0, 3.0)
        assert "(limit 5.0 s)" in late(ranks.watch._all, set())


def test_a_rank_that_has_not_taken_its_plan_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with job(0, 2, monkeypatch) as ranks:
        ranks.records[0].announce(4)
        ranks.records[0].begin()
        ranks.records[0].wait()
        ago(ranks.records, 0, 3)
        assert f"rank 1 (pid {ranks.sleepers[0].pid}) hangs, before the first step: rank 0" in late(
            ranks.watch._all, set()
        )


def test_where_all_wait_the_one_that_is_behind_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with job(0, 2, monkeypatch) as ranks:
        for number, record in enumerate(ranks.records):
            record.announce(4)
            record.begin()
            for _ in range(3 - number):
                record.wait()
            ago(ranks.records, number, 3)
        named = late(ranks.watch._all, set())
        assert (
            f"rank 1 (pid {ranks.sleepers[0].pid}) waits for what no other rank does in step 4, collective 2" in named
        )


def test_a_stopped_rank_is_seen_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with job(0, 2, monkeypatch) as ranks:
        sleeper = ranks.sleepers[0]
        ranks.records[1]._words[6] -= int(2.5e9)  # its last beat
        assert ranks.watch._stopped() == set()  # it may be busy
        sleeper.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED)
        assert ranks.watch._stopped() == {1}
        assert f"rank 1 (pid {sleeper.pid}) has been stopped for 2.5 s" in late(ranks.watch._all, {1})


@pytest.mark.parametrize(
    ("number", "how"), [(signal.SIGKILL, "was killed by SIGKILL"), (None, "ended with exit code 0")]
)
def test_how_a_rank_has_ended(number: int | None, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with job(0, 2, monkeypatch) as ranks:
        sleeper = ranks.sleepers[0]
        if number is None:
            assert sleeper.stdin is not None
            sleeper.stdin.write(b"\n")
            sleeper.stdin.flush()
        else:
            sleeper.send_signal(number)
        os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)  # a zombie, as of a launcher that is slow
        dead: set[int] = set()
        assert how in ranks.watch._dead([ranks.watch._files[1]], dead)
        assert dead == {1}
        ranks.records[1].end(State.FAILED, "out of memory")
        assert "has failed, before the first step: out of memory" in ranks.watch._dead([ranks.watch._files[1]], dead)


ENDING = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
print("begins", flush=True)
ctypes.CDLL(None).syscall(60, 0)  # ends this thread alone
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the number of a system call")
def test_a_rank_that_ends_slowly_is_seen_before_it_is_over() -> None:
    """As one that gives back a GPU's memory: its main thread is over, and it is not."""
    with subprocess.Popen([sys.executable, "-c", ENDING], stdout=subprocess.PIPE) as process:
        file = os.pidfd_open(process.pid)
        assert not failure._is_ending(os.getpid())
        assert until(lambda: failure._is_ending(process.pid))
        poller = select.poll()
        poller.register(file, select.POLLIN)
        assert poller.poll(0) == []
        process.kill()
        assert poller.poll(10_000)
        assert failure._how_it_ended(process.pid) == "was killed by SIGKILL"
        assert failure._is_ending(process.pid)
        os.close(file)
    assert not failure._is_ending(process.pid)
    assert failure._how_it_ended(process.pid) == "is gone"


def test_a_rank_that_is_done_may_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """But not while others wait for it before there are steps."""
    with job(0, 2, monkeypatch) as ranks:
        ranks.records[1].end(State.DONE)
        dead: set[int] = set()
        assert ranks.watch._dead([ranks.watch._files[1]], dead) == ""
        assert ranks.watch._missed(dead) == ""
        ranks.records[0].meet()
        ago(ranks.records, 0, 3)
        assert "has ended, and others wait for it" in ranks.watch._missed(dead)


def test_the_lowest_rank_that_can_speak_names(monkeypatch: pytest.MonkeyPatch) -> None:
    with job(1, 3, monkeypatch) as ranks:
        assert not ranks.watch._names()
        assert ranks.watch._names({0})
        assert not ranks.watch._names({2})


def test_an_exception_in_the_guard_ends_all(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """With its traceback in the log; the others are killed, and the front end has been told."""
    with job(0, 2, monkeypatch) as ranks:
        with pytest.raises(EndedError), ranks.watch.guard():
            raise ValueError("by a test")
        assert ranks.ends == [1]
        assert ranks.told == [f"rank 0 (pid {os.getpid()}) has failed: ValueError: by a test"]
        assert ranks.records[0].state is State.FAILED
        assert ranks.records[0].text == "ValueError: by a test"
        assert ranks.sleepers[0].wait(10) == -signal.SIGKILL
    assert "Traceback" in caplog.text


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # EndedError
def test_what_takes_too_long_ends_all_and_what_does_not_goes_on(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with job(0, 2, monkeypatch) as ranks:
        with ranks.watch.within(0.0, "joining"):
            assert until(lambda: bool(ranks.ends))
        assert ranks.told == [
            f"rank 0 (pid {os.getpid()}) has failed: joining took longer than 0 s; where it waits is above"
        ]
    written = capfd.readouterr().err
    assert "in _give_up" in written
    assert "in test_what_takes_too_long" in written
    with job(0, 2, monkeypatch) as ranks:
        before = set(threading.enumerate())
        with ranks.watch.within(60.0, "joining"):
            (timer,) = set(threading.enumerate()) - before
        timer.join(10)
        assert not timer.is_alive()
        assert not ranks.ends


@pytest.mark.parametrize("error", [Followed(0), AgreedError("all know")])
def test_what_all_ranks_know_passes_the_guard(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    with job(0, 2, monkeypatch) as ranks:
        with pytest.raises(type(error)), ranks.watch.guard():
            raise error
        assert ranks.ends == []
        assert ranks.records[0].state is State.ALIVE


def test_a_rank_that_is_not_to_name_says_why_on_the_board(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An error that is meant for the user has no traceback."""
    with job(1, 2, monkeypatch) as ranks, caplog.at_level(logging.INFO):
        with pytest.raises(EndedError), ranks.watch.guard():
            raise ConfigError("no such thing")
        assert ranks.records[1].text == "no such thing"
        assert ranks.sleepers[0].poll() is None
    assert caplog.text == ""


def test_the_first_end_of_a_rank_counts() -> None:
    record = Record(Segment.make(RECORD_BYTES), 0)
    record.end(State.FAILED, "é" * TEXT_BYTES)
    record.end(State.DONE)
    assert record.state is State.FAILED
    assert record.text == "é" * (TEXT_BYTES // 2)
    assert record.doing is Doing.COMPUTING


def test_a_process_without_a_launcher_has_its_parent_alone() -> None:
    assert [pid for pid, _ in launchers()][:1] == [os.getppid()]
