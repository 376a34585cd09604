"""Judges mutants, several at once, each in a process of its own that may die or not end."""

from __future__ import annotations

import hashlib
import os
import resource
import shutil
import signal
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

from conformance.host_build import CUDA, BuildError
from tests.cuda.mutation.operators import Mutant, mutants_of
from tests.cuda.mutation.suites import files, first_finding, of_one_instance, stems_of, watched_finding

KILLED, SURVIVED, NO_BUILD, BROKEN = "killed", "survived", "no build", "broken"
FORK = get_context("fork")  # what the cases need is imported and found once
LONGER = 4.0  # times what true kernels take, plus
SPARE = 5.0  # seconds of CPU time
PATIENCE = 600.0  # seconds of wall time after which a process is ended whatever it does
ORDER_OF_WAITS = ("barrier", "wait", "stage")  # operators whose faults are races: ThreadSanitizer looks too


@dataclass(frozen=True, slots=True)
class Verdict:
    mutant: str  # its id
    status: str  # KILLED, SURVIVED, NO_BUILD, or BROKEN: the judge itself failed
    found: str  # by what it was found, or what the compiler said
    seconds: float


@dataclass(frozen=True, slots=True)
class _Task:
    name: str
    file: str
    text: str | None  # None: as it is
    stems: tuple[str, ...]
    sanitizers: tuple[str, ...]
    cpu_seconds: float


def all_mutants(folder: Path = CUDA) -> list[Mutant]:
    return [mutant for file in files() for mutant in mutants_of(file, (folder / file).read_text("utf-8"))]


def chosen(mutants: Iterable[Mutant], seed: int, per_file: int | None = None) -> list[Mutant]:
    """In an order of which every beginning is a fair sample: file by file in turn, and within a file operator by
    operator. An edit of a line moves none but the mutants of that line."""
    by_operator: dict[tuple[str, str], list[Mutant]] = {}
    for mutant in mutants:
        by_operator.setdefault((mutant.file, mutant.operator), []).append(mutant)
    by_file: dict[str, list[tuple[int, str, Mutant]]] = {}
    for (file, _), group in by_operator.items():
        ordered = sorted((_hash(seed, mutant.id), mutant) for mutant in group)
        by_file.setdefault(file, []).extend((rank, key, mutant) for rank, (key, mutant) in enumerate(ordered))
    ranked = [
        (place, file, mutant)
        for file, found in by_file.items()
        for place, (_, _, mutant) in enumerate(sorted(found, key=lambda one: one[:2]))
    ]
    return [mutant for place, _, mutant in sorted(ranked, key=lambda one: one[:2]) if place < (per_file or len(ranked))]


def sweep(mutants: Sequence[Mutant], num_jobs: int, seconds: float = float("inf")) -> Iterator[Verdict]:
    """Verdicts as they come. After `seconds` no mutant is begun any more.

    Raises:
        RuntimeError: something is wrong with the kernels as they are.
    """
    deadline = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as scratch:
        tree, cache = Path(shutil.copytree(CUDA, Path(scratch) / "cuda")), Path(scratch) / "cache"
        stems = dict.fromkeys(stem for mutant in mutants for stem in stems_of(mutant.file))
        for stem in stems:
            of_one_instance(stem)
        true = [_Task(stem, "", None, (stem,), (), PATIENCE) for stem in stems]
        limits: dict[str, float] = {}
        for verdict in _run_all(true, num_jobs, tree, cache, Path(scratch), float("inf")):
            if verdict.status != SURVIVED:
                raise RuntimeError(f"{verdict.mutant} as it is: {verdict.status}: {verdict.found}")
            limits[verdict.mutant] = float(verdict.found)
        tasks = [
            _Task(
                mutant.id,
                mutant.file,
                mutant.text,
                stems_of(mutant.file),
                ("address", "thread") if mutant.operator in ORDER_OF_WAITS else ("address",),
                SPARE + LONGER * sum(limits[stem] for stem in stems_of(mutant.file)),
            )
            for mutant in mutants
        ]
        yield from _run_all(tasks, num_jobs, tree, cache, Path(scratch), deadline)


