"""The communicator of CPU ranks: MPI is the wire."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from engine.comm.alarm import Alarms
from engine.comm.communicator import ALONE, OneRank, StepSum
from engine.comm.mpi_sums import Float32, MpiComm, Request, WireFormat, make_sum, wait
from engine.config import ModelConfig, ParallelConfig
from engine.ops import OpTable
from engine.weights import Norm

Array = Any
T = TypeVar("T")


class MpiRanks:
    """See engine.comm.communicator.Communicator. Activations are float32, whatever the wire is.

    Sums between pieces go over a wire of the given format; those of the embedding, of which each token's comes from one
    rank, the way between stages and the logits are always exact, and as int8 the last sum of a stage.
    """

    shares_ids = False  # a step ends before it is known anyway

    def __init__(
        self,
        ops: OpTable,
        world: MpiComm,
        parallel: ParallelConfig,
        config: ModelConfig,
        wire: WireFormat = "float32",
    ) -> None:
        self.alarms = Alarms()
        self.is_first = parallel.stage == 0
        self.is_last = parallel.stage == parallel.pipeline_parallel_size - 1
        self._one = OneRank(ops)
        self._world, self._stage = world, world.Split(parallel.stage, parallel.tp_rank)
        self._next = parallel.rank - parallel.tensor_parallel_size
        self._previous = parallel.rank + parallel.tensor_parallel_size
        self._hidden_size, self._vocab_size = config.hidden_size, config.vocab_size
        self._exact_sum, self._sum = make_sum(self._stage, "float32"), make_sum(self._stage, wire)
        self._sending: tuple[Request, Array] | None = None  # with what is sent, which must stay

    def reduce(self, partial: Float32) -> Float32:
        return self._exact_sum(partial, ALONE)

    def norm(self, x: Float32, norm: Norm) -> Array:
        return self._one.norm(x, norm)

    def reduce_add_norm(self, partial: Float32, residual: Float32, norm: Norm, which: StepSum) -> tuple[Array, Array]:
        return self._one.reduce_add_norm(self._sum(partial, which), residual, norm, which)

    def reduce_add(self, partial: Float32, residual: Float32, which: StepSum) -> Array:
        return self._sum(partial, which) + residual

    def send(self, residual: Float32) -> None:
        """Waits for the residual of the step before to be taken, not for this one."""
        self.close()
        kept = np.ascontiguousarray(residual)
        self._sending = self._world.Isend(kept, self._next), kept

    def receive(self, num_tokens: int) -> Float32:
        residual = np.empty((num_tokens, self._hidden_size), np.float32)
        wait(self._world.Irecv(residual, self._previous))
        return residual

    def gather_logits(self, part: Float32) -> Float32 | None:
        size, is_root = self._stage.size, self._stage.rank == 0
        parts = np.empty((size if is_root else 0, *part.shape), np.float32)
        wait(self._stage.Igather(np.ascontiguousarray(part), parts, 0))
        if not is_root:
            return None
        whole = parts.swapaxes(0, 1).reshape(len(part), size * part.shape[1])
        return np.ascontiguousarray(whole[:, : self._vocab_size])

    def share_ids(self, ids: Array | None, num_ids: int) -> Array:
        shared = np.empty(num_ids, np.int32) if ids is None else np.ascontiguousarray(ids, np.int32)
        wait(self._stage.Ibcast(shared, 0))
        return shared

    def settle(self, get: Callable[[], T]) -> T:
        return get()

    def close(self) -> None:
        if self._sending is not None:
            wait(self._sending[0])
            self._sending = None
