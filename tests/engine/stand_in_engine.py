"""Engines over the stand-in for CuPy, and the same computed eagerly with NumPy."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from conformance.golden_families import family_model
from conformance.golden_models import rand_model
from engine.checkpoint.loader import load_weights
from engine.comm.communicator import OneRank
from engine.config import EngineConfig, StepLimits
from engine.forward import EagerForward
from engine.halves import Halving
from engine.kv_cache import KVCache, make_kv_cache
from engine.loop import Engine
from engine.memory import plan_memory
from engine.memory_plan import MemoryPlan
from engine.models.model import Model
from engine.rope_table import RopeTable
from engine.runner import ModelRunner
from engine.weights import Weights
from tests.engine import gpu_stand_in as stand_in
from tests.engine.engines import tiny_engine
from tests.engine.stand_in_ops import plain_ops, stand_in_ops

BATCH_SIZES, TOKEN_SIZES = (1, 2, 4, 8), (4, 8, 16, 24)
WHOLE = Halving()
LIMITS = StepLimits(max_num_seqs=8, max_num_batched_tokens=32)  # beyond the largest piece: some steps are eager


class StandInBackend:
    """See engine.backends.backend. Without a module for the forward pass: eager, on NumPy arrays."""

    description = kind = "stand-in"
    limits = LIMITS

    def __init__(self, module: ModuleType | None, halving: Halving = WHOLE) -> None:
        self._module, self._halving = module, halving
        self.overlaps = module is not None
        self.ops = plain_ops()
        if module is not None:
            self._recorder = module.Recorder(stand_in_ops())
            self.ops = self._recorder.ops

    def room(self, weight_map: Any) -> None:
        """It has no memory of its own."""

    def make_comm(self, world: Any, parallel: Any, model_config: Any, config: EngineConfig) -> OneRank:
        return OneRank(self.ops)

    def load(self, source: Any, weight_map: Any, config: EngineConfig, progress: bool) -> Weights:
        return load_weights(source, weight_map, progress=progress)

    def plan_memory(self, config: Any, limits: Any, model: Model, weights: Weights, num_positions: int) -> MemoryPlan:
        return plan_memory(config, limits, model, weights.num_bytes, num_positions)

    def make_cache(self, model: Model, plan: MemoryPlan) -> KVCache:
        zeros = np.zeros if self._module is None else stand_in.zeros
        return make_kv_cache(model.cache_specs, plan.num_blocks, plan.block_size, np.float32, zeros)

    def make_forward(
        self, limits: StepLimits, model: Model, comm: OneRank, cache: KVCache, rope: RopeTable, num_positions: int
    ) -> Any:
        if self._module is None:
            return EagerForward(model, comm, cache, rope, limits.max_num_seqs)
        width = -(-num_positions // cache.block_size)
        gpu = stand_in.Gpu()
        forward = self._module.GpuForward(model, comm, cache, rope, gpu, self._recorder, limits, width)
        forward.halve(self._halving)
        forward.capture(BATCH_SIZES, TOKEN_SIZES)
        return forward

    def warm_up(self, runner: ModelRunner) -> None:
        """Nothing is compiled."""

    def settle(self) -> None:
        """And nothing held fast."""

    def num_late_allocations(self) -> int:
        return 0


def make_engine(folder: Path, module: ModuleType | None, halving: Halving = WHOLE, **settings: Any) -> Engine:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.build.make_backend", lambda *_: StandInBackend(module, halving))
        return tiny_engine(folder, **({"max_num_batched_tokens": LIMITS.max_num_batched_tokens} | settings))


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"vocab_size": 60, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 7},
    "dynamic": {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 16},
}


def model_folder(folder: Path, name: str) -> Path:
    if name not in FAMILIES:
        return family_model(folder, name)
    return rand_model(folder, **(FAMILIES["llama"] | {"num_key_value_heads": 1} | FAMILIES[name]))
