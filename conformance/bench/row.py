"""The record of one row of the benchmark: what is run on which shapes, what it has to move, and what is asked of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from conformance.bench.place import Place
from conformance.tolerance import RULE, Tolerance

Array = Any  # of a device
Numbers = NDArray[Any]  # of the host


@dataclass(frozen=True, slots=True)
class Work:
    """What an op cannot do without: bytes of inputs and outputs, each once, and multiplications and additions.

    pace: times as many of these a second as tensor cores do with numbers of 16 bits; 2 with 8 bits, on Hopper.
    """

    bytes_read: int
    bytes_written: int
    flops: int = 0
    pace: float = 1.0

    @property
    def num_bytes(self) -> int:
        return self.bytes_read + self.bytes_written


@dataclass(frozen=True, slots=True)
class Rates:
    """What this very machine can do, measured: bytes/s of reading and of copying (read and written), FLOP/s."""

    read: float
    copy: float
    flops: float


@dataclass(frozen=True, slots=True)
class Goal:
    """One of the three is set. A share holds on every GPU; the others are of one H200."""

    share: float = 0.0  # of the limit
    tflops: float = 0.0
    microseconds: float = 0.0

    def reached_at(self, work: Work, limit: float) -> float:
        """The time [µs] at which it is met. limit: the row's, in µs."""
        if self.share:
            return limit / self.share
        return work.flops / self.tflops * 1e-6 if self.tflops else self.microseconds

    def __str__(self) -> str:
        if self.share:
            return f"{self.share:.0%}"
        return f"{self.tflops:g} TF" if self.tflops else f"{self.microseconds:g} µs"


@dataclass(frozen=True, slots=True)
class Sample:
    """A part of an answer, and how ref comes to it.

    reference takes the dtype to compute in and the type to which ref rounds what it says under Numerics, or None.
    """

    name: str
    actual: Numbers
    reference: Callable[[Any, str | None], Numbers]
    storage: str  # of the answer
    tolerance: Tolerance = RULE


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """An op with buffers of its own. Every call of a row has others, so that no answer comes out of a cache.

    watch is called before run, which may change its inputs; what it gives is called with the answer.
    """

    run: Callable[[], Any]
    watch: Callable[[], Callable[[Any], list[Sample]]]
    inputs: Mapping[str, Any] = field(default_factory=dict)  # by the parameters of ref, for other implementations
    rivals: Mapping[str, Callable[[], Any]] = field(default_factory=dict)  # the same work by others, name → launch


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    op: str
    name: str  # unique within the op
    work: Work
    make: Callable[[Place], Call]
    goal: Goal | None = None
    peer: str = ""  # which rival it must not be behind
    peer_tflops: float = 0.0  # of that peer on one H200, where it has not been run here; 0 = unknown
    hopper: bool = False  # only for GPUs with what Hopper alone has
    portable: bool = False  # without that, also where it is there


def limit_of(work: Work, rates: Rates) -> float:
    """The shortest time [µs] that this machine allows: bytes ÷ rate or FLOPs ÷ rate, whichever is larger.

    The rate of bytes is that of reading where a tenth at most is written, and of copying elsewhere.
    """
    rate = rates.read if 10 * work.bytes_written <= work.bytes_read else rates.copy
    return 1e6 * max(work.num_bytes / rate, work.flops / (work.pace * rates.flops))
