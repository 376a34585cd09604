"""Where sums over ranks go on beside what is computed: nowhere, on a machine that does one thing at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import numpy as np

Array = Any
T = TypeVar("T")


class Side(Protocol):
    """Work beside what the caller does next. What is started is done in this order, on every rank the same."""

    def start(self, work: Callable[[], T]) -> Callable[[], T]:
        """Starts work after all that was asked for before. What it gives is had by the call that is returned, after
        which the caller goes on only when it is done; what work reads is let go no earlier."""
        ...

    def join(self, first: Array, second: Array) -> Array:
        """The rows of both, one after the other; on the caller's own side."""
        ...


class InOrder:
    """One thing after another: the order of two streams, without their time."""

    def start(self, work: Callable[[], T]) -> Callable[[], T]:
        result = work()
        return lambda: result

    def join(self, first: Array, second: Array) -> Array:
        return np.concatenate([first, second])
