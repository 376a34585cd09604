"""A model's forward pass as the runner uses it: what differs between machines is behind it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.batch import ForwardBatch, StepPlan, build_batch, token_positions, token_sequences
from engine.comm.communicator import Communicator, StepSum
from engine.comm.side import InOrder, Side
from engine.halves import Halving, in_halves
from engine.kv_cache import KVCache
from engine.models.model import Model
from engine.rope_table import RopeTable

Array = Any

IN_ORDER = InOrder()


class Forward(Protocol):
    """Computes steps on one kind of machine."""

    def batch(self, plan: StepPlan) -> ForwardBatch:
        """The arrays of a step, where the model reads them."""
        ...

    def __call__(self, batch: ForwardBatch) -> Array:
        """Final-normed hidden states, [num_tokens, hidden_size]; padding may follow. Writes the KV of its tokens.

        In a stage that is not the last: the residual, which has been sent on.
        """
        ...

    def rows(self, hidden: Array, indices: NDArray[np.int32]) -> Array:
        """These rows of hidden, [num_rows, hidden_size]."""
        ...

    def remember(self, slots: NDArray[np.int32], token_ids: Array) -> None:
        """Keeps the ids sampled in these slots for a step that names them by batch.unknown_id."""
        ...

    def halve(self, halving: Halving) -> None:
        """From now on these steps are computed in two halves, and no others."""
        ...


class EagerForward:
    """Op by op, on arrays of any target whose index tables are NumPy's: what a CPU does.

    side: where sums over ranks of one half of a step go on beside what is computed of the other (see halve).
    """

    def __init__(
        self,
        model: Model,
        comm: Communicator,
        cache: KVCache,
        rope: RopeTable,
        num_slots: int,
        side: Side = IN_ORDER,
    ) -> None:
        self._halving, self._side = Halving(), side
        self._last_ids = np.zeros(num_slots, np.int32)
        self._model, self._comm, self._cache, self._rope = model, comm, cache, rope
        self._norms = [piece.norm for piece in model.pieces] + [model.final_norm] * comm.is_last

    def batch(self, plan: StepPlan) -> ForwardBatch:
        rope_rows = self._rope.rows(token_positions(plan), plan.rope_lens[token_sequences(plan)])
        batch = build_batch(plan, self._cache.block_size, rope_rows)
        token_ids = plan.token_ids
        unknown = token_ids < 0
        if unknown.any():
            token_ids = token_ids.copy()
            token_ids[unknown] = self._last_ids[-1 - token_ids[unknown]]
        return in_halves(replace(batch, token_ids=token_ids), self._halving.num_first(plan))

    def __call__(self, batch: ForwardBatch, wanted: Callable[[Array], Array] | None = None) -> Array:
        """wanted: takes the rows of an array of all tokens that hidden states are wanted of. The last piece, which goes
        by token and is of the last stage, is computed for these alone, and the hidden states are theirs."""
        comm, pieces = self._comm, self._model.pieces
        residual = comm.reduce(self._model.embed(batch)) if comm.is_first else comm.receive(batch.num_tokens)
        if batch.halves is not None:
            return self._in_halves(batch.halves, residual)
        hidden = comm.norm(residual, self._norms[0])
        sums = self._sums(0)
        for piece, norm, which in zip(pieces, self._norms[1:], sums, strict=False):
            if wanted is not None and piece is pieces[-1]:
                hidden, residual = wanted(hidden), wanted(residual)
            partial = piece.forward(hidden, batch, self._cache)
            hidden, residual = comm.reduce_add_norm(partial, residual, norm, which)
        if comm.is_last:
            return hidden
        residual = comm.reduce_add(pieces[-1].forward(hidden, batch, self._cache), residual, sums[-1])
        comm.send(residual)
        return residual

    def _in_halves(self, halves: tuple[ForwardBatch, ForwardBatch], residual: Array) -> Array:
        """Piece by piece the first half, then the second; each one's sum goes on beside the other one's piece.

        The numbers are those of __call__, but that a kernel may go by how many rows there are (ARCHITECTURE, Numerics:
        equal (b)). Sums over ranks are the same bit by bit, row by row.
        """
        comm, pieces, side = self._comm, self._model.pieces, self._side
        num_first = halves[0].num_tokens
        states = [(comm.norm(part, self._norms[0]), part) for part in (residual[:num_first], residual[num_first:])]
        ready: list[Callable[[], Any]] = [lambda state=state: state for state in states]  # type: ignore[misc]
        sums = list(zip(self._sums(0, True), self._sums(num_first, True), strict=True))
        for piece, norm, which in zip(pieces, self._norms[1:], sums, strict=False):
            for half, batch in enumerate(halves):
                hidden, residual = ready[half]()
                partial_sum = piece.forward(hidden, batch, self._cache)
                ready[half] = side.start(partial(comm.reduce_add_norm, partial_sum, residual, norm, which[half]))
        if comm.is_last:
            return side.join(*(take()[0] for take in ready))
        for half, batch in enumerate(halves):
            hidden, residual = ready[half]()
            partial_sum = pieces[-1].forward(hidden, batch, self._cache)
            ready[half] = side.start(partial(comm.reduce_add, partial_sum, residual, sums[-1][half]))
        residual = side.join(*(take() for take in ready))
        comm.send(residual)
        return residual

    def _sums(self, first_row: int, is_beside: bool = False) -> list[StepSum]:
        """One a piece, of the rows of a step from first_row on."""
        last = len(self._model.pieces) - 1
        return [StepSum(first_row, number == 0, number == last, is_beside) for number in range(last + 1)]

    def rows(self, hidden: Array, indices: NDArray[np.int32]) -> Array:
        return hidden[indices]

    def remember(self, slots: NDArray[np.int32], token_ids: Array) -> None:
        self._last_ids[slots] = token_ids

    def halve(self, halving: Halving) -> None:
        self._halving = halving
