"""engine.backends.cuda over a stand-in for CuPy and the GPU: what it plans, holds and says, from start to ready."""

from __future__ import annotations

import gc
import importlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from conformance.engine_run import LikeStore
from engine.backends.backend import ALONE
from engine.build import BuiltEngine, build_engine
from engine.comm.communicator import OneRank
from engine.config import EngineConfig, ParallelConfig, StepLimits
from engine.errors import ConfigError, KernelError
from engine.gpu_memory import DRIVER_PIECE
from engine.halves import NEVER, Halving
from engine.memory_plan import ALWAYS, Buffer
from tests.engine import gpu_stand_in as stand_in
from tests.engine.engines import SMALL, Outputs, finish, request
from tests.engine.gpu_stand_in import gpu_forward
from tests.engine.stand_in_engine import make_engine, model_folder
from tests.engine.stand_in_ops import stand_in_ops

__all__ = ["gpu_forward"]  # a fixture

MB = 10**6
TOTAL, OTHERS = 3000 * MB, 500 * MB
OF_GPU = Buffer("cuBLAS workspace", 34 * MB, ALWAYS)
LIMITS = StepLimits(max_num_seqs=8, max_num_batched_tokens=32)


class OutOfMemoryError(MemoryError):
    """What CuPy raises."""


class Card:
    """Of a memory that other programs hold a part of."""

    def __init__(self) -> None:
        self.others = OTHERS
        self.pool = stand_in.MemoryPool()
        self.graph_pools: list[Any] = []

    @property
    def mem_info(self) -> tuple[int, int]:
        own = sum(pool.num_bytes for pool in (self.pool, *self.graph_pools))
        return TOTAL - self.others - OF_GPU.num_bytes - own, TOTAL

    def malloc(self, num_bytes: int) -> Any:
        if num_bytes > self.mem_info[0]:
            raise OutOfMemoryError
        return type(self.pool).malloc(self.pool, num_bytes)

    def trim(self) -> None:
        self.pool.num_bytes -= sum(size * len(free) for size, free in self.pool.free.items())
        self.pool.free.clear()

    def graph_pool(self) -> Any:
        self.graph_pools.append(stand_in.MemoryPool())
        return self.graph_pools[-1]


class Gpu(stand_in.Gpu):
    arch = "sm_86"

    def __init__(self, cache: Path, arch: str | None) -> None:
        self.is_sealed = False

    def prepare(self, instances: Any, progress: bool) -> None:
        """There is nothing to compile."""

    def buffers(self) -> tuple[Buffer, ...]:
        return (OF_GPU,)

    def seal(self) -> None:
        self.is_sealed = True


