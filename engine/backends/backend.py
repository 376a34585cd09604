"""What engine.build needs of a kind of machine: memory, weights on it, and a forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from engine.checkpoint.source import ModelSource
from engine.comm.communicator import Communicator
from engine.comm.mpi_sums import MpiComm
from engine.config import EngineConfig, ModelConfig, ParallelConfig, StepLimits
from engine.forward import Forward
from engine.kv_cache import KVCache, KVSwap
from engine.memory_plan import MemoryPlan
from engine.models.model import Model
from engine.ops import OpTable
from engine.rope_table import RopeTable
from engine.runner import ModelRunner
from engine.weights import WeightMap, Weights


@dataclass(frozen=True, slots=True)
class Place:
    """Which of the ranks of its host a rank is: they share memory and cores, and each has a GPU of its own."""

    number: int
    count: int


ALONE = Place(0, 1)


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes that weights need, and that a machine has for them, which `where` names."""

    needed: int
    free: int
    total: int
    where: str


class Backend(Protocol):
    """A CPU or a GPU. The methods are called once each, in this order."""

    ops: OpTable
    limits: StepLimits  # unless the user says others
    overlaps: bool  # a step may be launched while the one before still runs
    description: str  # for the log: device, type of the weights
    kind: str  # of machine: with one of its own, the ranks of a stage have the same bits
    numbers: str  # the type of activations, which ranks send each other

    def room(self, weight_map: WeightMap) -> Room | None:
        """What these weights would need, and what is free now; None: where memory is not kept apart for them."""
        ...

    def free_beside(self, weight_map: WeightMap) -> int:
        """Bytes that are free now, for this rank, if these weights were there; below 0: they would not fit."""
        ...

    def make_comm(
        self, world: MpiComm | None, parallel: ParallelConfig, model_config: ModelConfig, config: EngineConfig
    ) -> Communicator:
        """What joins this rank to the others. world: all of them; None: there is but this one."""
        ...

    def load(self, source: ModelSource, weight_map: WeightMap, config: EngineConfig, progress: bool) -> Weights:
        """The weights of a checkpoint, or random ones, where and how the op table wants them."""
        ...

    def plan_memory(
        self, config: EngineConfig, limits: StepLimits, model: Model, weights: Weights, num_positions: int
    ) -> MemoryPlan:
        """The size of the KV pool. Raises ConfigError where the largest step does not fit."""
        ...

    def make_cache(self, model: Model, plan: MemoryPlan) -> KVCache:
        """The whole pool."""
        ...

    def make_swap(self, model: Model, cache: KVCache, plan: MemoryPlan) -> KVSwap:
        """Copies blocks to the plan's swap space on the host, and back. Raises ConfigError if it cannot be had."""
        ...

    def make_forward(
        self, limits: StepLimits, model: Model, comm: Communicator, cache: KVCache, rope: RopeTable, num_positions: int
    ) -> Forward:
        """Computes steps on this machine."""
        ...

    def warm_up(self, runner: ModelRunner) -> None:
        """Runs all that only a first step needs, before anybody waits for it; on rank 0, whom the others follow."""
        ...

    def settle(self) -> None:
        """Warm-up is over: nothing more is compiled, and memory is what it will be."""
        ...

    def num_late_allocations(self) -> int:
        """How often memory of a GPU was found to have been allocated since then."""
        ...
