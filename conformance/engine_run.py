"""The engine's runner over any op table, driven by hand: chunks of prompts as a test wants them, no scheduler.

Blocks lie in random order in the cache, and every one is NaN before it is written.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.batch import ForwardBatch, StepPlan, build_batch, token_positions
from engine.checkpoint.loader import load_model_config, load_weights
from engine.checkpoint.prepare import prepare_weights
from engine.checkpoint.quantized import keep_packed
from engine.checkpoint.source import resolve
from engine.checkpoint.stored_tensor import StoredTensor, map_bytes, read_into
from engine.checkpoint.stored_words import StoredWords, pack_words
from engine.coded_kv import KVKind, parts_of
from engine.comm.communicator import Communicator, OneRank
from engine.comm.side import Side
from engine.config import ParallelConfig
from engine.forward import IN_ORDER, EagerForward
from engine.halves import Halving, in_halves
from engine.kv_cache import KVCache, make_kv_cache
from engine.models.registry import ARCHITECTURES
from engine.ops import OpTable
from engine.rope_table import RopeTable
from engine.runner import ModelRunner
from engine.sampler import Sampler
from engine.split import rank_config, rank_weights

Array = NDArray[Any]
Prompts = Sequence[Sequence[int]]

BLOCK_SIZE = 4
ONE_RANK = ParallelConfig()
WHOLE = Halving()
HALVED = Halving(min_tokens=2, min_decodes=2)


def namespace_of(array: Any) -> Any:
    """The module whose arrays these are: numpy, or cupy for those on a GPU."""
    return sys.modules[type(array).__module__.partition(".")[0]]


class LikeStore:
    """Weights where an array lies, and in its type; see engine.checkpoint.store.Store."""

    def __init__(self, like: Array) -> None:
        self.dtype, self.itemsize = like.dtype, like.dtype.itemsize
        self._namespace = namespace_of(like)

    def empty(self, shape: tuple[int, ...], dtype: Any = None) -> Array:
        return self._namespace.empty(shape, self.dtype if dtype is None else dtype)

    def full(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Of NaN, for a cache; of codes the one that no number is rounded to."""
        if np.issubdtype(dtype, np.integer):
            return self._namespace.full(shape, 0x7F if np.dtype(dtype) == np.uint8 else -128, dtype)
        return self._namespace.asarray(np.full(shape, np.nan, np.float32)).astype(dtype)

    def read(self, tensor: StoredTensor, target: Array) -> None:
        if target.dtype != self.dtype:
            target[...] = self._namespace.asarray(map_bytes(tensor).view(target.dtype).reshape(target.shape))
            return
        stored = np.empty(target.shape, np.float32)
        read_into(tensor, stored)
        target[...] = self._namespace.asarray(stored).astype(self.dtype)

    def write(self, values: NDArray[np.float32], target: Array) -> None:
        target[...] = self._namespace.asarray(values).astype(self.dtype)

    def put(self, array: Array) -> Array:
        return self._namespace.asarray(array)

    def repack(self, stored: StoredWords) -> dict[str, Array]:
        return {name: self.put(array) for name, array in pack_words(stored).items()}

    def random_words(self, shape: tuple[int, ...], seed: tuple[int, int]) -> Array:
        return self.put(np.random.default_rng(seed).integers(0, 2**32, shape, np.uint32))

    def flush(self) -> None:
        """It is there."""

    def fill_normally(self, array: Array, seed: tuple[int, int], std: float) -> None:
        values = np.random.default_rng(seed).standard_normal(array.shape, np.float32) * np.float32(std)
        array[...] = self._namespace.asarray(values).astype(self.dtype)


