"""Where partial sums of ranks become whole. The runner calls it between the pieces of a model."""

from __future__ import annotations

from typing import Any

from engine.ops import OpTable
from engine.weights import Norm

Array = Any


class OneRank:
    """The communicator of a model that is not split: nothing to add up, so only the fused add + norm is left."""

    def __init__(self, ops: OpTable) -> None:
        self._ops = ops

    def norm(self, x: Array, norm: Norm) -> Array:
        """norm(x), [num_tokens, hidden_size]: what comes before the first piece."""
        if norm.kind == "layernorm":
            return self._ops.layernorm(x, norm.weight, norm.bias, norm.eps)
        return self._ops.rmsnorm(x, norm.weight, norm.eps)

    def reduce_add_norm(self, partial: Array, residual: Array, norm: Norm) -> tuple[Array, Array]:
        """(norm(sum of partials + residual), sum of partials + residual), each [num_tokens, hidden_size]."""
        if norm.kind == "layernorm":
            return self._ops.add_layernorm(partial, residual, norm.weight, norm.bias, norm.eps)
        return self._ops.add_rmsnorm(partial, residual, norm.weight, norm.eps)
