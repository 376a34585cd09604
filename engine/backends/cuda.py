"""One NVIDIA GPU: bfloat16 or float16, the kernels of cuda/, cuBLAS for many rows."""

from __future__ import annotations

import cupy
import ml_dtypes
import numpy as np

from engine.batch import StepPlan
from engine.checkpoint.loader import load_weights
from engine.checkpoint.source import ModelSource
from engine.comm.communicator import OneRank
from engine.config import EngineConfig, ModelConfig, StepLimits
from engine.errors import ConfigError, KernelError
from engine.forward import Forward
from engine.kernels.dry_run import SAMPLINGS, run_dry
from engine.kernels.forward import GpuForward, graph_sizes, piece_sizes
from engine.kernels.gpu import Gpu
from engine.kernels.graphs import Recorder
from engine.kernels.notes import Notes
from engine.kernels.sampling import KernelSampling
from engine.kernels.store import GpuStore
from engine.kernels.table import kernel_ops
from engine.kv_cache import KVCache, make_kv_cache
from engine.memory import MemoryPlan
from engine.models.model import Model
from engine.rope_table import RopeTable
from engine.runner import PROMPT_LOGPROB_ROWS, ModelRunner
from engine.system import cache_dir
from engine.weights import WeightMap, Weights

LIMITS = StepLimits(max_num_seqs=256, max_num_batched_tokens=8192)  # unless the user says others
DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}
RESERVE_BYTES = 1 << 30  # for graphs, modules and what others take of the same GPU


