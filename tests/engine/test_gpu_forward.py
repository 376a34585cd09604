"""The forward pass of a GPU and its graphs, over a stand-in for CuPy: to the bit what eager steps give.

The stand-in is lazy and poisons its memory (see gpu_stand_in), so a step that reads what is not there yet, or not there
any more, gives other numbers here. KVM-02 and KVM-07 are hard cases of that kind.
"""

from __future__ import annotations

import random
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
from engine.kv_cache import KVCache, make_kv_cache
from engine.loop import Engine
from engine.memory import MemoryPlan, plan_memory
from engine.models.model import Model
from engine.rope_table import RopeTable
from engine.runner import ModelRunner
from engine.weights import Weights
from tests.engine import gpu_stand_in as stand_in
from tests.engine.engines import Outputs, finish, request, tiny_engine
from tests.engine.gpu_stand_in import gpu_forward
from tests.engine.stand_in_ops import plain_ops, stand_in_ops

__all__ = ["gpu_forward"]  # a fixture

BATCH_SIZES, TOKEN_SIZES = (1, 2, 4, 8), (4, 8, 16, 24)
LIMITS = StepLimits(max_num_seqs=8, max_num_batched_tokens=32)  # beyond the largest piece: some steps are eager


class StandInBackend:
    """See engine.backends.backend. Without a module for the forward pass: eager, on NumPy arrays."""

    description = "stand-in"
    limits = LIMITS

    def __init__(self, module: ModuleType | None) -> None:
        self._module = module
        self.overlaps = module is not None
        self.ops = plain_ops()
        if module is not None:
            self._recorder = module.Recorder(stand_in_ops())
            self.ops = self._recorder.ops

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
        forward.capture(BATCH_SIZES, TOKEN_SIZES)
        return forward

    def warm_up(self, runner: ModelRunner) -> None:
        """Nothing is compiled."""


def make_engine(folder: Path, module: ModuleType | None, **settings: Any) -> Engine:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.build.make_backend", lambda config, model_config: StandInBackend(module))
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


def storm(engine: Engine, seed: int) -> Outputs:
    """Requests that come while others run, with prompts of any length, some of them sampled, one aborted."""
    rng = random.Random(seed)
    outputs = Outputs()
    for number in range(14):
        wants: dict[str, Any] = {"max_tokens": rng.choice([1, 3, 12, 30]), "seed": number}
        if rng.random() < 0.3:
            wants |= {"temperature": 1.0, "top_p": 0.9}
        if rng.random() < 0.5:
            wants["logprobs"] = None
        if rng.random() < 0.2:
            wants["prompt_logprobs"] = 1
        if rng.random() < 0.2:
            wants["repetition_penalty"] = 1.3
        prompt = [rng.randrange(4, 60) for _ in range(rng.choice([1, 2, 5, 9, 30, 45]))]
        engine.add(request(str(number), prompt, **wants))
        for _ in range(rng.choice([0, 0, 1, 2])):
            outputs.take(engine.step())
        if number == 7:
            engine.abort("6")
            outputs.pop("6", None)
    return finish(engine, outputs)


@pytest.mark.parametrize("name", ["llama", "mistral", "dynamic", "minicpm", "command_r", "cpm1"])
def test_storm(name: str, gpu_forward: ModuleType, tmp_path: Path) -> None:
    """Mixed steps, chunks, padding, preemption, penalties, overlap: all outputs are those of an eager engine."""
    folder = model_folder(tmp_path, name)
    settings = {"num_gpu_blocks_override": 18, "max_model_len": 60}
    engine, eager = make_engine(folder, gpu_forward, **settings), make_engine(folder, None, **settings)
    before = stand_in.STREAM.num_graphs
    for seed in range(2):
        assert storm(engine, seed) == storm(eager, seed)
    assert engine.scheduler.num_preemptions > 0
    assert stand_in.STREAM.num_graphs - before > engine.stats().steps, "graphs in pieces were launched"
