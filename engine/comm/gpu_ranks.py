"""The communicator of GPUs: sums by kernels that wait for each other, or NCCL, whichever the planner found quickest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from engine.comm.alarm import Alarms, Watched
from engine.comm.communicator import OneRank, StepSum
from engine.comm.stage_sums import StageSums
from engine.config import ModelConfig, ParallelConfig
from engine.kernels.all_gather import all_gather
from engine.kernels.channel import Exchange
from engine.kernels.device import Device
from engine.ops import OpTable
from engine.weights import Norm

Array = Any
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Line:
    """What joins some ranks for parts of rows, and what tells for whom they wait."""

    gathers: Exchange
    watched: tuple[Watched, ...]


class GpuRanks:
    """See engine.comm.communicator.Communicator.

    Args:
        stage, sums: what joins the ranks of this one's stage, and adds up over them; None: there is no other.
        previous, following: what joins it with the rank that it receives from, and sends to.
        closes: what is to be done at the end, by all ranks together.
    """

    def __init__(
        self,
        ops: OpTable,
        device: Device,
        parallel: ParallelConfig,
        config: ModelConfig,
        dtype: Any,
        stage: Line | None,
        sums: StageSums | None,
        previous: Line | None = None,
        following: Line | None = None,
        closes: Sequence[Callable[[], None]] = (),
    ) -> None:
        self.shares_ids = stage is not None and parallel.pipeline_parallel_size == 1
        self.is_first = parallel.stage == 0
        self.is_last = parallel.stage == parallel.pipeline_parallel_size - 1
        self._one, self._device, self._dtype = OneRank(ops), device, dtype
        self._stage, self._sums = stage, sums
        self._previous, self._following = previous, following
        self._closes = closes
        self.alarms = Alarms([one for line in (stage, previous, following) if line is not None for one in line.watched])
        self._rank = parallel.tp_rank
        self._hidden_size, self._vocab_size = config.hidden_size, config.vocab_size

    def reduce(self, partial: Array) -> Array:
        """Exact: of each token's row, one rank has all there is."""
        return partial if self._sums is None else self._sums.exact(partial)

    def norm(self, x: Array, norm: Norm) -> Array:
        return self._one.norm(x, norm)

    def reduce_add_norm(self, partial: Array, residual: Array, norm: Norm, which: StepSum) -> tuple[Array, Array]:
        if self._sums is None:
            return self._one.reduce_add_norm(partial, residual, norm, which)
        if norm.is_plain:
            both = self._sums.and_norm(partial, residual, norm.weight, norm.eps, which)
            if both is not None:
                return both
        residual = self._sums(partial, residual, which)
        return self._one.norm(residual, norm), residual

    def reduce_add(self, partial: Array, residual: Array, which: StepSum) -> Array:
        return partial + residual if self._sums is None else self._sums(partial, residual, which)

    def send(self, residual: Array) -> None:
        assert self._following is not None, "the last stage sends nothing"
        exchange = self._following.gathers
        all_gather(residual, exchange, self._hidden_size, takes=False, num_senders=1, device=self._device)

    def receive(self, num_tokens: int) -> Array:
        assert self._previous is not None, "the first stage receives nothing"
        shape = self._device.empty((num_tokens, self._hidden_size), self._dtype)
        return all_gather(shape, self._previous.gathers, self._hidden_size, num_senders=1, device=self._device)

    def gather_logits(self, part: Array) -> Array | None:
        if self._stage is None:
            return part
        takes = self._rank == 0
        return all_gather(part, self._stage.gathers, self._vocab_size, takes=takes, device=self._device)

    def share_ids(self, ids: Array | None, num_ids: int) -> Array:
        """They travel as if they were numbers of another kind: nothing is computed."""
        assert self._stage is not None, "there are others"
        row = self._device.empty((1, num_ids), np.float32) if ids is None else ids.view(np.float32).reshape(1, num_ids)
        shared = all_gather(row, self._stage.gathers, num_ids, num_senders=1, device=self._device)
        assert shared is not None, "every rank takes them"
        return shared.reshape(num_ids).view(np.int32)

    def settle(self, get: Callable[[], T]) -> T:
        result = get()
        self.alarms.check()
        return result

    def close(self) -> None:
        for close in self._closes:
            close()
        self._closes = ()