def _run_all(
    tasks: Sequence[_Task], num_jobs: int, tree: Path, cache: Path, scratch: Path, deadline: float
) -> Iterator[Verdict]:
    pending = list(reversed(tasks))
    running: dict[Any, tuple[_Task, Any, float, Path]] = {}
    while running or (pending and time.monotonic() < deadline):
        while pending and len(running) < num_jobs and time.monotonic() < deadline:
            task = pending.pop()
            folder = Path(tempfile.mkdtemp(dir=scratch))
            receiver, sender = FORK.Pipe(duplex=False)
            process = FORK.Process(target=_judge, args=(task, tree, cache, folder, sender))
            process.start()
            sender.close()
            running[receiver] = task, process, time.monotonic(), folder
        ready = connection.wait(list(running), timeout=1.0)
        late = [one for one, (_, _, start, _) in running.items() if time.monotonic() - start > PATIENCE]
        for receiver in {*ready, *late}:
            task, process, start, folder = running.pop(receiver)
            yield _verdict(task, receiver, process, time.monotonic() - start)
            _share(folder / "cache", cache, "*" if task.text is None else "*.o")
            shutil.rmtree(folder, ignore_errors=True)


def _share(built: Path, cache: Path, which: str) -> None:
    """What true kernels and parts of the shim were built into need not be built again."""
    for file in built.rglob(which):
        target = cache / file.relative_to(built)
        if file.is_file() and not target.exists() and not file.name.endswith(".part"):
            target.parent.mkdir(parents=True, exist_ok=True)
            os.link(file, target)


def _verdict(task: _Task, receiver: Any, process: Any, seconds: float) -> Verdict:
    """What a process has said before it ended, or what it died of."""
    try:
        status, found = receiver.recv() if receiver.poll() else (KILLED, "does not end")
    except EOFError:
        process.join()
        if process.exitcode == -signal.SIGXCPU:
            status, found = KILLED, "does not end"
        elif process.exitcode < 0:
            status, found = KILLED, f"the process died of {signal.Signals(-process.exitcode).name}"
        else:
            status, found = BROKEN, f"the judge ended with {process.exitcode}"
    _end(process)
    return Verdict(task.name, status, found, round(seconds, 1))


def _end(process: Any) -> None:
    """It and what it has started: it leads a group of its own."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        process.kill()
    process.join()


def _judge(task: _Task, tree: Path, cache: Path, folder: Path, sender: Any) -> None:
    """In a process of its own."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (int(task.cpu_seconds) + 1, resource.RLIM_INFINITY))
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    if cache.exists():
        shutil.copytree(cache, folder / "cache", copy_function=os.link)
    copy = Path(shutil.copytree(tree, folder / "cuda"))
    if task.text is not None:
        (copy / task.file).write_text(task.text, "utf-8")
    try:
        found = next(_findings(task, copy), "")
    except BuildError as error:
        sender.send((NO_BUILD, _first_error(str(error))))
        return
    if found:
        sender.send((KILLED, found))
    else:
        sender.send((SURVIVED, f"{time.process_time():.1f}" if task.text is None else ""))


def _findings(task: _Task, folder: Path) -> Iterator[str]:
    yield from filter(None, (first_finding(stem, folder) for stem in task.stems))
    for sanitizer in task.sanitizers:
        for stem in task.stems:
            if found := watched_finding(stem, folder, sanitizer):
                yield f"{sanitizer} sanitizer, {found}"


def _first_error(message: str) -> str:
    return next((line for line in message.splitlines() if "error:" in line), message)


def _hash(seed: int, name: str) -> str:
    return hashlib.sha256(f"{seed} {name}".encode()).hexdigest()
