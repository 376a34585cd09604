"""CUDA graphs of a forward pass cut at its attention.

All of a step but attention depends on its number of tokens alone: that is captured once for a few numbers of tokens, in
pieces that end where attention begins, and a step is padded up to the next of these numbers. Which kernels of attention
run, and over which grids, depends on the step's sequences: they are launched between the pieces, without the padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

import cupy

from engine.batch import ForwardBatch
from engine.models.llama import attend
from engine.ops import OpTable

Array = Any
Graph = Any  # CuPy's, ready to be launched


def _nothing() -> None:
    """There is one stream."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Attention of a layer as it was met, without what belongs to a step."""

    q: Array
    k_cache: Array
    v_cache: Array
    sm_scale: float
    window: int | None
    out: Array


@dataclass(frozen=True, slots=True)
class Pieces:
    """A captured forward pass of some number of tokens: a piece, attention, a piece, …, a piece. Of a step in halves,
    attention of the one and of the other in turn."""

    graphs: tuple[Graph, ...]
    calls: tuple[AttentionCall, ...]
    ops: OpTable
    hidden: Array

    def launch(self, batch: ForwardBatch) -> Array:
        """Hidden states, of padding too. The batch lies where the captured one lay; its sequences may be any."""
        stream = cupy.cuda.get_current_stream()
        parts = batch.halves or (batch,)
        for graph, call, part in zip(self.graphs, self.calls, cycle(parts), strict=False):
            graph.launch(stream)
            if len(part.seq_lens):  # or all of it is padding
                caches = call.k_cache, call.v_cache
                attend(call.q, part, *caches, call.sm_scale, call.window, self.ops, out=call.out)
        self.graphs[-1].launch(stream)
        return self.hidden


class Recorder:
    """Stands between a model and the attention of its op table, and cuts there what it captures."""

    def __init__(self, ops: OpTable) -> None:
        self._inner = ops
        self._pool = cupy.cuda.MemoryPool()  # what graphs compute in stays theirs
        self._graphs: list[Graph] = []
        self._calls: list[AttentionCall] | None = None  # None: nothing is recorded
        self._at_cut: Callable[[], None] = _nothing
        self.ops = replace(ops, attention_prefill=self._attention_prefill)

    def whole(self, run: Callable[[], Array]) -> tuple[Graph, Array]:
        """A graph of all that run launches, and what run gives.

        run is called twice, as what a kernel needs at its first launch cannot be captured.

        Raises:
            KernelError, CUDARuntimeError: it cannot be captured.
        """
        with self._capturing():
            run()
            _begin()
            hidden = run()
            return _end(), hidden

    def pieces(self, run: Callable[[], Array], at_cut: Callable[[], None] = _nothing) -> Pieces:
        """The same in pieces; of a forward pass of prompts, which may then be launched for other sequences.

        at_cut: brings back to the stream what others do, before a piece ends.
        """
        with self._capturing():
            run()
            self._graphs, self._calls, self._at_cut = [], [], at_cut
            _begin()
            hidden = run()
            return Pieces((*self._graphs, _end()), tuple(self._calls), self._inner, hidden)

    @contextmanager
    def _capturing(self) -> Iterator[None]:
        """Arrays are of the graphs' own memory; an error leaves the stream as it was."""
        try:
            with cupy.cuda.using_allocator(self._pool.malloc):
                yield
        except BaseException:
            with suppress(cupy.cuda.runtime.CUDARuntimeError):  # of a stream that does not capture, or did in vain
                cupy.cuda.get_current_stream().end_capture()
            raise
        finally:
            self._calls = None

    def _attention_prefill(
        self,
        q: Array,
        k_cache: Array,
        v_cache: Array,
        block_table: Array,
        cu_seqlens_q: Array,
        seq_lens: Array,
        sm_scale: float,
        window: int | None = None,
        *,
        out: Array | None = None,
    ) -> Array:
        """The op of that name; while pieces are recorded, the end of one and the beginning of the next."""
        if self._calls is None:
            sequences = block_table, cu_seqlens_q, seq_lens
            return self._inner.attention_prefill(q, k_cache, v_cache, *sequences, sm_scale, window, out=out)
        out = cupy.empty(q.shape, q.dtype)
        self._at_cut()
        self._graphs.append(_end())
        self._calls.append(AttentionCall(_lent(q), k_cache, v_cache, sm_scale, window, _lent(out)))
        _begin()
        return out


def _begin() -> None:
    stream = cupy.cuda.get_current_stream()
    stream.synchronize()
    stream.begin_capture()


def _end() -> Graph:
    """The graph of what was launched since _begin, uploaded, so that its first launch is as quick as any."""
    stream = cupy.cuda.get_current_stream()
    graph = stream.end_capture()
    graph.upload(stream)
    return graph


def _lent(array: Array) -> Array:
    """The same numbers in memory that goes back to the pool as if this array were not there.

    Later layers, and graphs of fewer tokens, compute in it too, but only when it is not needed any more: a graph is
    launched in the order in which it was captured, and one after another.
    """
    memory = cupy.cuda.UnownedMemory(array.data.ptr, array.nbytes, None)
    return cupy.ndarray(array.shape, array.dtype, cupy.cuda.MemoryPointer(memory, 0), array.strides)
