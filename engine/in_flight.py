"""A step that has been launched and whose tokens are not known yet.

Its rows that sample have a place in their sequences already, which holds unknown_id(slot) until the step lands: so the
next step can be planned and launched, and reads the ids on the device.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine.batch import StepPlan, unknown_id
from engine.runner import StartedStep
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class InFlight:
    plan: StepPlan
    seqs: list[Sequence]  # of its rows
    started: StartedStep
    positions: list[int]  # of the tokens to come, in their sequences, by rows that sample
    mark: int  # of BlockManager: what is registered from then on may hold KV that this step is still to write

    @classmethod
    def of(cls, plan: StepPlan, seqs: list[Sequence], started: StartedStep, mark: int) -> InFlight:
        """Makes the places for the tokens to come."""
        positions = []
        for seq, samples in zip(seqs, plan.samples.tolist(), strict=True):
            if samples:
                positions.append(len(seq.token_ids))
                seq.token_ids.append(unknown_id(seq.slot))
        return cls(plan, seqs, started, positions, mark)


def forget_unknown(seqs: Iterable[Sequence]) -> None:
    """Takes back the places for tokens that will never be known, as their step has failed."""
    for seq in seqs:
        while seq.token_ids[-1] < 0:
            seq.token_ids.pop()
