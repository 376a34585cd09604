"""All ranks of a split model in one process, as one model: each piece is the sum of what theirs give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from conformance.engine_run import Prompts, make_runner
from engine.batch import ForwardBatch
from engine.coded8 import FP8, INT8, decode8
from engine.comm.communicator import OneRank
from engine.config import ParallelConfig
from engine.forward import EagerForward
from engine.kv_cache import KVCache
from engine.models.model import Piece
from engine.ops import OpTable, cpu_ops
from engine.packed4 import PACKED, PACKED_GATED, unpack4
from engine.runner import ModelRunner
from engine.weights import LinearWeight

Array = Any


def all_ranks(tp: int, pp: int = 1, layers: tuple[int, ...] = ()) -> list[ParallelConfig]:
    """layers: of each stage; (): as even as can be."""
    return [ParallelConfig(rank, tp, pp, layers) for rank in range(tp * pp)]


def decoding_ops() -> OpTable:
    """The CPU's ops, which decode layers of 4 bits and of 8 when they are prepared."""
    ops = cpu_ops()

    def prepare(weight: LinearWeight) -> LinearWeight:
        if weight.format in (INT8, FP8):
            return ops.prepare(replace(weight, format="dense", tensors={"weight": decode8(weight.tensors)}))
        if weight.format not in (PACKED, PACKED_GATED):
            return ops.prepare(weight)
        shape = weight.out_features, weight.in_features
        q, scales, zeros = unpack4(weight.tensors, *shape, gated=weight.format == PACKED_GATED)
        size = shape[1] // scales.shape[1]
        steps = q.astype(np.float32) - zeros.astype(np.float32).repeat(size, 1)
        decoded = steps * scales.astype(np.float32).repeat(size, 1)
        if "order" in weight.tensors:
            order = weight.tensors["order"]
            columns = np.zeros((order.max() + 1, len(decoded)), np.float32)
            np.add.at(columns, order, decoded.T)
            decoded = np.ascontiguousarray(columns.T)
        in_features = decoded.shape[1]
        return ops.prepare(replace(weight, format="dense", in_features=in_features, tensors={"weight": decoded}))

    return replace(ops, prepare=prepare)


def in_rank_order(partials: Sequence[Array]) -> Array:
    total = partials[0].astype(np.float32)
    for part in partials[1:]:
        total = total + part
    return total.astype(partials[0].dtype)


def ranks_as_one(
    folder: Path,
    ops: OpTable,
    prompts: Prompts,
    tp: int,
    pp: int = 1,
    layers: tuple[int, ...] = (),
    **how: Any,
) -> ModelRunner:
    """A runner whose pieces are those of all ranks, stage after stage; each rank has its weights and its cache.

    layers: as for all_ranks. how: as for make_runner.
    """
    if tp * pp == 1:
        return make_runner(folder, ops, prompts, **how)
    ranks = all_ranks(tp, pp, layers)
    stages = [
        [make_runner(folder, ops, prompts, parallel=rank, **how) for rank in ranks if rank.stage == stage]
        for stage in range(pp)
    ]
    whole = make_runner(folder, ops, prompts, **how)
    vocab_size = whole.model.config.vocab_size
    model = replace(
        whole.model,
        embed=lambda batch: in_rank_order([rank.model.embed(batch) for rank in stages[0]]),
        pieces=tuple(piece for stage in stages for piece in _pieces(stage)),
        final_norm=stages[-1][0].model.final_norm,
        logits=lambda hidden: np.concatenate([rank.model.logits(hidden) for rank in stages[-1]], 1)[:, :vocab_size],
    )
    assert [piece.name for piece in model.pieces] == [piece.name for piece in whole.model.pieces]
    comm = OneRank(ops)
    forward = EagerForward(model, comm, whole.cache, whole.rope, len(prompts))
    return ModelRunner(model, forward, comm, whole.cache, whole.rope, whole.sampler, ops.sampling)


def _pieces(stage: Sequence[ModelRunner]) -> list[Piece]:
    pieces = []
    for parts in zip(*(rank.model.pieces for rank in stage), strict=True):
        each = [partial(_own, part.forward, rank.cache) for part, rank in zip(parts, stage, strict=True)]
        pieces.append(replace(parts[0], forward=partial(_sum, each)))
    return pieces


def _own(forward: Callable[..., Array], own: KVCache, hidden: Array, batch: ForwardBatch) -> Array:
    return forward(hidden, batch, own)


def _sum(each: Sequence[Callable[..., Array]], hidden: Array, batch: ForwardBatch, cache: KVCache) -> Array:
    return in_rank_order([forward(hidden, batch) for forward in each])
