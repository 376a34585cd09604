"""`mpirun -n N python -m engine.bench ranks`: how soon a plan of rank 0 reaches the others, and what they burn idle."""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import dataclass

import numpy as np

from engine.batch import StepPlan
from engine.bench.arguments import positive
from engine.comm.plan_channel import Kind, Publisher, Receiver, largest_message, open_channel
from engine.comm.ranks import Ranks, join_ranks
from engine.errors import ConfigError

GAPS_S = (0.001, 0.02)  # between plans: as of a busy engine; so long that followers sleep
NUM_BLOCKS = 64  # of each sequence


@dataclass(frozen=True, slots=True)
class Delay:
    """Microseconds from before a plan is written until the last rank has it."""

    gap_s: float
    median: float
    p95: float
    longest: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seqs", type=positive, default=64, help="decoding sequences of a plan")
    parser.add_argument("--plans", type=positive, default=300, help="plans that a figure is made of")
    parser.add_argument("--idle-s", type=positive, default=5, help="seconds without a plan")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Prints the figures on rank 0.

    Raises:
        ConfigError: it was not started by MPI.
    """
    ranks = join_ranks(os.environ)
    with ranks.guard():
        channel = open_channel(ranks, largest_message(arguments.seqs, arguments.seqs, NUM_BLOCKS))
        if channel is None:
            raise ConfigError("there is one rank; start it with mpirun -n 2 or more")
        if isinstance(channel, Publisher):
            delays, idle = _publish(channel, ranks, arguments.seqs, arguments.plans, arguments.idle_s)
            print(f"us until {ranks.size - 1} ranks have a plan of {arguments.seqs} sequences:")
            for delay in delays:
                print(
                    f"plans {delay.gap_s * 1e3:2.0f} ms apart: median {delay.median:.0f}, 95th percentile "
                    f"{delay.p95:.0f}, longest {delay.longest:.0f}"
                )
            print(f"idle: {ranks.size - 1} ranks use {idle:.1%} of one core together")
        else:
            ranks.gather(_read(channel), "the figures")


def _publish(
    channel: Publisher, ranks: Ranks, num_seqs: int, num_plans: int, idle_s: float
) -> tuple[list[Delay], float]:
    """Delays by gap, and the share of a core that the others use together without plans."""
    gaps = [gap for gap in GAPS_S for _ in range(num_plans)] + [float(idle_s)]
    sent = []
    for number, gap in enumerate([0.0, *gaps]):
        _pause(gap)
        plan = _plan(number, num_seqs)
        sent.append(time.monotonic_ns())
        channel.publish(plan)
    channel.stop()
    nothing: list[tuple[int, float]] = []
    read = ranks.gather(nothing, "the figures")[1:]
    arrived = np.array([[arrival for arrival, _ in one] for one in read])
    delays = ((arrived - np.array(sent)).max(axis=0) / 1e3)[1:-1].reshape(len(GAPS_S), num_plans)
    idle = sum(one[-1][1] - one[-2][1] for one in read) / idle_s
    return [
        Delay(gap, statistics.median(row), float(np.percentile(row, 95)), float(row.max()))
        for gap, row in zip(GAPS_S, delays, strict=True)
    ], idle


def _pause(seconds: float) -> None:
    """A short one is busy, as rank 0 is between the steps that it computes."""
    if seconds > GAPS_S[0]:
        time.sleep(seconds)
        return
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def _read(channel: Receiver) -> list[tuple[int, float]]:
    """(when it had come, in ns; CPU seconds of this process by then) of each plan."""
    found = []
    while channel.receive().kind is not Kind.STOP:
        found.append((time.monotonic_ns(), time.process_time()))
    return found


def _plan(step: int, num_seqs: int) -> StepPlan:
    """A decode step."""
    ids = np.arange(num_seqs, dtype=np.int32)
    blocks = np.arange(num_seqs * NUM_BLOCKS, dtype=np.int32).reshape(num_seqs, NUM_BLOCKS)
    ones, zeros = np.ones(num_seqs, np.int32), np.zeros(num_seqs, np.int32)
    return StepPlan(
        step=step,
        slots=ids,
        starts=ids,
        cu_seqlens_q=np.arange(num_seqs + 1, dtype=np.int32),
        token_ids=ids,
        block_table=blocks,
        num_logits=ones,
        samples=np.ones(num_seqs, np.bool_),
        rope_lens=zeros,
        two_way_lens=zeros,
        num_decodes=num_seqs,
    )
