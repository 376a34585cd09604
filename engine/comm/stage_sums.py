"""The sums over the ranks of a stage: which way each goes, and what it carries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from engine.comm.communicator import StepSum
from engine.comm.ways import INT8, Plan, Trial, Way, choose
from engine.kernels.carried import Carried

Array = Any
NONE: Mapping[str, int] = MappingProxyType({})


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
        fused_bytes: by way, the bytes of the largest array whose norm its kernel computes too.
    """

    def __init__(
        self, ways: Mapping[str, Way], plans: Plans, errors: Array | None = None, fused_bytes: Mapping[str, int] = NONE
    ) -> None:
        self._ways, self._plans, self._errors, self._fused_bytes = ways, plans, errors, fused_bytes

    def __call__(self, partial: Array, residual: Array | None, which: StepSum) -> Array:
        """The sum of the ranks' partials, [num_tokens, hidden_size], plus residual. Exact is the last of a step where
        errors are carried: no other makes good what it would leave out."""
        way, errors = self._way_of(partial, which), self._errors
        if errors is None:
            return way.sum(partial, residual, None)
        rows = errors[which.first_row : which.first_row + partial.shape[0]]
        return way.sum(partial, residual, Carried(rows, is_new=which.is_first))

    def and_norm(
        self, partial: Array, residual: Array, weight: Array, eps: float, which: StepSum
    ) -> tuple[Array, Array] | None:
        """(rmsnorm of the sum, the sum), by one kernel; None where there is none that is quicker than two."""
        way = self._way_of(partial, which)
        if way.fused is None or partial.nbytes > self._fused_bytes.get(way.name, 0):
            return None
        return way.fused(partial, residual, weight, eps)

    def exact(self, partial: Array) -> Array:
        return self._way(partial, True, False).sum(partial, None, None)

    def _way_of(self, partial: Array, which: StepSum) -> Way:
        return self._way(partial, self._errors is not None and which.is_last, which.is_beside)

    def _way(self, partial: Array, is_exact: bool, is_beside: bool) -> Way:
        return self._ways[self._plans.of(is_exact, is_beside).way(int(partial.nbytes))]
