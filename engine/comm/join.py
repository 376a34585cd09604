"""Joins the GPUs of a job: links between them, ways tried and chosen from, and the communicator over them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from engine.comm.gpu_ranks import GpuRanks, Line
from engine.comm.links import Links
from engine.comm.meeting import Meeting
from engine.comm.nccl import Nccl
from engine.comm.planner import measure
from engine.comm.ways import INT8, NCCL, choose, kernels_of, may_use_peer, table, ways_of
from engine.config import ModelConfig, ParallelConfig
from engine.errors import ConfigError
from engine.kernels.gpu import Gpu
from engine.ops import OpTable

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
) -> GpuRanks:
    """Called by all ranks: links of each stage, and of neighbours in the pipeline; ways tried and chosen from.

    Raises:
        ConfigError: on all ranks of a group, where there is no way.
    """
    tp, pp, stage = parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.stage
    line, ways, plan, plan_beside = None, {}, None, None
    closes: list[Callable[[], None]] = []
    if tp > 1:
        links = _join(world.Split(stage, parallel.tp_rank), 0, parallel, max_blocks, has_copies=True)
        nccl = _nccl(links) if allreduce in ("auto", "nccl") else None
        add_up = nccl.all_reduce if nccl is not None else None
        line = _line(links)
        assert links.copies is not None, "as asked for"
        rotate = allreduce != "int8-plain"
        copied = partial(links.copies.all_reduce, device=device)
        ways = ways_of(links.channels, links.exchanges, add_up, device, rotate, copied)
        device.prepare(kernels_of(links.channels, links.exchanges, dtype, rotate), progress=False)
        allowed = partial(is_allowed, allreduce=allreduce)
        trials = measure(links, {name: way for name, way in ways.items() if allowed(name)}, dtype)
        plan = choose(trials, allowed, config.hidden_size)
        plan_beside = choose(trials, allowed, config.hidden_size, is_beside=True)
        if nccl is not None and NCCL not in (*plan.names, *plan_beside.names):
            nccl.close()  # some 900 MB
        elif nccl is not None:
            closes.append(nccl.close)
        closes.append(links.close)
        say = logger.info if parallel.rank == 0 else logger.debug
        say("all-reduce: %s; beside other rows: %s", plan.text(), plan_beside.text())
        say("microseconds of a sum:\n%s", table(trials))
    else:
        world.Split(stage, parallel.tp_rank)
    neighbours = {}
    for first in range(pp - 1):  # stages first and first + 1, the sender before the receiver
        is_one = stage in (first, first + 1)
        pair = world.Split(parallel.tp_rank if is_one else tp + parallel.rank, stage)
        if is_one:
            pair_links = _join(pair, first + 1, parallel, max_blocks)
            neighbours[first] = _line(pair_links)
            closes.append(pair_links.close)
    previous, following = neighbours.get(stage - 1), neighbours.get(stage)
    return GpuRanks(ops, device, parallel, config, dtype, line, ways, plan, plan_beside, previous, following, closes)


def is_allowed(way: str, allreduce: str) -> bool:
    """By --allreduce: auto are all that are exact; int8 and int8-plain these too; window, peer, nccl those alone."""
    if allreduce in ("window", "peer", "nccl"):
        return way.startswith(allreduce) and not way.endswith(INT8)
    return allreduce in ("int8", "int8-plain") or not way.endswith(INT8)


def _join(meeting: Meeting, number: int, parallel: ParallelConfig, max_blocks: int, has_copies: bool = False) -> Links:
    members = meeting.allgather(parallel.rank)
    return Links(meeting, number, members, may_use_peer(os.environ), max_blocks, has_copies=has_copies)


def _line(links: Links) -> Line:
    return Line(links.gathers, links.alarm)


def _nccl(links: Links) -> Nccl | None:
    try:
        return Nccl(links.meeting)
    except ConfigError as error:
        logger.info("%s", error)
        return None
