"""The communicator of GPUs: sums by kernels that wait for each other, or NCCL, whichever the planner found quickest."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any, Protocol

from engine.comm.communicator import OneRank
from engine.comm.links import Links
from engine.comm.meeting import Meeting
from engine.comm.nccl import Nccl
from engine.comm.planner import INT8, Plan, Way, choose, measure, table, ways_of
from engine.config import ModelConfig, ParallelConfig
from engine.errors import ConfigError, EngineDeadError
from engine.kernels.all_gather import all_gather
from engine.kernels.device import Device
from engine.ops import OpTable
from engine.weights import Norm

Array = Any

logger = logging.getLogger(__name__)


class World(Meeting, Protocol):
    """All ranks of a job."""

    def Split(self, color: int, key: int, /) -> Meeting: ...


class GpuRanks:
    """See engine.comm.communicator.Communicator.

    Args:
        stage: the links of this rank's stage; None: it has no other rank.
        ways, plan: of the stage.
        previous, following: links of two with the rank that this one receives from and sends to.
    """

    def __init__(
        self,
        ops: OpTable,
        device: Device,
        parallel: ParallelConfig,
        config: ModelConfig,
        dtype: Any,
        stage: Links | None,
        ways: dict[str, Way],
        plan: Plan | None,
        previous: Links | None = None,
        following: Links | None = None,
    ) -> None:
        self.is_first = parallel.stage == 0
        self.is_last = parallel.stage == parallel.pipeline_parallel_size - 1
        self._one, self._device, self._dtype = OneRank(ops), device, dtype
        self._stage, self._ways, self._plan = stage, ways, plan
        self._previous, self._following = previous, following
        self._rank = parallel.tp_rank
        self._hidden_size, self._vocab_size = config.hidden_size, config.vocab_size

    def reduce(self, partial: Array) -> Array:
        return self._sum(partial, None)

    def norm(self, x: Array, norm: Norm) -> Array:
        return self._one.norm(x, norm)

    def reduce_add_norm(self, partial: Array, residual: Array, norm: Norm) -> tuple[Array, Array]:
        if self._stage is None:
            return self._one.reduce_add_norm(partial, residual, norm)
        residual = self._sum(partial, residual)
        return self._one.norm(residual, norm), residual

    def reduce_add(self, partial: Array, residual: Array) -> Array:
        return self._sum(partial, residual)

    def send(self, residual: Array) -> None:
        assert self._following is not None, "the last stage sends nothing"
        self._check(self._following)
        exchange = self._following.gathers
        all_gather(residual, exchange, self._hidden_size, takes=False, num_senders=1, device=self._device)

    def receive(self, num_tokens: int) -> Array:
        assert self._previous is not None, "the first stage receives nothing"
        self._check(self._previous)
        shape = self._device.empty((num_tokens, self._hidden_size), self._dtype)
        return all_gather(shape, self._previous.gathers, self._hidden_size, num_senders=1, device=self._device)

    def gather_logits(self, part: Array) -> Array | None:
        if self._stage is None:
            return part
        self._check(self._stage)
        takes = self._rank == 0
        return all_gather(part, self._stage.gathers, self._vocab_size, takes=takes, device=self._device)

    def _sum(self, partial: Array, residual: Array | None) -> Array:
        if self._stage is None or self._plan is None:
            return partial if residual is None else self._one.reduce_add(partial, residual)
        return self._ways[self._plan.way(int(partial.nbytes))].sum(partial, residual)

    def _check(self, links: Links) -> None:
        """Raises EngineDeadError where a rank has given up waiting for another."""
        for report in links.reports():
            raise EngineDeadError(
                f"rank {report.rank} of a group waited in vain for rank {report.peer} in collective {report.number} of "
                f"channel {report.channel}"
            )


def join_gpus(
    ops: OpTable,
    device: Device,
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
    links, ways, plan = None, {}, None
    if tp > 1:
        links = Links(world.Split(stage, parallel.tp_rank), max_blocks=max_blocks)
        nccl = _nccl(links) if allreduce in ("auto", "nccl") else None
        ways = ways_of(links, nccl, device, rotate=allreduce != "int8-plain")
        allowed = partial(is_allowed, allreduce=allreduce)
        trials = measure(links, {name: way for name, way in ways.items() if allowed(name)}, dtype)
        plan = choose(trials, allowed, config.hidden_size)
        say = logger.info if parallel.rank == 0 else logger.debug
        say("all-reduce: %s; microseconds:\n%s", plan.text(), table(trials))
    else:
        world.Split(stage, parallel.tp_rank)
    neighbours = {}
    for first in range(pp - 1):  # stages first and first + 1, the sender before the receiver
        is_one = stage in (first, first + 1)
        pair = world.Split(parallel.tp_rank if is_one else tp + parallel.rank, stage)
        if is_one:
            neighbours[first] = Links(pair, number=first + 1, max_blocks=max_blocks)
    previous, following = neighbours.get(stage - 1), neighbours.get(stage)
    return GpuRanks(ops, device, parallel, config, dtype, links, ways, plan, previous, following)


def is_allowed(way: str, allreduce: str) -> bool:
    """By --allreduce: auto are all that are exact; int8 and int8-plain these too; window, peer, nccl those alone."""
    if allreduce in ("window", "peer", "nccl"):
        return way.startswith(allreduce) and not way.endswith(INT8)
    return allreduce in ("int8", "int8-plain") or not way.endswith(INT8)


def _nccl(links: Links) -> Nccl | None:
    try:
        return Nccl(links.meeting)
    except ConfigError as error:
        logger.info("%s", error)
        return None
