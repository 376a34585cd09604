"""engine.kernels.pools over a stand-in for CuPy's pool: KVM-05, no step allocates once the pools are settled.

The arrays are those of an 8B model's forward pass at its own sizes, over a device that launches nothing.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from engine.bench.model_shapes import SHAPES
from engine.checkpoint.loader import load_model_config
from engine.checkpoint.source import resolve
from engine.comm.communicator import OneRank
from engine.config import StepLimits
from engine.forward import EagerForward
from engine.kernels import dry_run
from engine.kernels.notes import Notes
from engine.kernels.sampling import KernelSampling
from engine.kernels.table import kernel_ops
from engine.kv_cache import make_kv_cache
from engine.models.model import Model
from engine.models.registry import ARCHITECTURES
from engine.rope_table import RopeTable

BF16 = np.dtype(ml_dtypes.bfloat16)
LIMITS = StepLimits(max_num_seqs=64, max_num_batched_tokens=4096)
UNIT = 512  # bytes


class Piece:
    """A part of what was taken of the driver, between two others."""

    def __init__(self, size: int, before: Piece | None = None, after: Piece | None = None) -> None:
        self.size, self.is_free, self.before, self.after = size, True, before, after


class Lease:
    """A piece for as long as somebody holds this."""

    def __init__(self, pool: MemoryPool, piece: Piece) -> None:
        self._pool, self._piece = pool, piece

    def __del__(self) -> None:
        self._pool.give_back(self._piece)


class MemoryPool:
    """CuPy's, as it is documented: the smallest free piece that fits is cut; a free piece joins its free neighbours."""

    def __init__(self, take: Callable[[int], Any]) -> None:
        self._take = take
        self._free: list[Piece] = []
        self._bytes = 0

    def malloc(self, num_bytes: int) -> Lease:
        size = -(-max(num_bytes, 1) // UNIT) * UNIT
        fitting = [piece for piece in self._free if piece.size >= size]
        if fitting:
            piece = min(fitting, key=lambda one: one.size)
            self._free.remove(piece)
            if piece.size > size:
                rest = Piece(piece.size - size, piece, piece.after)
                if piece.after is not None:
                    piece.after.before = rest
                piece.size, piece.after = size, rest
                self._free.append(rest)
        else:
            self._take(size)
            self._bytes += size
            piece = Piece(size)
        piece.is_free = False
        return Lease(self, piece)

    def give_back(self, piece: Piece) -> None:
        piece.is_free = True
        for other, is_after in ((piece.after, True), (piece.before, False)):
            if other is not None and other.is_free:
                self._free.remove(other)
                piece.size += other.size
                far = other.after if is_after else other.before
                if is_after:
                    piece.after = far
                    if far is not None:
                        far.before = piece
                else:
                    piece.before = far
                    if far is not None:
                        far.after = piece
        self._free.append(piece)

    def free_all_blocks(self) -> None:
        whole = [piece for piece in self._free if piece.before is None and piece.after is None]
        self._bytes -= sum(piece.size for piece in whole)
        self._free = [piece for piece in self._free if piece not in whole]

    def total_bytes(self) -> int:
        return self._bytes


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    cupy = ModuleType("cupy")
    default = MemoryPool(lambda size: None)
    cupy.__dict__["get_default_memory_pool"] = lambda: default
    cupy.__dict__["cuda"] = SimpleNamespace(
        MemoryPool=MemoryPool,
        PinnedMemoryPool=MemoryPool,
        PinnedMemory=lambda size: size,
        PinnedMemoryPointer=lambda memory, offset: memory,
        set_allocator=lambda malloc: cupy.__dict__.update(malloc=malloc),
        set_pinned_memory_allocator=lambda malloc: cupy.__dict__.update(malloc_pinned=malloc),
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.delitem(sys.modules, "engine.kernels.pools", raising=False)
    yield importlib.import_module("engine.kernels.pools")
    sys.modules.pop("engine.kernels.pools", None)


class PooledNotes(Notes):
    """Whose arrays hold memory of the pool for as long as they live."""

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        array = super().empty(shape, dtype)
        lease = sys.modules["cupy"].malloc(array.nbytes)
        weakref.finalize(array, lambda held: None, lease)
        return array


class Engine:
    """The forward pass of two layers, and what the sampler adds."""

    def __init__(self, folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps(SHAPES["llama-3.1-8b"]))
        config = replace(load_model_config(resolve(str(folder))), n_layers=2)
        device = PooledNotes(num_sms=132, max_shared_bytes=227 << 10, has_wgmma=True)
        self.ops = kernel_ops(device, KernelSampling(device, LIMITS.max_num_seqs))
        architecture = ARCHITECTURES[config.architecture]
        weights = dry_run._blank_weights(architecture.weight_map(config), BF16)
        self.model: Model = architecture.build(config, weights, self.ops)
        cache = make_kv_cache(self.model.cache_specs, 1, 16, BF16)
        rope = RopeTable(config.rope, config.rotary_dim, 1)
        self.forward = EagerForward(self.model, OneRank(self.ops), cache, rope, LIMITS.max_num_seqs)
        self.empty = device.empty
        self.last: Any = None

    def step(self, num_tokens: int, num_seqs: int, wants_raw: bool = False) -> None:
        """Ids of a step live until those of the next are there."""
        hidden = self.forward(dry_run._batch(num_tokens, num_seqs, 128))
        rows = self.ops.embedding(np.zeros(num_seqs, np.int32), hidden)
        logits = self.model.logits(rows)
        raw = self.empty(logits.shape, np.float32) if wants_raw else None
        greedy = np.zeros(num_seqs)
        integers = np.zeros(num_seqs, np.int64)
        warm = greedy + float(num_tokens % 2)
        self.last = self.ops.sampling.sample_rows(
            logits, warm, integers, greedy + 1, greedy, integers.astype(np.uint64), integers, integers
        )
        del raw


def tried(engine: Engine, pools: Any) -> int:
    """Bytes of the largest step, as a backend tries it."""
    before = int(pools.num_bytes)
    engine.step(LIMITS.max_num_batched_tokens, LIMITS.max_num_seqs, wants_raw=True)
    engine.last = None
    return int(pools.num_bytes) - before


def storm(engine: Engine, num_steps: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(num_steps):
        num_seqs = int(rng.integers(1, LIMITS.max_num_seqs + 1))
        num_tokens = num_seqs if rng.random() < 0.4 else max(num_seqs, int(rng.choice([17, 512, 1900, 4096])))
        engine.step(num_tokens, num_seqs, wants_raw=rng.random() < 0.2)


def test_kvm_05_no_step_allocates_once_all_is_settled(pools: ModuleType, tmp_path: Path) -> None:
    held: Any = pools.Pools()
    engine = Engine(tmp_path)
    num_bytes = tried(engine, held)
    held.settle(num_bytes)
    assert held.num_bytes >= num_bytes
    for seed in range(3):
        storm(engine, 60, seed)
    engine.step(LIMITS.max_num_batched_tokens, LIMITS.max_num_seqs, wants_raw=True)
    assert held.count_late() == 0


def test_too_small_a_piece_is_counted_and_said(
    pools: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    held: Any = pools.Pools()
    engine = Engine(tmp_path)
    held.settle(tried(engine, held) // 2)
    with caplog.at_level(logging.WARNING):
        storm(engine, 20, seed=0)
        assert held.count_late() == 1
        assert held.count_late() == 1, "it has been told"
    (record,) = caplog.records
    assert "memory was allocated while serving" in record.message
    assert "pinned memory 0 times" in record.message


def test_copies_of_any_size_find_pinned_memory(pools: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    """Up to the largest piece that is kept; what is larger is allocated, counted and kept."""
    held: Any = pools.Pools()
    held.settle(1)
    malloc = sys.modules["cupy"].malloc_pinned
    for size in (1, 511, 65_536, 65_537, 300_000, 4 << 20):
        pieces = [malloc(size) for _ in range(2)]
        del pieces
    several = [malloc(100) for _ in range(16)]
    assert held.count_late() == 0
    del several
    malloc((4 << 20) + 1)
    malloc((4 << 20) + 1)
    assert held.count_late() == 1
    assert "0.0 MB of the GPU's, and pinned memory 1 times" in caplog.text
    planned = held.buffers()[0]
    assert planned.place == "host"
    assert planned.num_bytes == 16 * 65_536 + 2 * (8 * 2**20 - 2 * 65_536)


def test_trim_gives_back_what_nobody_holds(pools: ModuleType) -> None:
    held: Any = pools.Pools()
    malloc = sys.modules["cupy"].malloc
    kept, gone = malloc(1000), malloc(5000)
    assert pools.Pools().num_bytes == 0, "what others hold is not its own"
    assert held.num_bytes == 1024 + 5120
    del gone
    held.trim()
    assert held.num_bytes == 1024
    del kept
