"""Where partial sums of ranks become whole. The forward pass calls it between the pieces of a model, the runner at the
end; no model does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from engine.comm.alarm import Alarms
from engine.ops import OpTable
from engine.weights import Norm

Array = Any
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StepSum:
    """Which sum it is, of those that a stage's pieces ask for in a step.

    first_row: among the step's rows, of those that are added up: all, or a half, whose sums are a row of their own.
    is_first, is_last: of these rows. is_beside: other rows are computed meanwhile.
    """

    first_row: int
    is_first: bool
    is_last: bool
    is_beside: bool = False


ALONE = StepSum(0, is_first=True, is_last=True)


class Communicator(Protocol):
    """What a rank has in common with the others: those that share its layers, and the stages before and after it.

    Every rank calls the same methods in the same order. Sums run over ranks in order, in float32, and are rounded once,
    so all ranks of a stage have the same bits.
    """

    is_first: bool  # this rank's stage has the embedding
    is_last: bool  # … the final norm and the head
    alarms: Alarms  # of kernels that wait for other ranks
    shares_ids: bool  # what rank 0 samples is given to its stage at once, so that the next plan may name it by slot

    def reduce(self, partial: Array) -> Array:
        """The sum of partials, [num_tokens, hidden_size]: what the embedding gives."""
        ...

    def norm(self, x: Array, norm: Norm) -> Array:
        """norm(x), [num_tokens, hidden_size], in the codes of norm.into if it takes any, in norm.order if there is
        one: what comes before the first piece."""
        ...

    def reduce_add_norm(self, partial: Array, residual: Array, norm: Norm, which: StepSum) -> tuple[Array, Array]:
        """(norm(sum of partials + residual), sum of partials + residual), each [num_tokens, hidden_size]."""
        ...

    def reduce_add(self, partial: Array, residual: Array, which: StepSum) -> Array:
        """Sum of partials + residual, [num_tokens, hidden_size]: what leaves a stage that is not the last."""
        ...

    def send(self, residual: Array) -> None:
        """Hands the residual, [num_tokens, hidden_size], on to the next stage."""
        ...

    def receive(self, num_tokens: int) -> Array:
        """The residual that the stage before has sent, [num_tokens, hidden_size]."""
        ...

    def gather_logits(self, part: Array) -> Array | None:
        """The logits of this rank's rows of the vocabulary, [num_logits, rows], beside those of the others:
        [num_logits, vocab_size] on rank 0, None on other ranks. Ranks of the last stage alone call it."""
        ...

    def share_ids(self, ids: Array | None, num_ids: int) -> Array:
        """What rank 0 has sampled, [num_ids] int32, on all ranks of its stage; the others bring None."""
        ...

    def settle(self, get: Callable[[], T]) -> T:
        """What get gives, which waits for what ranks have computed.

        Raises:
            EngineDeadError: a rank has given up waiting for another, so it may be wrong.
        """
        ...

    def close(self) -> None:
        """Returns when what was sent has been taken. The last call."""
        ...


class OneRank:
    """The communicator of a model that is not split: nothing to add up, so only the fused add + norm is left."""

    is_first = is_last = True
    shares_ids = False

    def __init__(self, ops: OpTable) -> None:
        self.alarms = Alarms()
        self._ops = ops

    def reduce(self, partial: Array) -> Array:
        return partial

    def norm(self, x: Array, norm: Norm) -> Array:
        if norm.kind == "layernorm":
            return self._ops.layernorm(x, norm.weight, norm.bias, norm.eps)
        if norm.into is not None:
            return self._ops.norm_quant(x, norm.weight, norm.eps, norm.into)
        if norm.order is not None:
            return self._ops.rmsnorm_ordered(x, norm.weight, norm.eps, norm.order)
        return self._ops.rmsnorm(x, norm.weight, norm.eps)

    def reduce_add_norm(self, partial: Array, residual: Array, norm: Norm, which: StepSum) -> tuple[Array, Array]:
        if norm.kind == "layernorm":
            return self._ops.add_layernorm(partial, residual, norm.weight, norm.bias, norm.eps)
        if norm.into is not None:
            return self._ops.add_norm_quant(partial, residual, norm.weight, norm.eps, norm.into)
        if norm.order is not None:
            return self._ops.add_rmsnorm_ordered(partial, residual, norm.weight, norm.eps, norm.order)
        return self._ops.add_rmsnorm(partial, residual, norm.weight, norm.eps)

    def reduce_add(self, partial: Array, residual: Array, which: StepSum) -> Array:
        return partial + residual

    def send(self, residual: Array) -> None:
        raise NotImplementedError("one rank is the first stage and the last")

    def receive(self, num_tokens: int) -> Array:
        raise NotImplementedError("one rank is the first stage and the last")

    def gather_logits(self, part: Array) -> Array | None:
        return part

    def share_ids(self, ids: Array | None, num_ids: int) -> Array:
        return ids

    def settle(self, get: Callable[[], T]) -> T:
        return get()

    def close(self) -> None:
        pass