class CudaBackend:
    """See engine.backends.backend.Backend."""

    def __init__(self, config: EngineConfig, model_config: ModelConfig) -> None:
        name = config.dtype if config.dtype != "auto" else model_config.dtype
        if config.dtype == "float32":
            raise ConfigError(
                "--dtype float32: a GPU computes in bfloat16 or float16; use one of these, or --device cpu"
            )
        self._dtype = DTYPES.get(name, DTYPES["bfloat16"])
        cache = cache_dir() / "kernels"
        self._gpu = Gpu(cache, None if config.cuda_arch == "auto" else config.cuda_arch)
        self._notes = Notes(self._gpu.num_sms, self._gpu.max_shared_bytes, self._gpu.has_wgmma)
        run_dry(model_config, self._dtype, config.step_limits(LIMITS), self._notes)
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._stream.use()
        self.limits = LIMITS
        self.overlaps = True
        num_rows = max(config.step_limits(LIMITS).max_num_seqs, PROMPT_LOGPROB_ROWS)
        self._recorder = Recorder(kernel_ops(self._gpu, KernelSampling(self._gpu, num_rows)))
        self.ops = self._recorder.ops
        properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
        self.description = (
            f"device cuda: {properties['name'].decode()} ({self._gpu.arch}, {properties['totalGlobalMem'] / 1e9:,.0f} "
            f"GB), {self._dtype}"
        )

    def load(self, source: ModelSource, weight_map: WeightMap, config: EngineConfig, progress: bool) -> Weights:
        self._gpu.prepare(self._notes.instances, progress)
        store = GpuStore(self._dtype)
        weights = load_weights(
            source, weight_map, store, seed=config.seed, progress=progress, load_format=config.load_format
        )
        store.finish()
        return weights

    def plan_memory(
        self, config: EngineConfig, limits: StepLimits, model: Model, weights: Weights, num_positions: int
    ) -> MemoryPlan:
        """The pool gets what is left of gpu_memory_utilization after the largest step has been run once."""
        block_size = config.block_size
        block_bytes = sum(spec.bytes_per_block(block_size, self._dtype.itemsize) for spec in model.cache_specs)
        pool = cupy.get_default_memory_pool()
        before = pool.total_bytes()
        trial = MemoryPlan(weights.num_bytes, block_bytes, 0, 1, block_size, num_positions)
        forward = self._forward(limits, model, OneRank(self.ops), self.make_cache(model, trial), num_positions)
        hidden = forward.try_prompt(limits.max_num_batched_tokens)
        model.logits(hidden[: max(limits.max_num_seqs, PROMPT_LOGPROB_ROWS)])
        self._stream.synchronize()
        workspace = pool.total_bytes() - before
        del forward, hidden
        free, total = cupy.cuda.Device().mem_info
        room = int(total * config.gpu_memory_utilization) - (total - free) - RESERVE_BYTES
        num_blocks = config.num_gpu_blocks_override
        if num_blocks is None:
            num_blocks = min(limits.max_num_seqs * -(-num_positions // block_size), room // block_bytes)
        if num_blocks < 1 or num_blocks * block_bytes > free - RESERVE_BYTES // 2:
            raise ConfigError(
                f"no memory is left for the KV cache: {free / 1e9:,.1f} of {total / 1e9:,.1f} GB are free, of which "
                f"--gpu-memory-utilization {config.gpu_memory_utilization} leaves {max(room, 0) / 1e9:,.1f}, and a "
                f"block of {block_size} tokens takes {block_bytes / 1e6:,.1f} MB; use a smaller model, a smaller "
                "--max-num-batched-tokens, or more of the GPU"
            )
        return MemoryPlan(weights.num_bytes, num_blocks * block_bytes, workspace, num_blocks, block_size, num_positions)

    def make_cache(self, model: Model, plan: MemoryPlan) -> KVCache:
        return make_kv_cache(model.cache_specs, plan.num_blocks, plan.block_size, self._dtype, cupy.zeros)

    def make_forward(
        self, limits: StepLimits, model: Model, comm: OneRank, cache: KVCache, rope: RopeTable, num_positions: int
    ) -> Forward:
        forward = self._forward(limits, model, comm, cache, num_positions, rope)
        for num_tokens in (*range(1, 33), *range(40, 257, 8)):  # a linear layer's kernel goes by the number of rows
            if num_tokens <= limits.max_num_batched_tokens:
                model.logits(forward.try_prompt(num_tokens))
        forward.capture(graph_sizes(limits.max_num_seqs), piece_sizes(limits.max_num_batched_tokens))
        return forward

    def warm_up(self, runner: ModelRunner) -> None:
        """Runs every kind of step once, in block 0, which holds nothing yet; then nothing more may be compiled."""
        vocab_size = runner.model.config.vocab_size
        for sampling in SAMPLINGS:
            runner.sampler.add(0, sampling, seed=0, prompt_ids=(0, 1), eos_token_ids=())
            for num_tokens in (1, 2, min(32, runner.cache.block_size)):
                runner.step(_first_step(num_tokens, vocab_size))
            runner.release(0)
        self._gpu.seal()

    def _forward(
        self,
        limits: StepLimits,
        model: Model,
        comm: OneRank,
        cache: KVCache,
        num_positions: int,
        rope: RopeTable | None = None,
    ) -> GpuForward:
        table = rope or RopeTable(model.config.rope, model.config.rotary_dim, num_positions)
        width = -(-num_positions // cache.block_size)
        return GpuForward(model, comm, cache, table, self._gpu, self._recorder, limits, width)


def _first_step(num_tokens: int, vocab_size: int) -> StepPlan:
    """The first tokens of one sequence in slot 0 and block 0."""
    one, zero = np.ones(1, np.int32), np.zeros(1, np.int32)
    return StepPlan(
        step=0,
        slots=zero,
        starts=zero,
        cu_seqlens_q=np.array([0, num_tokens], np.int32),
        token_ids=np.arange(num_tokens, dtype=np.int32) % vocab_size,
        block_table=np.zeros((1, 1), np.int32),
        num_logits=one,
        samples=np.ones(1, np.bool_),
        rope_lens=zero,
        two_way_lens=zero,
        num_decodes=int(num_tokens == 1),
    )


def make_backend(config: EngineConfig, model_config: ModelConfig) -> CudaBackend:
    """Raises KernelError where CUDA finds no GPU, or one that is too old."""
    try:
        return CudaBackend(config, model_config)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise KernelError(f"CUDA does not start: {error}") from error
