"""Joins the GPUs of a job: links between them, ways tried and chosen from, and the communicator over them."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import cupy
import numpy as np

from engine.comm.fusing import ROWS, fused_bytes, fused_plans, kernels_with_norm, of_sums, rivals
from engine.comm.gpu_ranks import GpuRanks, Line
from engine.comm.islands import largest_island
from engine.comm.kept_times import digest_of, keep_times, load_times
from engine.comm.links import Links
from engine.comm.meeting import Meeting
from engine.comm.nccl import Nccl
from engine.comm.planner import measure, wrong
from engine.comm.stage_sums import Plans, StageSums, plans_of
from engine.comm.ways import INT8, ISLANDS, NCCL, Way, kernels_of, table, ways_of
from engine.config import ModelConfig, ParallelConfig
from engine.errors import ConfigError
from engine.kernels.compile import CUDA
from engine.kernels.gpu import Gpu
from engine.ops import OpTable
from engine.system import cache_dir

Array = Any

logger = logging.getLogger(__name__)


class World(Meeting, Protocol):
    """All ranks of a job."""

    def Split(self, color: int, key: int, /) -> Meeting: ...


def join_gpus(
    ops: OpTable,
    device: Gpu,
    world: World,
    parallel: ParallelConfig,
    config: ModelConfig,
    dtype: Any,
    allreduce: str,
    max_blocks: int,
    errors: Array | None,
) -> GpuRanks:
    """Called by all ranks: links of each stage, and of neighbours in the pipeline; ways tried and chosen from.

    Args:
        errors: see StageSums.
    Raises:
        ConfigError: on all ranks of a group, where there is no way.
    """
    tp, pp, stage = parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.stage
    max_blocks = min(world.allgather(max_blocks))  # stages may have GPUs of different kinds
    line, sums = None, None
    closes: list[Callable[[], None]] = []
    if tp > 1:
        links, line = _join(world.Split(stage, parallel.tp_rank), 0, parallel, max_blocks, has_copies=True)
        chosen = _choose(links, ops, device, dtype, allreduce, config.hidden_size, parallel.rank == 0)
        sums, closes = StageSums(chosen.ways, chosen.plans, errors, chosen.fused_bytes), chosen.closes
    else:
        world.Split(stage, parallel.tp_rank)
    neighbours = {}
    for first in range(pp - 1):  # stages first and first + 1, the sender before the receiver
        is_one = stage in (first, first + 1)
        pair = world.Split(parallel.tp_rank if is_one else tp + parallel.rank, stage)
        if is_one:
            pair_links, neighbours[first] = _join(pair, first + 1, parallel, max_blocks)
            closes.append(pair_links.close)
    previous, following = neighbours.get(stage - 1), neighbours.get(stage)
    return GpuRanks(ops, device, parallel, config, dtype, line, sums, previous, following, closes)


@dataclass(frozen=True, slots=True)
class _Chosen:
    """closes: what is to be closed at the end; for the rest see StageSums."""

    ways: Mapping[str, Way]
    plans: Plans
    fused_bytes: Mapping[str, int]
    closes: list[Callable[[], None]]


def _choose(
    links: Links, ops: OpTable, device: Gpu, dtype: Any, allreduce: str, hidden_size: int, speaks: bool
) -> _Chosen:
    """Times of an earlier start hold where all is as it was and the ways that they lead to are right today."""
    allowed = partial(is_allowed, allreduce=allreduce)
    say = logger.info if speaks else logger.debug
    facts = _facts(links, dtype, allreduce, hidden_size)
    folder = cache_dir() / "all-reduce"
    trials = links.meeting.allgather(load_times(folder, facts) if links.meeting.rank == 0 else None)[0]
    kept = None if trials is None else plans_of(of_sums(trials), allowed, hidden_size)
    nccl, ways = _ways(links, device, dtype, allreduce, kept is None or NCCL in kept.names)
    normed = _rivals(links, ops, device, ways, dtype, hidden_size)
    begin = time.perf_counter()
    if trials is not None and kept is not None:
        problems = wrong(links, ways, kept.all, dtype) + wrong(links, normed, fused_plans(trials), dtype, hidden_size)
        if problems:
            say("all-reduce is timed anew: what was kept of another start is not right today:\n%s", table(problems))
            kept = None
            if nccl is None:
                nccl, ways = _ways(links, device, dtype, allreduce, True)
    if trials is None or kept is None:
        trials = measure(links, {name: way for name, way in ways.items() if allowed(name)}, dtype)
        both = {name: way for name, way in normed.items() if allowed(name)}
        sizes = [rows * hidden_size * np.dtype(dtype).itemsize for rows in ROWS]
        trials += measure(links, both, dtype, sizes, hidden_size)
        if links.meeting.rank == 0 and not any(trial.problem for trial in trials):
            keep_times(folder, facts, trials)
    plans = plans_of(of_sums(trials), allowed, hidden_size)
    fused = fused_bytes(trials)
    seconds = time.perf_counter() - begin
    say("all-reduce: %s; beside other rows: %s", plans.plan.text(), plans.beside.text())
    for name, num_bytes in fused.items():
        say("the norm behind a sum is computed by the same kernel (%s) to %s KiB", name, num_bytes >> 10)
    say("microseconds of a sum (%s, %.1f s):\n%s", "kept, checked" if kept else "tried", seconds, table(trials))
    closes: list[Callable[[], None]] = [links.close]
    if nccl is not None and NCCL in plans.names:
        closes.insert(0, nccl.close)
    elif nccl is not None:
        nccl.close()  # some 900 MB
    return _Chosen(ways, plans, fused, closes)


def _rivals(
    links: Links, ops: OpTable, device: Gpu, ways: Mapping[str, Way], dtype: Any, hidden_size: int
) -> dict[str, Way]:
    """Ready to be tried."""
    weight = np.ones(hidden_size, dtype)
    device.prepare(kernels_with_norm(links.channels, weight), progress=False)
    return rivals(ways, ops.rmsnorm, cupy.asarray(weight.view(np.uint16)).view(dtype))


def _ways(links: Links, device: Gpu, dtype: Any, allreduce: str, has_nccl: bool) -> tuple[Nccl | None, dict[str, Way]]:
    """Ready to be tried."""
    assert links.copies is not None, "as asked for"
    nccl = _nccl(links) if allreduce in ("auto", "nccl") and has_nccl else None
    add_up = nccl.all_reduce if nccl is not None else None
    rotate = allreduce != "int8-plain"
    gather = partial(links.copies.gather, device=device)
    ways = ways_of(links.channels, links.exchanges, add_up, device, rotate, gather, links.islands)
    device.prepare(kernels_of(links.channels, links.exchanges, dtype, rotate, links.islands), progress=False)
    return nccl, ways


def _facts(links: Links, dtype: Any, allreduce: str, hidden_size: int) -> dict[str, Any]:
    """All that times depend on; the same on all ranks."""
    runtime = cupy.cuda.runtime
    number = cupy.cuda.Device().id
    name = runtime.getDeviceProperties(number)["name"].decode()
    sources = [*CUDA.glob("*.cu"), *CUDA.glob("include/*.cuh"), *Path(__file__).parent.glob("*.py")]
    return {
        "gpus": links.meeting.allgather((name, runtime.deviceGetPCIBusId(number))),
        "cuda": (runtime.driverGetVersion(), runtime.runtimeGetVersion()),
        "links": sorted(links.channels),
        "islands": links.island_size,
        "dtype": str(dtype),
        "hidden_size": hidden_size,
        "allreduce": allreduce,
        "sources": digest_of(sources),
    }


def is_allowed(way: str, allreduce: str) -> bool:
    """By --allreduce: auto are all that are exact; int8 and int8-plain these too; names of ways those alone."""
    if allreduce in ("window", "peer", ISLANDS, NCCL):
        return way.startswith(allreduce) and not way.endswith(INT8)
    return allreduce in ("int8", "int8-plain") or not way.endswith(INT8)


def _join(
    meeting: Meeting, number: int, parallel: ParallelConfig, max_blocks: int, has_copies: bool = False
) -> tuple[Links, Line]:
    members = meeting.allgather(parallel.rank)
    links = Links(meeting, number, members, largest_island(os.environ), max_blocks, has_copies=has_copies)
    watched = (links.alarm,) if links.copies is None else (links.alarm, links.copies.watch(members))
    return links, Line(links.gathers, watched)


def _nccl(links: Links) -> Nccl | None:
    try:
        return Nccl(links.meeting)
    except ConfigError as error:
        logger.info("%s", error)
        return None
