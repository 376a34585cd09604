"""A machine without a GPU: float32, NumPy, the ops of engine.cpu and ref."""

from __future__ import annotations

import logging
from typing import get_args

import numpy as np
from threadpoolctl import threadpool_limits

from engine.backends.backend import Place, Room
from engine.checkpoint.loader import load_weights
from engine.checkpoint.prepare import prepare_weights
from engine.checkpoint.source import ModelSource
from engine.comm.communicator import Communicator, OneRank
from engine.comm.mpi_ranks import MpiRanks
from engine.comm.mpi_sums import MpiComm, WireFormat
from engine.config import EngineConfig, ModelConfig, ParallelConfig, StepLimits
from engine.errors import ConfigError
from engine.forward import EagerForward, Forward
from engine.halves import Halving
from engine.kv_cache import KVCache, KVSwap, make_kv_cache
from engine.memory import FLOAT32, plan_memory
from engine.memory_plan import MemoryPlan
from engine.models.model import Model
from engine.ops import cpu_ops
from engine.rope_table import RopeTable
from engine.runner import ModelRunner
from engine.system import available_memory, usable_cores
from engine.weights import WeightMap, Weights, weight_bytes

logger = logging.getLogger(__name__)

LIMITS = StepLimits(max_num_seqs=64, max_num_batched_tokens=512)  # unless the user says others


class CpuBackend:
    """See engine.backends.backend.Backend."""

    def __init__(self, config: EngineConfig, place: Place) -> None:
        if config.dtype in ("bfloat16", "float16"):
            raise ConfigError(f"--dtype {config.dtype}: a CPU computes in float32; use auto or float32")
        if config.w4a8 != "off":
            logger.warning("--w4a8 %s is left out: it is for GPUs of compute capability 9.0", config.w4a8)
        self._kv_codes = config.kv_codes
        self._place = place
        # One thing is done after another here, so nothing is gained: for those who want to see it
        self._halving = Halving(min_tokens=2, min_decodes=2) if config.dual_stream == "on" else Halving()
        num_threads = config.num_threads or max(1, usable_cores() // place.count)
        threadpool_limits(1, user_api="blas")  # the threads are those of engine.cpu.team
        self.ops = cpu_ops(num_threads)
        self.limits = LIMITS
        self.overlaps = False
        self.description = f"device cpu, float32, {num_threads} threads"
        self.kind = "a CPU in float32"
        self.numbers = "float32"

    def room(self, weight_map: WeightMap) -> Room | None:
        return None

    def free_beside(self, weight_map: WeightMap) -> int:
        return available_memory() // self._place.count - weight_bytes(weight_map, FLOAT32)

    def make_comm(
        self, world: MpiComm | None, parallel: ParallelConfig, model_config: ModelConfig, config: EngineConfig
    ) -> Communicator:
        wires: dict[str, WireFormat] = {"auto": "float32", **{name: name for name in get_args(WireFormat)}}
        if config.allreduce not in wires:
            raise ConfigError(f"--allreduce {config.allreduce}: is for GPUs; ranks of a CPU have {', '.join(wires)}")
        if world is None:
            return OneRank(self.ops)
        return MpiRanks(self.ops, world, parallel, model_config, wires[config.allreduce])

    def load(self, source: ModelSource, weight_map: WeightMap, config: EngineConfig, progress: bool) -> Weights:
        loaded = load_weights(source, weight_map, seed=config.seed, progress=progress, load_format=config.load_format)
        return prepare_weights(loaded, weight_map, self.ops)

    def plan_memory(
        self, config: EngineConfig, limits: StepLimits, model: Model, weights: Weights, num_positions: int
    ) -> MemoryPlan:
        return plan_memory(config, limits, model, weights.num_bytes, num_positions, self._place.count)

    def make_cache(self, model: Model, plan: MemoryPlan) -> KVCache:
        return make_kv_cache(model.cache_specs, plan.num_blocks, plan.block_size, codes=self._kv_codes)

    def make_swap(self, model: Model, cache: KVCache, plan: MemoryPlan) -> KVSwap:
        on_host = make_kv_cache(model.cache_specs, plan.num_swap_places, plan.block_size, codes=self._kv_codes)
        return KVSwap(cache, on_host, self.ops.kv_cache_swap, np.asarray)

    def make_forward(
        self, limits: StepLimits, model: Model, comm: Communicator, cache: KVCache, rope: RopeTable, num_positions: int
    ) -> Forward:
        forward = EagerForward(model, comm, cache, rope, limits.max_num_seqs)
        forward.halve(self._halving)
        return forward

    def warm_up(self, runner: ModelRunner) -> None:
        """A CPU has nothing to warm."""

    def settle(self) -> None:
        """And nothing to hold fast."""

    def num_late_allocations(self) -> int:
        """Arrays come from the system when they are made, and are not counted."""
        return 0


def make_backend(config: EngineConfig, model_config: ModelConfig, place: Place) -> CpuBackend:
    return CpuBackend(config, place)
