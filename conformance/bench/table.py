"""Figures beside limit, goal and peer: verdicts, the table for people, JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from conformance.bench.row import Goal, Rates, Work
from engine.kernels.device import Instance

WRONG, BEHIND, SHORT, MET = "WRONG", "BEHIND", "short", "met"
CHANCE = 1.02  # what two runs of the same launches may differ by
COMPUTE = 200  # FLOPs a byte from which on a row is told in TFLOP/s


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One row's time and what it is held against. Times are in µs."""

    op: str
    name: str
    microseconds: float
    work: Work
    limit: float
    goal: Goal | None = None
    peer: str = ""
    peer_tflops: float = 0.0
    others: Mapping[str, float] = field(default_factory=dict)  # implementation → its time here
    kernels: tuple[Instance | None, ...] = ()  # None: the vendor's library
    error: float = 0.0
    tolerance: float = 0.0
    problem: str = ""

    @property
    def share(self) -> float:
        return self.limit / self.microseconds

    @property
    def goal_time(self) -> float | None:
        return None if self.goal is None else self.goal.reached_at(self.work, self.limit)

    @property
    def peer_time(self) -> float | None:
        """Measured here if it was run, else as it is known."""
        if self.peer in self.others:
            return self.others[self.peer]
        return self.work.flops / self.peer_tflops * 1e-6 if self.peer_tflops else None

    @property
    def verdict(self) -> str:
        """WRONG, BEHIND the peer, short of the goal, met; "" where there is nothing to hold it against."""
        if self.problem:
            return WRONG
        if self.peer_time is not None and self.microseconds > CHANCE * self.peer_time:
            return BEHIND
        if self.goal_time is None:
            return ""
        return MET if self.microseconds <= self.goal_time else SHORT

    @property
    def rate(self) -> str:
        """TFLOP/s or TB/s, after what the row is bound by."""
        if self.work.flops >= COMPUTE * self.work.num_bytes:
            return f"{self.work.flops / self.microseconds * 1e-6:.0f} TF/s"
        return f"{self.work.num_bytes / self.microseconds * 1e-6:.2f} TB/s"

    @property
    def launched(self) -> str:
        return " + ".join("cuBLAS" if kernel is None else kernel.entry for kernel in self.kernels)


def header(about: Mapping[str, Any], rates: Rates) -> list[str]:
    return [
        f"{about['gpu']}, driver {about['driver']}, {about['cuda']}, kernels for {about['arch']}",
        f"limits measured here: read {rates.read / 1e12:.2f} TB/s, copy {rates.copy / 1e12:.2f} TB/s, cuBLAS "
        f"{rates.flops / 1e12:.0f} TFLOP/s; bf16; times in µs, nothing out of a cache",
        f"{'op':<22}{'case':<38}{'time':>9}{'limit':>9}{'share':>7}{'rate':>11}{'goal':>8}{'peer':>9}  verdict, others",
    ]


def line(figure: Figure) -> str:
    goal = "" if figure.goal is None else str(figure.goal)
    peer = "" if figure.peer_time is None else f"{figure.peer_time:.2f}"
    others = ", ".join(f"{name} {time:.2f}" for name, time in figure.others.items() if name != figure.peer)
    said = "  ".join(part for part in (figure.verdict, others, figure.launched) if part)
    return (
        f"{figure.op:<22}{figure.name:<38}{figure.microseconds:>9.2f}{figure.limit:>9.2f}{figure.share:>7.0%}"
        f"{figure.rate:>11}{goal:>8}{peer:>9}  {said}"
    )


def summary(figures: Sequence[Figure]) -> str:
    counts = {verdict: sum(figure.verdict == verdict for figure in figures) for verdict in (MET, SHORT, BEHIND, WRONG)}
    return (
        f"{len(figures)} rows: {counts[MET]} met their goal, {counts[SHORT]} short of it, "
        f"{counts[BEHIND]} behind the peer, {counts[WRONG]} wrong"
    )


def report(
    about: Mapping[str, Any], rates: Rates, figures: Sequence[Figure], hashes: Mapping[str, str]
) -> dict[str, Any]:
    """What --json writes: machine, limits, the hash of each kernel's source, a record a row."""
    return {
        "target": "bench",
        **about,
        "limits": {
            "read_tb_per_s": rates.read / 1e12,
            "copy_tb_per_s": rates.copy / 1e12,
            "cublas_tflop_per_s": rates.flops / 1e12,
        },
        "kernels": dict(hashes),
        "rows": [_record(figure) for figure in figures],
    }


def _record(figure: Figure) -> dict[str, Any]:
    return {
        "op": figure.op,
        "case": figure.name,
        "us": figure.microseconds if figure.microseconds < float("inf") else None,
        "bytes": figure.work.num_bytes,
        "flops": figure.work.flops,
        "limit_us": figure.limit,
        "share": figure.share,
        "goal": None if figure.goal is None else str(figure.goal),
        "goal_us": figure.goal_time,
        "peer": figure.peer if figure.peer_time is not None else None,
        "peer_us": figure.peer_time,
        "others_us": dict(figure.others),
        "verdict": figure.verdict,
        "launched": figure.launched,
        "error": figure.error if figure.error < float("inf") else None,
        "tolerance": figure.tolerance,
    }


def status(figures: Sequence[Figure]) -> int:
    """1 if a row is wrong or behind its peer."""
    return int(any(figure.verdict in (WRONG, BEHIND) for figure in figures))
