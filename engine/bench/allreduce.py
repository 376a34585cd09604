"""`mpirun -n N python -m engine.bench allreduce`: what adding up over GPUs takes, by size and way, beside NCCL.

With NCCL_P2P_DISABLE=1 neither NCCL nor Glint reaches memory of other GPUs: all goes through the host.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine.bench import machine
from engine.bench.arguments import report_file
from engine.comm.ranks import join_ranks
from engine.comm.ways import INT8, Trial
from engine.errors import ConfigError

NCCL = "nccl"
KIB = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384, 65536)
NOISE = 1.02  # two runs of one thing differ by as much


@dataclass(frozen=True, slots=True)
class Known:
    """Of two H200, in us by size of KIB: what is aimed at, and NCCL as it was timed before."""

    goal: Sequence[float]
    stretch: Sequence[float] = ()
    peer: Sequence[float] = ()


THROUGH_HOST = Known(
    goal=(5.2, 6, 7.3, 9, 11.4, 16, 25, 36, 50, 115, 400, 1500),
    stretch=(4.2, 4.5, 5, 6, 8, 11, 15, 20, 27, 80, 300, 1150),
    peer=(14.5, 14.7, 15.1, 15.0, 18.3, 24.7, 38, 48, 67, 167, 592, 2317),
)
THROUGH_PEER = Known(
    goal=(2.6, 2.7, 2.8, 2.9, 3.0, 3.4, 4.4, 6.2, 9, 30, 77, 250),
    peer=(9.9, 10.2, 10.4, 10.3, 10.8, 10.6, 12.2, 13.6, 17.3, 36, 77, 250),
)
LIMITS = {  # of 35 GB/s both ways at once, by whether int8 travels
    False: (0, 0, 0, 0, 0, 4, 7, 15, 30, 120, 480, 1918),
    True: (0, 0, 0, 0, 0, 2, 4, 8, 16, 64, 255, 1019),
}


@dataclass(frozen=True, slots=True)
class Row:
    """The quickest way of one size, in us, and what it is held to; nccl: of the same run."""

    num_bytes: int
    way: str
    us: float
    nccl: float | None
    goal: float | None
    stretch: float | None
    peer: float | None
    limit: float | None

    @property
    def verdict(self) -> str:
        """stretch, met, ahead or BEHIND NCCL; "" where there is nothing to compare with."""
        if self.stretch is not None and self.us <= self.stretch:
            return "stretch"
        if self.goal is not None and self.us <= self.goal:
            return "met"
        if self.nccl is None:
            return ""
        return "BEHIND" if self.us > NOISE * self.nccl else "ahead"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=report_file, help="file to write the report to")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """1 where a size is behind NCCL. Ranks but rank 0 say nothing.

    Raises:
        ConfigError: it was not started by MPI, or there are no GPUs for the ranks.
    """
    if importlib.util.find_spec("cupy") is None:
        raise ConfigError("this times GPUs, and the packages for them are not installed (glint-llm[cuda13] or cuda12)")
    ranks = join_ranks(os.environ)
    if ranks.size == 1:
        raise ConfigError("there is one rank; start it with mpirun -n 2 or more")
    with ranks.guard():
        sizes = [kib << 10 for kib in KIB]
        about, trials = importlib.import_module("engine.comm.bench_ways").time_ways(ranks, sizes)
    if ranks.rank != 0:
        return 0
    held_to = known(about["gpu"], about["ranks"], about["has_peer"])
    best = {setting: rows(trials, setting == INT8, held_to) for setting in ("exact", INT8)}
    print(table(about, trials, best))
    if arguments.json is not None:
        where = machine.about(about["gpu"])
        Path(arguments.json).write_text(as_json(where | about, trials, best) + "\n", encoding="utf-8")
    return int(any(row.verdict == "BEHIND" for of_setting in best.values() for row in of_setting))


def known(gpu: str, world_size: int, has_peer: bool) -> Known:
    """What is known of these GPUs beforehand."""
    if world_size != 2 or "H200" not in gpu:
        return Known(goal=())
    return THROUGH_PEER if has_peer else THROUGH_HOST


def rows(trials: Sequence[Trial], has_int8: bool, held_to: Known) -> list[Row]:
    """The quickest of each size; has_int8: whether ways are allowed that are not exact."""
    found = []
    broken = {trial.way for trial in trials if trial.problem}
    for number, kib in enumerate(KIB):
        fitting = [trial for trial in trials if trial.num_bytes == kib << 10 and trial.way not in broken]
        ours = [trial for trial in fitting if trial.way != NCCL and (has_int8 or not trial.way.endswith(INT8))]
        if not ours:
            continue
        best = min(ours, key=lambda trial: trial.us)
        nccl = next((trial.us for trial in fitting if trial.way == NCCL), None)
        limits = LIMITS[best.way.endswith(INT8)] if held_to is THROUGH_HOST else ()
        others = [
            values[number] or None if values else None
            for values in (held_to.goal, held_to.stretch, held_to.peer, limits)
        ]
        found.append(Row(kib << 10, best.way, best.us, nccl, *others))
    return found


def table(about: dict[str, Any], trials: Sequence[Trial], best: dict[str, list[Row]]) -> str:
    """The report for people: every way by size, then the best of each setting."""
    link = "memory of each other" if about["has_peer"] else "the host"
    if about["island_size"]:
        link += f", memory of each other in islands of {about['island_size']}"
    cuda = f"{about['cuda'] // 1000}.{about['cuda'] % 1000 // 10}"
    lines = [
        f"{about['ranks']} x {about['gpu']}, CUDA {cuda}, through {link}; us of a call in a graph; all was tried in "
        f"{about['seconds']:.1f} s" + (f"; {about['nccl']}" if about["nccl"] else ""),
        f"{'KiB':<20}" + "".join(f"{kib:>8}" for kib in KIB),
    ]
    for way in dict.fromkeys(trial.way for trial in trials):
        of_way = {trial.num_bytes >> 10: trial for trial in trials if trial.way == way}
        lines.append(f"{way:<20}" + "".join(_cell(of_way[kib].us if kib in of_way else None) for kib in KIB))
        lines += [f"  struck out: {trial.problem}" for trial in of_way.values() if trial.problem]
    for setting, found in best.items():
        lines.append(f"{setting + ', best':<20}" + "".join(_cell(row.us) for row in found))
        for name in ("goal", "stretch", "peer", "limit"):
            lines.append(f"  {name:<18}" + "".join(_cell(getattr(row, name)) for row in found))
        lines.append(f"  {'verdict':<18}" + "".join(f"{row.verdict:>8}" for row in found))
    return "\n".join(lines)


def _cell(us: float | None) -> str:
    return f"{'-' if us is None else f'{us:.1f}' if us < 1000 else f'{us:.0f}':>8}"


def as_json(about: dict[str, Any], trials: Sequence[Trial], best: dict[str, list[Row]]) -> str:
    settings = {name: [{**asdict(row), "verdict": row.verdict} for row in found] for name, found in best.items()}
    return json.dumps({**about, "trials": [asdict(trial) for trial in trials], "best": settings}, indent=1)
