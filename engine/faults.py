"""Faults on purpose, for tests: an object that a test passes to the Engine. Serving never has one."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine.batch import StepPlan
from engine.scheduler import Scheduler
from engine.sequence import Sequence


class InjectedFault(RuntimeError):
    """The exception of raise_at."""


@dataclass
class Faults:
    """When what goes wrong, by request id and length or by step number (the first is 1)."""

    preempt_at: dict[str, set[int]] = field(default_factory=dict)  # request → lengths at which it is preempted
    raise_at: dict[str, int] = field(default_factory=dict)  # request → output length at which its step raises
    raise_once_at: set[int] = field(default_factory=set)  # steps that raise whatever is in them
    nan_at: dict[str, int] = field(default_factory=dict)  # request → output length at which its logits are bad
    bad_value: float = float("nan")
    bad_ids: tuple[int, ...] = ()  # ids whose logits get bad_value; empty: all of the row
    refuse_blocks_at: set[int] = field(default_factory=set)  # steps that begin as if no block were free

    def schedule(self, step: int, scheduler: Scheduler) -> StepPlan | None:
        """scheduler.schedule() for step number `step`, with what is due before and while it runs; each fault once."""
        for seq in list(scheduler.running):
            lengths = self.preempt_at.get(seq.request.request_id, set())
            if len(seq.token_ids) in lengths:
                lengths.discard(len(seq.token_ids))
                scheduler.preempt(seq)
        if step not in self.refuse_blocks_at:
            return scheduler.schedule()
        self.refuse_blocks_at.discard(step)
        scheduler.blocks.num_withheld = scheduler.blocks.num_free  # what a preemption frees can be had
        try:
            return scheduler.schedule()
        finally:
            scheduler.blocks.num_withheld = 0

    def before_run(self, step: int, seqs: list[Sequence]) -> None:
        """Raises InjectedFault where asked to."""
        if step in self.raise_once_at:
            raise InjectedFault(f"step {step}")
        for seq in seqs:
            if self.raise_at.get(seq.request.request_id, -1) == seq.num_output:
                raise InjectedFault(f"request {seq.request.request_id}")

    def spoil_logits(self, logits: NDArray[np.float32], seqs: list[Sequence]) -> None:
        """Overwrites the rows that are due; seqs are the sampling sequences in the order of the rows."""
        for row, seq in enumerate(seqs):
            if self.nan_at.get(seq.request.request_id, -1) == seq.num_output:
                logits[row, list(self.bad_ids) or slice(None)] = self.bad_value
