"""One NVIDIA GPU: bfloat16 or float16, the kernels of cuda/, cuBLAS for many rows."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import cupy
import ml_dtypes
import numpy as np

from engine.backends.backend import Place, Room
from engine.batch import first_step
from engine.checkpoint.loader import load_weights
from engine.checkpoint.quantized import keep_packed
from engine.checkpoint.source import ModelSource
from engine.coded8 import FP8
from engine.comm.communicator import Communicator, OneRank
from engine.comm.join import join_gpus
from engine.comm.mpi_sums import MpiComm
from engine.config import EngineConfig, ModelConfig, ParallelConfig, StepLimits
from engine.errors import ConfigError, KernelError
from engine.forward import Forward
from engine.gpu_memory import GpuRoom, graph_buffer, mismatch, plan_gpu_memory, words_as_stored
from engine.halves import NEVER, Halving, first_that_pays
from engine.kernels.carried import CARRIED
from engine.kernels.dry_run import SAMPLINGS, run_dry
from engine.kernels.forward import MOST_IN_PIECES, GpuForward, graph_sizes, piece_sizes
from engine.kernels.gpu import Gpu, no_cuda
from engine.kernels.graphs import Recorder
from engine.kernels.notes import Notes
from engine.kernels.pools import Pools, pinned_array, room_for
from engine.kernels.sampling import KernelSampling
from engine.kernels.store import STAGING_BYTES, GpuStore
from engine.kernels.table import kernel_ops
from engine.kv_cache import KVCache, KVSwap, make_kv_cache
from engine.memory_plan import ALWAYS, LOADING, STEP, WEIGHTS, WORKSPACE, Buffer, MemoryPlan
from engine.models.model import Model
from engine.numa import bind_near
from engine.rope_table import RopeTable
from engine.runner import PROMPT_LOGPROB_ROWS, ModelRunner
from engine.system import cache_dir
from engine.weights import ActivationKind, WeightMap, Weights, weight_bytes, with_activations

LIMITS = StepLimits(max_num_seqs=256, max_num_batched_tokens=8192)  # unless the user says others
DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}
MAX_WAITING_BLOCKS = 64  # of a kernel that waits for other ranks: a link is full from about 16 on
HALVES = Halving(min_tokens=256, min_decodes=320, row_multiple=128)  # with fewer, weights bound
TRIED = (512, 768, 1536, 3072)  # tokens of steps that are timed whole and in halves
GONE = "another program has taken memory meanwhile, or --gpu-memory-utilization is too high"

logger = logging.getLogger(__name__)


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
        self._pools = Pools()
        self._notes = Notes(self._gpu.num_sms, self._gpu.max_shared_bytes, self._gpu.has_wgmma, self._gpu.has_fp8)
        self._kv_codes = config.kv_codes
        self._dual_stream = config.dual_stream
        self._w4a8: ActivationKind = "" if config.w4a8 == "off" else config.w4a8
        if self._w4a8 and not self._gpu.has_wgmma:
            logger.warning("--w4a8 %s is left out: it is of no use on %s", self._w4a8, self._gpu.arch)
            self._w4a8 = ""
        run_dry(model_config, self._dtype, config.step_limits(LIMITS), self._notes, self._kv_codes, self._w4a8)
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._stream.use()
        self.limits = LIMITS
        self.overlaps = True
        num_rows = max(config.step_limits(LIMITS).max_num_seqs, PROMPT_LOGPROB_ROWS)
        self._sampling = KernelSampling(self._gpu, num_rows)
        self._recorder = Recorder(kernel_ops(self._gpu, self._sampling))
        self.ops = self._recorder.ops
        self._comm: Communicator = OneRank(self.ops)
        self._world: MpiComm | None = None  # of ranks that share layers
        self._errors: Any = None  # that sums as int8 carry: see StageSums
        properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
        self._name = properties["name"].decode()
        self.kind = f"{self._name} ({self._gpu.arch}) in {self._dtype}"
        self.numbers = str(self._dtype)
        self.description = (
            f"device cuda: {self._name} ({self._gpu.arch}, {properties['totalGlobalMem'] / 1e9:,.0f} GB), {self._dtype}"
            + (f", KV cache in {self._kv_codes}" if self._kv_codes else "")
        )

    def room(self, weight_map: WeightMap) -> Room:
        device = cupy.cuda.Device()
        free, total = device.mem_info
        return Room(weight_bytes(keep_packed(weight_map), self._dtype.itemsize), free, total, f"GPU {device.id}")

    def free_beside(self, weight_map: WeightMap) -> int:
        room = self.room(weight_map)
        return room.free - room.needed

    def make_comm(
        self, world: MpiComm | None, parallel: ParallelConfig, model_config: ModelConfig, config: EngineConfig
    ) -> Communicator:
        if world is None:
            return self._comm
        max_blocks = min(MAX_WAITING_BLOCKS, self._gpu.num_sms)
        self._world = world if parallel.tensor_parallel_size > 1 else None
        errors = None
        if config.allreduce == "int8" and self._world is not None:
            limits = config.step_limits(LIMITS)
            num_rows = max(limits.max_num_batched_tokens, limits.max_num_seqs)
            errors = self._errors = self._gpu.empty((num_rows, model_config.hidden_size), CARRIED)
        self._comm = join_gpus(
            self.ops, self._gpu, world, parallel, model_config, self._dtype, config.allreduce, max_blocks, errors
        )
        self.overlaps = self._comm.shares_ids  # or another rank knows what was sampled from the next plan alone
        return self._comm

    def load(self, source: ModelSource, weight_map: WeightMap, config: EngineConfig, progress: bool) -> Weights:
        self._gpu.prepare(self._notes.instances, progress)
        store, kept = GpuStore(self._dtype, self._gpu), keep_packed(weight_map)
        if not self._gpu.has_fp8 and any(spec.coded is not None and spec.coded.kind == FP8 for spec in kept.linears):
            logger.info("FP8 weights are multiplied in %s: %s has no tensor cores for FP8", self._dtype, self._gpu.arch)
        weights = load_weights(source, kept, store, seed=config.seed, progress=progress, load_format=config.load_format)
        store.finish()
        return with_activations(weights, self._w4a8)

    def plan_memory(
        self, config: EngineConfig, limits: StepLimits, model: Model, weights: Weights, num_positions: int
    ) -> MemoryPlan:
        """The KV cache gets what the largest step, which is tried, and all else leave of the GPU."""
        pools, geometry = self._pools, model.config
        pools.trim()
        with room_for(f"a step of --max-num-batched-tokens {limits.max_num_batched_tokens}", "set that lower"):
            one_block = self._make_cache(model, 1, config.block_size)
            forward = self._forward(limits, model, self._comm, one_block, num_positions)
            before = pools.num_bytes
            self._try_largest_step(forward, model, limits)
        free, total = cupy.cuda.Device().mem_info
        tried = pools.num_bytes - before
        of_gpu = self._gpu.buffers()  # from before there were these pools
        found = total - free - pools.num_bytes - sum(buffer.num_bytes for buffer in of_gpu)
        pieces = piece_sizes(limits.max_num_batched_tokens)
        pieces += [size for size in pieces if self._may_halve and HALVES.num_first_prompts(size)]  # of two graphs each
        sizes = pieces, graph_sizes(limits.max_num_seqs)
        hidden_bytes = geometry.hidden_size * self._dtype.itemsize
        buffers = (
            Buffer("CUDA, code, other programs", found, ALWAYS, note="as found"),
            Buffer(WEIGHTS, weights.num_bytes, ALWAYS),
            *forward.buffers(),
            *self._sampling.buffers(),
            *of_gpu,
            *(() if self._errors is None else (Buffer("errors of sums as int8", int(self._errors.nbytes), STEP),)),
            graph_buffer(tried, limits, *sizes, len(geometry.layers), hidden_bytes),
            Buffer(WORKSPACE, tried, STEP, note="one piece, for the largest step as tried"),
            Buffer("staging of weights", STAGING_BYTES, LOADING, "host", "at most"),
            *words_as_stored(weights),
            *pools.buffers(),
        )
        del forward
        pools.trim()
        sizes_of_numbers = config.block_size, self._dtype.itemsize, self._kv_codes
        block_bytes = sum(spec.bytes_per_block(*sizes_of_numbers) for spec in model.cache_specs)
        num_caches = sum(spec.num_arrays(self._kv_codes) for spec in model.cache_specs)
        room = GpuRoom(self._name, total, buffers, num_caches, block_bytes)
        self._plan = plan_gpu_memory(config, limits, room, num_positions)
        return self._plan

    def _try_largest_step(self, forward: GpuForward, model: Model, limits: StepLimits) -> None:
        """Its arrays, its logits, and the copy of these that penalties with logprobs ask for.

        While it is tried the pool takes a piece for each size of array, which is more than the step holds at once: so
        what a step leaves behind may lie between the arrays of the next.
        """
        largest = limits.max_num_batched_tokens
        if self._may_halve:
            forward.try_prompt(largest, HALVES.half(largest))
        hidden = forward.try_prompt(largest)
        if self._comm.is_last:
            part = model.logits(hidden[: max(limits.max_num_seqs, PROMPT_LOGPROB_ROWS)])
            logits = self._comm.gather_logits(part)
            if logits is not None:
                cupy.empty_like(logits)
        self._stream.synchronize()

    def make_cache(self, model: Model, plan: MemoryPlan) -> KVCache:
        with room_for("the KV cache", GONE):
            return self._make_cache(model, plan.num_blocks, plan.block_size)

    def _make_cache(self, model: Model, num_blocks: int, block_size: int) -> KVCache:
        return make_kv_cache(model.cache_specs, num_blocks, block_size, self._dtype, cupy.zeros, self._kv_codes)

    def make_swap(self, model: Model, cache: KVCache, plan: MemoryPlan) -> KVSwap:
        """Over pinned memory, which a kernel reads and writes at the rate of a copy."""
        sizes = plan.num_swap_places, plan.block_size
        try:
            on_host = make_kv_cache(model.cache_specs, *sizes, self._dtype, pinned_array, self._kv_codes)
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise ConfigError(f"--swap-space-gb: the host has no room for it ({error}); set it lower") from error
        swap = KVSwap(cache, on_host, self.ops.kv_cache_swap, cupy.asarray)
        one = np.zeros((1, 2), np.int32)
        swap(replace(first_step(1, 2), swaps_out=one, swaps_in=one))  # compiles its kernel; block 0 holds nothing yet
        return swap

    def make_forward(
        self, limits: StepLimits, model: Model, comm: Communicator, cache: KVCache, rope: RopeTable, num_positions: int
    ) -> Forward:
        forward = self._forward(limits, model, comm, cache, num_positions, rope)
        with room_for("CUDA graphs", GONE):
            for num_tokens in (*range(1, 33), *range(40, 257, 8)):  # a linear layer's kernel goes by the number of rows
                if num_tokens <= limits.max_num_batched_tokens:
                    hidden = forward.try_prompt(num_tokens)
                    if comm.is_last:
                        comm.gather_logits(model.logits(hidden))
            forward.halve(self._halving(forward, limits))
            forward.capture(graph_sizes(limits.max_num_seqs), piece_sizes(limits.max_num_batched_tokens))
        return forward

    @property
    def _may_halve(self) -> bool:
        return self._world is not None and self._dual_stream != "off"

    def _halving(self, forward: GpuForward, limits: StepLimits) -> Halving:
        """Steps that are quicker in halves, as tried by all ranks; all that may be where that is asked for."""
        if self._world is None or not self._may_halve:
            return Halving()
        if self._dual_stream == "on":
            return HALVES
        world, most = self._world, limits.max_num_batched_tokens

        def times(size: int) -> tuple[float, float]:
            found = world.allgather([self._time(forward, size, num_first) for num_first in (0, HALVES.half(size))])
            whole, halved = (max(of_ranks) for of_ranks in zip(*found, strict=True))
            logger.info("a step of %d tokens: %.1f ms, in halves %.1f", size, whole, halved)
            return whole, halved

        return replace(HALVES, min_tokens=first_that_pays([n for n in TRIED if n <= most], times), min_decodes=NEVER)

    def _time(self, forward: GpuForward, num_tokens: int, num_first: int) -> float:
        """Milliseconds of a step, the second time."""
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        run: Callable[[], Any] = partial(forward.try_prompt, num_tokens, num_first)
        if num_tokens <= MOST_IN_PIECES:
            try:
                run = forward.pieces_of_prompt(num_tokens, num_first)
            except (KernelError, cupy.cuda.runtime.CUDARuntimeError):
                return math.inf  # on every rank
        run()
        begin.record(self._stream)
        run()
        end.record(self._stream)
        end.synchronize()
        return float(cupy.cuda.get_elapsed_time(begin, end))

    def warm_up(self, runner: ModelRunner) -> None:
        """Runs every kind of step once, in block 0, which holds nothing yet."""
        vocab_size = runner.model.config.vocab_size
        for sampling in SAMPLINGS:
            runner.sampler.add(0, sampling, seed=0, prompt_ids=(0, 1), eos_token_ids=())
            for num_tokens in (1, 2, min(32, runner.cache.block_size)):
                runner.step(first_step(num_tokens, vocab_size))
            runner.release(0)

    def settle(self) -> None:
        self._gpu.seal()
        with room_for("what steps work in", GONE):
            self._pools.settle(self._plan.workspace)
        free, total = cupy.cuda.Device().mem_info
        planned = self._plan.bytes_on("GPU")
        logger.info("GPU memory: %.0f MB planned, %.0f MB in use", planned / 1e6, (total - free) / 1e6)
        if problem := mismatch(self._plan, total - free):
            logger.warning("%s", problem)

    def num_late_allocations(self) -> int:
        return self._pools.count_late()

    def _forward(
        self,
        limits: StepLimits,
        model: Model,
        comm: Communicator,
        cache: KVCache,
        num_positions: int,
        rope: RopeTable | None = None,
    ) -> GpuForward:
        table = rope or RopeTable(model.config.rope, model.config.rotary_dim, num_positions)
        width = -(-num_positions // cache.block_size)
        return GpuForward(model, comm, cache, table, self._gpu, self._recorder, limits, width)


def make_backend(config: EngineConfig, model_config: ModelConfig, place: Place) -> CudaBackend:
    """Raises KernelError where CUDA finds no GPU, or one that is too old; ConfigError where ranks outnumber GPUs."""
    # A stream that waits for another rank must not share one of the GPU's queues, of which there are 8 by default.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    try:
        num_gpus = cupy.cuda.runtime.getDeviceCount()
        if place.count > num_gpus:
            raise ConfigError(
                f"--device cuda: {place.count} ranks on this host, which has {num_gpus} GPUs; start at most that many"
            )
        device = cupy.cuda.Device(place.number)
        device.use()
        if place.count > 1 and (bound := bind_near(device.pci_bus_id)):
            logger.info("rank %d of this host: %s", place.number, bound)
        return CudaBackend(config, model_config)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise no_cuda(error) from error
