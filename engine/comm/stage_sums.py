"""The sums over the ranks of a stage: which way each goes, and what it carries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.comm.communicator import StepSum
from engine.comm.ways import INT8, Plan, Trial, Way, choose
from engine.kernels.carried import Carried

Array = Any


@dataclass(frozen=True, slots=True)
class Plans:
    """plan: of most sums; beside: of those beside which other rows are computed; exact, exact_beside: the same of sums
    that leave nothing out."""

    plan: Plan
    beside: Plan
    exact: Plan
    exact_beside: Plan

    @property
    def all(self) -> tuple[Plan, ...]:
        return self.plan, self.beside, self.exact, self.exact_beside

    @property
    def names(self) -> set[str]:
        """Of all ways that are used."""
        return {name for plan in self.all for name in plan.names}

    def of(self, is_exact: bool, is_beside: bool) -> Plan:
        return self.all[2 * is_exact + is_beside]


def plans_of(trials: Sequence[Trial], allowed: Callable[[str], bool], hidden_size: int) -> Plans:
    """Raises ConfigError where there is no way left."""

    def is_exact(way: str) -> bool:
        return allowed(way) and not way.endswith(INT8)

    return Plans(
        *(
            choose(trials, may_be, hidden_size, is_beside)
            for may_be in (allowed, is_exact)
            for is_beside in (False, True)
        )
    )


class StageSums:
    """Adds up over the ranks of a stage.

    Args:
        errors: [num_rows, hidden_size] bfloat16, where sums leave what they round off to the next of a step; None: none
            is carried. A step of no more rows has its own from the first row on.
    """

    def __init__(self, ways: Mapping[str, Way], plans: Plans, errors: Array | None = None) -> None:
        self._ways, self._plans, self._errors = ways, plans, errors

    def __call__(self, partial: Array, residual: Array | None, which: StepSum) -> Array:
        """The sum of the ranks' partials, [num_tokens, hidden_size], plus residual. Exact is the last of a step where
        errors are carried: no other makes good what it would leave out."""
        errors = self._errors
        if errors is None:
            return self._way(partial, False, which.is_beside).sum(partial, residual, None)
        rows = errors[which.first_row : which.first_row + partial.shape[0]]
        way = self._way(partial, which.is_last, which.is_beside)
        return way.sum(partial, residual, Carried(rows, is_new=which.is_first))

    def exact(self, partial: Array) -> Array:
        return self._way(partial, True, False).sum(partial, None, None)

    def _way(self, partial: Array, is_exact: bool, is_beside: bool) -> Way:
        return self._ways[self._plans.of(is_exact, is_beside).way(int(partial.nbytes))]
