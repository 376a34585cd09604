"""Marks where each part of a step begins and ends, on each stream: by CUDA events, or by the host's clock.

Parts are told by what stands around a model: its op table, its pieces and its communicator.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Protocol, cast

from conformance.machines import find_cupy
from engine.comm.communicator import Communicator, StepSum
from engine.kv_cache import KVCache
from engine.models.model import Model, Piece
from engine.ops import OpTable
from engine.weights import LinearWeight, Norm, Weights

Array = Any

SUM, COPY = "sum + norm", "copies"
COMPUTE, SUMS = "compute", "sums"
NAMES = {"qkv_proj": "qkv", "o_proj": "o", "gate_up_proj": "gate, up", "down_proj": "down"}
OTHERS = {"attention_prefill": "attention", "attention_decode": "attention", "rope_kv_write": "rope"}
NOT_TIMED = ("prepare", "sampling", "mla_split_kv_b")


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a layer; half: 1 or 2, 0 of a step that is whole; times are µs from the begin of what is shown."""

    rank: int
    lane: str
    layer: int
    half: int
    part: str
    begin: float
    end: float


class Clock(Protocol):
    """Marks on whatever is current."""

    def mark(self) -> Any:
        """The time when all that was asked for before is done."""
        ...

    def lane(self) -> str: ...

    def us(self, begin: Any, end: Any) -> float: ...


class HostClock:
    """Of a machine that does one thing after another."""

    def mark(self) -> int:
        return time.perf_counter_ns()

    def lane(self) -> str:
        return COMPUTE

    def us(self, begin: int, end: int) -> float:
        return (end - begin) / 1e3


class GpuClock:
    """CUDA events on the current stream. The first stream that is met computes, a second one adds up."""

    def __init__(self) -> None:
        self._cuda = find_cupy().cuda
        self._lanes: dict[int, str] = {}

    def mark(self, stream: Any = None) -> Any:
        event = self._cuda.Event()
        event.record(stream)
        return event

    def lane(self) -> str:
        return self._lanes.setdefault(self._cuda.get_current_stream().ptr, SUMS if self._lanes else COMPUTE)

    def us(self, begin: Any, end: Any) -> float:
        end.synchronize()
        return float(self._cuda.get_elapsed_time(begin, end)) * 1e3


class Recorder:
    """Stands around ops, pieces and sums of a step, and marks where each begins and ends. See steps.Watch."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.is_on = False
        self.halves: tuple[Any, ...] = ()  # of the batch that is computed
        self._marks: list[tuple[str, int, int, str, Any, Any]] = []
        self._zero: Any = None
        self._place = (-1, 0)  # layer and half that are computed

    def ops(self, table: OpTable, weights: Weights) -> OpTable:
        names = {id(weight): dest.rpartition(".")[2] for dest, weight in weights.linears.items()}

        def timed(name: str, op: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(op)
            def call(*args: Any, **kwargs: Any) -> Any:
                of = next((names.get(id(arg), "") for arg in args if isinstance(arg, LinearWeight)), "")
                part = NAMES.get(of, of) or OTHERS.get(name, name.replace("_", " "))
                return self.record(part, partial(op, *args, **kwargs))

            return call

        ops = {field.name: getattr(table, field.name) for field in fields(table) if field.name not in NOT_TIMED}
        return replace(table, **{name: timed(name, op) for name, op in ops.items()})

    def model(self, model: Model) -> Model:
        return replace(model, pieces=tuple(replace(piece, forward=self._placed(piece)) for piece in model.pieces))

    def comm(self, comm: Communicator) -> Communicator:
        return cast(Communicator, _TimedSums(comm, self))

    def record(self, part: str, work: Callable[[], Any]) -> Any:
        if not self.is_on:
            return work()
        lane, begin = self.clock.lane(), self.clock.mark()
        result = work()
        self.add(lane, part, begin, self.clock.mark())
        return result

    def add(self, lane: str, part: str, begin: Any, end: Any) -> None:
        self._marks.append((lane, *self._place, part, begin, end))

    def start(self) -> None:
        """The sum of the embedding is done, on all ranks."""
        if self.is_on:
            self._zero = self.clock.mark()

    def take(self, rank: int) -> list[Span]:
        """What was recorded since it was taken last; times are from start on."""
        us = partial(self.clock.us, self._zero)
        spans = [
            Span(rank, lane, layer, half, part, us(begin), us(end))
            for lane, layer, half, part, begin, end in self._marks
            if layer >= 0
        ]
        self._marks, self._place = [], (-1, 0)
        return spans

    def _placed(self, piece: Piece) -> Callable[[Array, Any, KVCache], Array]:
        found = re.search(r"\d+", piece.name)
        layer = int(found[0]) if found else 0

        def forward(hidden: Array, batch: Any, cache: KVCache) -> Array:
            self._place = layer, self._half_of(batch)
            return piece.forward(hidden, batch, cache)

        return forward

    def _half_of(self, batch: Any) -> int:
        return next((place for place, half in enumerate(self.halves, 1) if half is batch), 0)


class _TimedSums:
    """See engine.comm.communicator.Communicator; all but sums is the inner one's."""

    def __init__(self, inner: Communicator, recorder: Recorder) -> None:
        self._inner, self._recorder = inner, recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def reduce(self, partial_sum: Array) -> Array:
        total = self._inner.reduce(partial_sum)
        self._recorder.start()
        return total

    def reduce_add_norm(self, partial_sum: Array, residual: Array, norm: Norm, which: StepSum) -> tuple[Array, Array]:
        add: Callable[[], tuple[Array, Array]] = partial(
            self._inner.reduce_add_norm, partial_sum, residual, norm, which
        )
        both: tuple[Array, Array] = self._recorder.record(SUM, add)
        return both


@contextmanager
def marked_copies(recorder: Recorder, may_have: bool) -> Iterator[None]:
    """Sums by copy engines show their streams, where there is a GPU."""
    if not may_have or importlib.util.find_spec("cupy") is None or importlib.util.find_spec("cuda") is None:
        yield
        return
    copies = importlib.import_module("engine.comm.copies").Copies
    plain = copies.gather

    def gather(self: Any, x: Array, device: Any) -> Array:
        clock = recorder.clock
        if not recorder.is_on or not isinstance(clock, GpuClock):
            return plain(self, x, device)
        before = clock.mark()
        for stream in self._streams:
            stream.wait_event(before)
        begins = [clock.mark(stream) for stream in self._streams]
        others = plain(self, x, device)
        for number, (stream, begin) in enumerate(zip(self._streams, begins, strict=True)):
            is_in, lane = divmod(number, len(self._streams) // 2)
            recorder.add(f"{'in' if is_in else 'out'} {lane + 1}", COPY, begin, clock.mark(stream))
        return others

    copies.gather = gather
    try:
        yield
    finally:
        copies.gather = plain