@pytest.fixture
def card(gpu_forward: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[Card]:
    """The backend's module stands in sys.modules until the test is over."""
    card = Card()
    monkeypatch.setattr(stand_in, "POOLS", [SimpleNamespace(malloc=card.malloc)])
    cupy: Any = sys.modules["cupy"]
    default = SimpleNamespace(malloc=card.malloc, free_all_blocks=card.trim, total_bytes=lambda: card.pool.num_bytes)
    cupy.get_default_memory_pool = lambda: default
    cupy.empty_like = lambda array: stand_in.empty(array.shape, array.dtype)
    cupy.cuda.MemoryPool = card.graph_pool
    cupy.cuda.PinnedMemoryPool = lambda take: SimpleNamespace(malloc=lambda size: bytearray(1))
    cupy.cuda.set_allocator = cupy.cuda.set_pinned_memory_allocator = lambda malloc: None
    cupy.cuda.memory = SimpleNamespace(OutOfMemoryError=OutOfMemoryError)
    cupy.cuda.Device = lambda: SimpleNamespace(id=0, mem_info=card.mem_info)
    properties = {"name": b"Card", "totalGlobalMem": TOTAL}
    cupy.cuda.runtime.getDeviceProperties = lambda number: properties
    stream = SimpleNamespace(use=lambda: None, synchronize=stand_in.STREAM.synchronize)
    cupy.cuda.Stream = lambda non_blocking, priority=0: stand_in.Stream() if priority else stream
    sys.modules["engine.kernels.gpu"].Gpu = Gpu  # type: ignore[attr-defined]
    for name in ("engine.kernels.pools", "engine.kernels.store", "engine.backends.cuda"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    module: Any = importlib.import_module("engine.backends.cuda")
    monkeypatch.setattr(module, "DTYPES", {"bfloat16": np.dtype(np.float32)})
    monkeypatch.setattr(module, "kernel_ops", lambda gpu, sampling: stand_in_ops())
    monkeypatch.setattr(module, "run_dry", lambda *arguments: None)
    sampler = SimpleNamespace(buffers=lambda: (Buffer("sampler", 1000, ALWAYS),))
    monkeypatch.setattr(module, "KernelSampling", lambda gpu, num_rows: sampler)
    monkeypatch.setattr(module, "GpuStore", lambda dtype, device: Store(np.zeros(0, np.float32)))
    monkeypatch.setattr(
        "engine.build.make_backend", lambda config, model_config, _: module.CudaBackend(config, model_config)
    )
    yield card
    for name in ("engine.kernels.pools", "engine.kernels.store", "engine.backends.cuda"):
        sys.modules.pop(name, None)


class Store(LikeStore):
    def empty(self, shape: tuple[int, ...]) -> Any:
        return np.empty(shape, np.float32)

    def finish(self) -> None:
        """All is there."""


def build(folder: Path, **settings: Any) -> BuiltEngine:
    limits = {"max_num_seqs": LIMITS.max_num_seqs, "max_num_batched_tokens": LIMITS.max_num_batched_tokens}
    return build_engine(EngineConfig(model=str(folder), device="auto", **(SMALL | limits | settings)), progress=False)


def test_from_start_to_ready(card: Card, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The plan names every buffer; what the card holds is what it says; answers are those of an eager engine."""
    folder = model_folder(tmp_path, "llama")
    with caplog.at_level(logging.INFO):
        built = build(folder, max_model_len=60, num_gpu_blocks_override=18)
    plan = built.memory
    names = [buffer.name for buffer in plan.buffers]
    assert names == [
        *("CUDA, code, other programs", "weights", "rope table", "rope rows of a step", "integers of a step"),
        *("integers of a step", "sampled ids", "sampler", "cuBLAS workspace", "CUDA graphs", "activations, logits"),
        *("staging of weights", "small copies", "KV cache"),
    ]
    assert plan.bytes_of("CUDA, code, other programs") == OTHERS
    assert plan.bytes_of("cuBLAS workspace") == OF_GPU.num_bytes
    cache = built.engine.runner.cache
    assert plan.kv_pool == cache.num_bytes
    assert plan.workspace > 8 * 60 * 4, "logits alone"
    assert "GPU memory: " in caplog.text
    assert "were planned" not in caplog.text
    eager = make_engine(folder, None, max_model_len=60, num_gpu_blocks_override=18)
    for engine in (built.engine, eager):
        for number, length in enumerate((3, 17, 40)):
            engine.add(request(str(number), range(4, 4 + length), max_tokens=9))
    assert finish(built.engine, Outputs()) == finish(eager, Outputs())


@pytest.mark.parametrize(
    ("asked", "other", "halving"),
    [
        ("auto", 1.0, Halving(28, NEVER)),
        ("auto", 2.0, Halving(NEVER, NEVER)),  # the other rank is slower in halves, and all go by the slowest
        ("on", 1.0, Halving(2, 2)),
        ("off", 1.0, Halving()),
    ],
)
def test_ranks_halve_what_they_find_quicker_so(
    asked: str, other: float, halving: Halving, card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of prompts, the first size tried that pays; answers are those of an eager engine."""
    module: Any = sys.modules["engine.backends.cuda"]
    times = {(16, 0): 1.0, (16, 8): 1.1, (28, 0): 2.0, (28, 14): 1.9, (30, 0): 2.1, (30, 15): 2.0}
    world = SimpleNamespace(allgather=lambda mine: [mine, [mine[0], other * mine[1]]])

    def make_comm(backend: Any, *_: object) -> Any:
        backend._world = world
        return backend._comm

    monkeypatch.setattr(module, "TRIED", (16, 28, 30, 64))  # of which no step has room for the last
    monkeypatch.setattr(module, "HALVES", Halving(2, 2))
    monkeypatch.setattr(module.CudaBackend, "_time", lambda backend, forward, *size: times[size])
    monkeypatch.setattr(module.CudaBackend, "make_comm", make_comm)
    folder = model_folder(tmp_path, "llama")
    built = build(folder, max_model_len=60, num_gpu_blocks_override=18, dual_stream=asked)
    assert built.engine.runner.forward._halving == halving
    eager = make_engine(folder, None, max_model_len=60, num_gpu_blocks_override=18)
    for engine in (built.engine, eager):
        for number, length in enumerate((31, 3)):
            engine.add(request(str(number), range(4, 4 + length), max_tokens=5))
    assert finish(built.engine, Outputs()) == finish(eager, Outputs())


def test_a_step_of_few_tokens_is_timed_as_graphs(card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it will be launched; one that cannot be captured is never the quicker one."""
    module: Any = sys.modules["engine.backends.cuda"]
    made: list[Any] = []
    usual = module.CudaBackend.make_forward
    monkeypatch.setattr(
        module.CudaBackend, "make_forward", lambda self, *given: made.append(self) or usual(self, *given)
    )
    built = build(model_folder(tmp_path, "llama"), max_model_len=60, num_gpu_blocks_override=18)
    (backend,), forward = made, built.engine.runner.forward
    cuda: Any = module.cupy.cuda
    monkeypatch.setattr(cuda, "Event", lambda: stand_in.Event(False))
    monkeypatch.setattr(cuda, "get_elapsed_time", lambda begin, end: 3.0, raising=False)
    monkeypatch.setattr(backend, "_stream", stand_in.STREAM)
    for num_first, most, num_graphs in ((0, 16, 2 * 3), (8, 16, 2 * 5), (8, 15, 0)):
        monkeypatch.setattr(module, "MOST_IN_PIECES", most)
        before = stand_in.STREAM.num_graphs
        assert backend._time(forward, 16, num_first) == 3.0
        assert stand_in.STREAM.num_graphs - before == num_graphs

    def fails(*_: Any) -> None:
        raise stand_in.CUDARuntimeError("cudaErrorStreamCaptureUnsupported")

    monkeypatch.setattr(module, "MOST_IN_PIECES", 16)
    monkeypatch.setattr(forward._recorder, "pieces", fails)
    assert backend._time(forward, 16, 8) == np.inf


@pytest.mark.parametrize("allreduce", ["int8", "int8-plain", "auto"])
def test_what_sums_carry_is_in_the_plan(
    allreduce: str, card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 bits for each number of the largest step, of ranks that carry errors."""
    module: Any = sys.modules["engine.backends.cuda"]
    usual, given = module.CudaBackend.make_comm, []
    world, parallel = SimpleNamespace(allgather=lambda mine: [mine] * 2), ParallelConfig(0, 2, 1)

    def join_gpus(ops: Any, *arguments: Any) -> Any:
        given.append(arguments[-1])
        return OneRank(ops)

    monkeypatch.setattr(module, "join_gpus", join_gpus)
    monkeypatch.setattr(
        module.CudaBackend,
        "make_comm",
        lambda backend, _, __, model_config, config: usual(backend, world, parallel, model_config, config),
    )
    settings: dict[str, Any] = {"max_model_len": 60, "num_gpu_blocks_override": 18, "dual_stream": "off"}
    plan = build(model_folder(tmp_path, "llama"), allreduce=allreduce, **settings).memory
    (errors,) = given
    assert plan.bytes_of("CUDA, code, other programs") == OTHERS
    if allreduce == "int8":
        assert errors.shape[0] == LIMITS.max_num_batched_tokens
        assert plan.bytes_of("errors of sums as int8") == errors.nbytes == 2 * errors.size
    else:
        assert errors is None
        assert plan.bytes_of("errors of sums as int8") == 0


def test_the_cache_fills_what_may_be_used(card: Card, tmp_path: Path) -> None:
    """All sequences at their longest, where there is room; else what a share of the card leaves: here ten blocks."""
    folder = model_folder(tmp_path, "llama")
    whole = build(folder, max_model_len=60, num_gpu_blocks_override=None).memory
    assert whole.num_blocks == LIMITS.max_num_seqs * 15
    gc.collect()  # what the engine held goes
    card.graph_pools.clear()
    block = whole.kv_pool // whole.num_blocks
    num_caches = 4  # keys and values of two layers
    beside = whole.bytes_on("GPU") - whole.kv_pool + num_caches * DRIVER_PIECE
    share = (beside + 10.5 * block) / TOTAL
    plan = build(folder, max_model_len=60, num_gpu_blocks_override=None, gpu_memory_utilization=share).memory
    assert plan.num_blocks == 10


def test_another_program_is_told_of(card: Card, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One that takes memory while the engine starts."""
    module: Any = sys.modules["engine.backends.cuda"]
    capture = module.GpuForward.capture

    def capture_and_take(self: Any, *sizes: Any) -> None:
        capture(self, *sizes)
        card.others += 400 * MB

    module.GpuForward.capture = capture_and_take
    built = build(model_folder(tmp_path, "llama"), max_model_len=60, num_gpu_blocks_override=18)
    assert "more than 268 MB apart; another program has come or gone" in caplog.text
    assert built.engine.stats().late_allocations == 0


def test_no_room(card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model_folder(tmp_path, "llama")
    with pytest.raises(ConfigError, match=r"no memory is left for the KV cache on Card: .*allow 300 of its 3,000 MB"):
        build(folder, max_model_len=60, gpu_memory_utilization=0.1)
    with pytest.raises(ConfigError, match=r"--num-gpu-blocks-override 9999999: these blocks take"):
        build(folder, max_model_len=60, num_gpu_blocks_override=9_999_999)
    full = TOTAL - OF_GPU.num_bytes - 5000
    backend: Any = sys.modules["engine.backends.cuda"].CudaBackend  # type: ignore[attr-defined]
    load = backend.load

    def others_come(*arguments: Any) -> Any:
        card.others = full
        return load(*arguments)

    monkeypatch.setattr(backend, "load", others_come)
    with pytest.raises(ConfigError, match=r"no room for a step of --max-num-batched-tokens 32: 0 of its 3,000 MB were"):
        build(folder, max_model_len=60)
    with pytest.raises(ConfigError, match="weights of the model take 0 MB, and 0 of the 3,000 MB of GPU 0 are free"):
        build(folder, max_model_len=60)  # before they are read


def test_allocations_while_serving_reach_the_stats(card: Card, tmp_path: Path) -> None:
    built = build(model_folder(tmp_path, "llama"), max_model_len=60, num_gpu_blocks_override=18)
    engine = built.engine
    assert engine.stats().late_allocations == 0
    kept = card.malloc(10 * MB)
    assert engine.stats().late_allocations == 1
    assert engine.stats().late_allocations == 1
    del kept


def test_cuda_that_does_not_start(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error is given to whoever explains it, here the stand-in for engine.kernels.gpu."""
    module, cupy = sys.modules["engine.backends.cuda"], sys.modules["cupy"]
    error = cupy.cuda.runtime.CUDARuntimeError("initialization error")

    def count() -> int:
        raise error

    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceCount", count, raising=False)
    monkeypatch.setattr(module, "no_cuda", lambda found: KernelError(f"explained: {found}"))
    with pytest.raises(KernelError, match="explained: initialization error") as caught:
        module.make_backend(EngineConfig(model="M"), None, ALONE)
    assert caught.value.__cause__ is error
