"""Steps over ranks without an engine around them: a model's forward pass on each wire, and plans to give it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from engine.backends.backend import Backend, Place
from engine.backends.choose import make_backend
from engine.batch import StepPlan
from engine.checkpoint.loader import load_model_config
from engine.checkpoint.source import resolve
from engine.comm.communicator import Communicator, OneRank
from engine.comm.ranks import Ranks
from engine.config import EngineConfig, ParallelConfig
from engine.errors import ConfigError
from engine.forward import Forward
from engine.halves import Halving
from engine.models.model import Model
from engine.models.registry import ARCHITECTURES
from engine.ops import OpTable
from engine.rope_table import RopeTable
from engine.split import rank_config, rank_weights
from engine.weights import Weights

Array = Any

CONTEXT, BLOCK_SIZE = 256, 16  # tokens before those that decode
WHOLE, MANY = Halving(), 256
NO_WIRE = "none"  # each rank takes its own part for the sum


class Watch(Protocol):
    """Stands around what a step is made of; see conformance.ranks.timeline."""

    def ops(self, table: OpTable, weights: Weights) -> OpTable: ...
    def model(self, model: Model) -> Model: ...
    def comm(self, comm: Communicator) -> Communicator: ...


@dataclass(frozen=True, slots=True)
class Steps:
    """forwards: a pass over each wire; wait: until hidden states are there; device: what computes, in words."""

    forwards: Mapping[str, Forward]
    num_pieces: int
    wait: Callable[[Array], None]
    device: str


def make_steps(config: EngineConfig, ranks: Ranks, wires: Sequence[str], watch: Watch | None = None) -> Steps:
    """Of a model split over all ranks; wires: of --allreduce, or NO_WIRE.

    Raises:
        ConfigError: there is one rank, or the model cannot be split so.
    """
    if ranks.size == 1:
        raise ConfigError("there is one rank, and so no wire; start it with mpirun -n 2 or more")
    source = resolve(config.model)
    whole = load_model_config(source)
    parallel = ParallelConfig(ranks.rank, ranks.size)
    part = rank_config(whole, parallel)
    backend: Backend = make_backend(config, part, Place(ranks.host_rank, len(ranks.host_ranks)))
    comms: dict[str, Communicator] = {
        name: backend.make_comm(ranks.world, parallel, whole, replace(config, allreduce=name))
        for name in reversed(wires)  # memory is planned with the last one
        if name != NO_WIRE
    }
    if NO_WIRE in wires:
        comms[NO_WIRE] = OneRank(backend.ops)
    architecture = ARCHITECTURES[whole.architecture]
    weights = backend.load(source, rank_weights(architecture.weight_map(whole), whole, parallel), config, False)
    ops = backend.ops if watch is None else watch.ops(backend.ops, weights)
    model = architecture.build(part, weights, ops)
    limits, num_positions = config.step_limits(backend.limits), config.max_model_len or 0
    memory = backend.plan_memory(config, limits, model, weights, num_positions)
    cache = backend.make_cache(model, memory)
    rope = RopeTable(part.rope, part.rotary_dim, num_positions)
    if watch is not None:
        model, comms = watch.model(model), {name: watch.comm(comm) for name, comm in comms.items()}
    forwards = {
        name: backend.make_forward(limits, model, comm, cache, rope, num_positions) for name, comm in comms.items()
    }

    def wait(hidden: Array) -> None:
        backend.ops.sampling.start_copy(hidden[:1])()

    return Steps(forwards, len(model.pieces), wait, backend.description)


def halving_of(num_tokens: int) -> Halving:
    """That cuts a step of so many tokens in two, on tiles of kernels where it has many."""
    return Halving(num_tokens, num_tokens, 128 if num_tokens >= MANY else 1)


def prompt_plan(num_tokens: int) -> StepPlan:
    """One prompt in the first blocks."""
    return _plan([num_tokens], [0], np.arange(-(-num_tokens // BLOCK_SIZE), dtype=np.int32)[None], 0)


def decode_plan(num_seqs: int) -> StepPlan:
    """Sequences that share CONTEXT tokens, and have a block each for the next one."""
    shared = CONTEXT // BLOCK_SIZE
    table = np.tile(np.arange(shared + 1, dtype=np.int32), (num_seqs, 1))
    table[:, shared] = shared + np.arange(num_seqs)
    return _plan([1] * num_seqs, [CONTEXT] * num_seqs, table, num_seqs)


def _plan(counts: Sequence[int], starts: Sequence[int], table: Array, num_decodes: int) -> StepPlan:
    num_seqs = len(counts)
    zeros, ones = np.zeros(num_seqs, np.int32), np.ones(num_seqs, np.int32)
    return StepPlan(
        step=0,
        slots=np.arange(num_seqs, dtype=np.int32),
        starts=np.array(starts, np.int32),
        cu_seqlens_q=np.cumsum([0, *counts], dtype=np.int32),
        token_ids=np.arange(sum(counts), dtype=np.int32) % 61 + 3,
        block_table=table,
        num_logits=ones,
        samples=ones.astype(np.bool_),
        rope_lens=zeros,
        two_way_lens=zeros,
        num_decodes=num_decodes,
    )
