"""A model's forward pass as the runner uses it: what differs between machines is behind it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.batch import ForwardBatch, StepPlan, build_batch, token_positions, token_sequences
from engine.comm.communicator import Communicator
from engine.kv_cache import KVCache
from engine.models.model import Model
from engine.rope_table import RopeTable

Array = Any


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


class EagerForward:
    """Op by op, on arrays of any target whose index tables are NumPy's: what a CPU does."""

    def __init__(self, model: Model, comm: Communicator, cache: KVCache, rope: RopeTable, num_slots: int) -> None:
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
        return replace(batch, token_ids=token_ids)

    def __call__(self, batch: ForwardBatch) -> Array:
        comm, pieces = self._comm, self._model.pieces
        residual = comm.reduce(self._model.embed(batch)) if comm.is_first else comm.receive(batch.num_tokens)
        hidden = comm.norm(residual, self._norms[0])
        for piece, norm in zip(pieces, self._norms[1:], strict=False):
            partial = piece.forward(hidden, batch, self._cache)
            hidden, residual = comm.reduce_add_norm(partial, residual, norm)
        if comm.is_last:
            return hidden
        residual = comm.reduce_add(pieces[-1].forward(hidden, batch, self._cache), residual)
        comm.send(residual)
        return residual

    def rows(self, hidden: Array, indices: NDArray[np.int32]) -> Array:
        return hidden[indices]

    def remember(self, slots: NDArray[np.int32], token_ids: Array) -> None:
        self._last_ids[slots] = token_ids
