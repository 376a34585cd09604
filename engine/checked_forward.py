"""A forward pass that compares what ranks have computed, step for step, to hunt faults (--check-ranks).

All ranks of a stage have the same bits after a step, as sums run in rank order, and all have the same plan.
"""

from __future__ import annotations

import zlib
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.batch import ForwardBatch, StepPlan
from engine.comm.ranks import Ranks
from engine.config import ParallelConfig
from engine.errors import EngineDeadError
from engine.forward import Forward
from engine.halves import Halving
from engine.ops import SamplingOps

Array = Any


class CheckedForward:
    """See engine.forward.Forward."""

    def __init__(self, forward: Forward, ranks: Ranks, parallel: ParallelConfig, ops: SamplingOps) -> None:
        self._forward, self._ranks, self._stage, self._ops = forward, ranks, parallel.stage, ops
        self._plan: tuple[int, int] = (0, 0)  # its step and its digest

    def batch(self, plan: StepPlan) -> ForwardBatch:
        digest = 0
        for field in fields(StepPlan):
            digest = zlib.crc32(np.ascontiguousarray(getattr(plan, field.name)).tobytes(), digest)
        self._plan = plan.step, digest
        return self._forward.batch(plan)

    def __call__(self, batch: ForwardBatch) -> Array:
        hidden = self._forward(batch)
        computed = zlib.crc32(self._ops.start_copy(hidden[: batch.num_tokens])().tobytes())
        self._compare((*self._plan, self._stage, computed))
        return hidden

    def rows(self, hidden: Array, indices: NDArray[np.int32]) -> Array:
        return self._forward.rows(hidden, indices)

    def remember(self, slots: NDArray[np.int32], token_ids: Array) -> None:
        self._forward.remember(slots, token_ids)

    def halve(self, halving: Halving) -> None:
        self._forward.halve(halving)

    def _compare(self, mine: tuple[int, int, int, int]) -> None:
        """Raises EngineDeadError where ranks disagree."""
        firsts: dict[int, tuple[int, int]] = {}  # of each stage: a rank, and its digest
        all_ranks = self._ranks.gather(mine, "comparing digests")
        for rank, (step, plan, stage, computed) in enumerate(all_ranks):
            if (step, plan) != all_ranks[0][:2]:
                raise EngineDeadError(f"rank {rank} has another plan of step {step} than rank 0 of {all_ranks[0][0]}")
            first, digest = firsts.setdefault(stage, (rank, computed))
            if digest != computed:
                raise EngineDeadError(f"ranks {first} and {rank} have computed different numbers in step {step}")