def make_runner(
    folder: Path,
    ops: OpTable,
    prompts: Prompts,
    make_comm: Callable[[OpTable], Communicator] = OneRank,
    store: LikeStore | None = None,
    packed: bool = False,
    kv_codes: KVKind | None = None,
    parallel: ParallelConfig = ONE_RANK,
    side: Side = IN_ORDER,
) -> ModelRunner:
    """A runner of the checkpoint with room for these prompts; engine.build makes one over the machine's own ops.

    store: where weights and cache lie, and in what type; None = float32 of NumPy. packed: 4-bit weights stay so.
    kv_codes: what the cache holds in place of numbers. parallel: which part of the model is this rank's.
    side: where sums of one half of a step go on.
    """
    store = LikeStore(np.zeros(0, np.float32)) if store is None else store
    source = resolve(str(folder))
    whole = load_model_config(source)
    config = rank_config(whole, parallel)
    architecture = ARCHITECTURES[config.architecture]
    weight_map = rank_weights(architecture.weight_map(whole), whole, parallel)
    weight_map = keep_packed(weight_map) if packed else weight_map
    weights = prepare_weights(load_weights(source, weight_map, store, progress=False), weight_map, ops)
    model = architecture.build(config, weights, ops)
    num_blocks = sum(-(-len(prompt) // BLOCK_SIZE) for prompt in prompts) + 2
    cache = make_kv_cache(model.cache_specs, num_blocks, BLOCK_SIZE, store.dtype, store.full, kv_codes)
    rope = RopeTable(config.rope, config.rotary_dim, max(map(len, prompts)))
    sampler = Sampler(config.vocab_size, 1, ops.sampling)
    comm = make_comm(ops)
    forward = EagerForward(model, comm, cache, rope, len(prompts), side=side)
    return ModelRunner(model, forward, comm, cache, rope, sampler, ops.sampling)


def run_chunks(runner: ModelRunner, prompts: Prompts, chunks: Sequence[int], halving: Halving = WHOLE) -> list[Array]:
    """Logits of all tokens of each prompt, [num_tokens, vocab_size], computed together. Ranks run the same; those
    but rank 0 get none.

    chunks: tokens a step of each prompt. halving: of steps.
    """
    done = [0] * len(prompts)
    logits: list[list[Array]] = [[] for _ in prompts]
    while any(num_done < len(prompt) for num_done, prompt in zip(done, prompts, strict=True)):
        counts = [min(chunk, len(prompt) - n) for chunk, prompt, n in zip(chunks, prompts, done, strict=False)]
        rows = sorted((i for i, count in enumerate(counts) if count), key=lambda i: counts[i] > 1)  # decodes first
        hidden = run_step(runner, rows, prompts, done, counts, halving)
        ends = np.cumsum([counts[i] for i in rows])
        found = runner.comm.gather_logits(runner.model.logits(hidden)) if runner.comm.is_last else None
        if found is not None:
            for i, part in zip(rows, np.split(found, ends[:-1]), strict=True):
                logits[i].append(part)
        for i in rows:
            done[i] += counts[i]
    return [np.concatenate(parts) for parts in logits if parts]


def run_step(
    runner: ModelRunner,
    rows: Sequence[int],
    prompts: Prompts,
    done: Sequence[int],
    counts: Sequence[int],
    halving: Halving = WHOLE,
) -> Array:
    """Final-normed hidden states of the next counts[i] tokens of prompts i in rows, after done[i] of them."""
    num_tokens = np.array([counts[i] for i in rows], np.int32)
    two_way_lens = np.zeros(len(rows), np.int32)
    if runner.model.config.prefix_lm is not None:  # the first step of a sequence is its prompt
        two_way_lens[:] = [done[i] or counts[i] for i in rows]
    plan = StepPlan(
        step=0,
        slots=np.array(rows, np.int32),
        starts=np.array([done[i] for i in rows], np.int32),
        cu_seqlens_q=np.cumsum([0, *num_tokens], dtype=np.int32),
        token_ids=np.concatenate([prompts[i][done[i] : done[i] + counts[i]] for i in rows]).astype(np.int32),
        block_table=shuffled_blocks(prompts)[rows],
        num_logits=num_tokens,
        samples=np.ones(len(rows), np.bool_),
        two_way_lens=two_way_lens,
        rope_lens=np.array([runner.rope.rope_len(len(prompts[i])) for i in rows], np.int32),
        num_decodes=int(np.count_nonzero(num_tokens == 1)),
    )
    rope_rows = runner.rope.rows(token_positions(plan), np.repeat(plan.rope_lens, num_tokens))
    batch = in_halves(build_batch(plan, BLOCK_SIZE, rope_rows), halving.num_first(plan))
    return runner.forward(_beside(runner.cache, batch))


def _beside(cache: KVCache, batch: ForwardBatch) -> ForwardBatch:
    """The batch with all arrays where the cache lies."""
    namespace = namespace_of(parts_of(next(iter((cache.k_cache | cache.latent_cache).values())))[0])
    if namespace is np:
        return batch
    names = [field.name for field in fields(batch) if field.name not in ("num_decodes", "halves")]
    arrays = {name: namespace.asarray(getattr(batch, name)) for name in names}
    if batch.halves is None:
        return replace(batch, **arrays)
    first, second = batch.halves
    return replace(batch, **arrays, halves=(_beside(cache, first), _beside(cache, second)))


def shuffled_blocks(prompts: Prompts) -> NDArray[np.int32]:
    """block_table [num_seqs, longest], the same for the same prompts: blocks in random order, none twice."""
    counts = [-(-len(prompt) // BLOCK_SIZE) for prompt in prompts]
    blocks = np.random.default_rng(0).permutation(sum(counts) + 2).astype(np.int32)
    block_table = np.full((len(prompts), max(counts)), -1, np.int32)
    for row, part in enumerate(np.split(blocks[:-2], np.cumsum(counts)[:-1])):
        block_table[row, : len(part)] = part
    return block_table
