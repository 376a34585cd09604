"""Somebody else's code in a process of its own: it may never end, end its process, or write where it likes.

A worker runs case after case and sends what came of each. A case that ends the worker, or takes too long, has failed;
another worker goes on with the next.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from conformance.case import Case, Result
from conformance.check import check
from conformance.foreign import is_kernel, swapped_kernel, with_function
from conformance.host_build import BuildError
from conformance.implementation import ImplementationError
from conformance.machines import Machine, MachineMissing, gpu_machine, host_machine
from conformance.memory import NumpyMemory
from conformance.model_shapes import model_cases
from conformance.suite import cases, in_storages, target_ops
from engine.errors import GlintError

PROCESSES = multiprocessing.get_context("spawn")  # a fork would take no thread along, and no GPU
REFUSALS = (ImplementationError, MachineMissing, BuildError, GlintError)


@dataclass(frozen=True, slots=True)
class Work:
    """What a worker is told; all else it finds by itself.

    names: stem and name of each case; repeats: as of check; the others are options of `python -m conformance`.
    """

    target: str
    op: str
    impl: str
    names: tuple[tuple[str, str], ...]
    seed: int = 0
    repeats: bool = True
    schedule: str = ""
    sanitizer: str = ""
    arch: str | None = None
    model: Path | None = None


@dataclass(frozen=True, slots=True)
class Where:
    """What a worker runs on; see Machine."""

    about: dict[str, str]
    kernels: tuple[Any, ...]


def run_isolated(work: Work, seconds: float) -> Generator[Where | Result, None, None]:
    """First where it runs, then what came of each case, in order.

    Args:
        seconds: that a case may take.
    Raises:
        ImplementationError: it could not be begun; says why.
    """
    done, where = 0, None
    while done < len(work.names):
        ours, theirs = PROCESSES.Pipe()
        worker = PROCESSES.Process(target=_serve, args=(work, done, theirs), daemon=True)
        worker.start()
        theirs.close()
        try:
            first = _receive(ours)
            if not isinstance(first, Where):
                raise ImplementationError(
                    first or f"--impl {work.impl}: {_end_of(worker, work)} before any case could be run"
                )
            if where is None:
                where = first
                yield where
            while done < len(work.names):
                in_time = ours.poll(seconds)
                found = _receive(ours) if in_time else None
                if found is None:
                    problem = _end_of(worker, work) if in_time else f"took more than {seconds:g} s and was stopped"
                    found = Result(*work.names[done], "FAIL", float("inf"), 0.0, (problem,))
                    in_time = False
                if isinstance(found, Result):
                    done += 1
                    yield found
                if not in_time or not isinstance(found, Result):
                    break  # it has ended, or asks for another
        finally:
            _stop(worker)


def _receive(connection: Connection) -> Any:
    """None if the other side is gone."""
    try:
        return connection.recv()
    except (EOFError, ConnectionError):
        return None


def _end_of(worker: Any, work: Work) -> str:
    worker.join(10)
    status = worker.exitcode
    if status is not None and status < 0:
        hint = "; --sanitizer address may say where" if work.target == "host" and not work.sanitizer else ""
        return f"ended the process by {signal.Signals(-status).name}{hint}"
    return f"ended the process with status {status}"


def _stop(worker: Any) -> None:
    """And all that it has started."""
    if worker.pid is not None:
        try:
            os.killpg(worker.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            worker.kill()
    worker.join()


# ---- in the worker


def _serve(work: Work, done: int, connection: Connection) -> None:
    """Sends Where or a refusal, then a Result a case; "" asks for another worker."""
    os.setsid()
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    try:
        chosen = _cases_of(work)
        machine = _machine(work, chosen)
    except REFUSALS as error:
        connection.send(str(error))
        return
    connection.send(Where(dict(machine.about), machine.kernels))
    for case in chosen[done:]:
        result = check(case, machine.ops, work.seed, machine.memory, work.repeats)
        connection.send(result)
        if work.target == "gpu" and any(problem.startswith("raised ") for problem in result.problems):
            connection.send("")  # after an illegal address nothing runs in this process any more
            return


def _end_with(parent: int) -> None:
    """Ends this process, and what it has started, when its parent has gone without a word; a loop would stay."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)


def _cases_of(work: Work) -> list[Case]:
    found = cases(work.target) if work.model is None else in_storages(model_cases(work.model))
    by_name = {(case.stem, case.name): case for case in found}
    return [by_name[name] for name in work.names]


def _machine(work: Work, chosen: Sequence[Case]) -> Machine:
    swap = swapped_kernel(work.op, work.impl) if is_kernel(work.impl) else None
    needed = chosen if swap is not None else []  # of a function nobody knows what it launches
    if work.target == "cpu":
        machine = Machine(target_ops("cpu"), NumpyMemory())
    elif work.target == "gpu":
        machine = gpu_machine(needed, work.arch, swap, pooled=work.repeats)
    else:
        machine = host_machine(needed, swap, schedule=work.schedule, seed=work.seed, sanitizer=work.sanitizer)
    return machine if swap is not None else replace(machine, ops=with_function(machine.ops, work.op, work.impl))
