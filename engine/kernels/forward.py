"""A model's forward pass on a GPU: a step's integers go up in one copy, decoding runs as a captured graph.

A graph is captured for a few batch sizes; a step of another size is padded up with rows that touch no block. Steps with
prompts in them are launched kernel by kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cupy
import numpy as np
from numpy.typing import NDArray

from engine.batch import ForwardBatch, StepPlan, build_batch, token_positions, token_sequences
from engine.comm.communicator import OneRank
from engine.forward import EagerForward
from engine.kernels.embedding import embedding
from engine.kernels.gpu import Gpu, copy_rows
from engine.kv_cache import KVCache
from engine.models.model import Model
from engine.rope_table import RopeTable

Array = Any
Int32 = NDArray[np.int32]

FIELDS = ("token_ids", "positions", "cu_seqlens_q", "seq_lens", "slot_mapping", "logits_indices")
PADDING = {"token_ids": 0, "positions": 0, "seq_lens": 0, "slot_mapping": -1, "logits_indices": 0}
NO_ROWS = np.empty((0, 0), np.float32)


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes that get a graph: padding wastes at most half of a small batch and an eighth of a large one."""
    sizes = [size for size in (1, 2, 4, 8, 12, 16) if size < max_num_seqs]
    sizes += range(24, min(max_num_seqs, 128), 8)
    sizes += range(128, max_num_seqs, 16)
    return sorted({*sizes, max_num_seqs})


class GpuForward:
    """Holds the model, its cache, the graphs and the buffers of a step's integers."""

    def __init__(
        self,
        model: Model,
        comm: OneRank,
        cache: KVCache,
        rope: RopeTable,
        gpu: Gpu,
        max_num_tokens: int,
        max_num_seqs: int,
        table_width: int,
    ) -> None:
        self._run = EagerForward(model, comm, cache, rope, max_num_seqs)
        self._cache, self._rope, self._gpu = cache, rope, gpu
        self._table_width = table_width
        self._rope_table = cupy.asarray(rope.table)
        room = 5 * max_num_tokens + 2 * (max_num_seqs + 1) + max_num_seqs * table_width
        pinned = [cupy.cuda.alloc_pinned_memory(4 * room) for _ in range(2)]
        self._host: list[Int32] = [np.frombuffer(memory, np.int32, room) for memory in pinned]
        self._copied = [cupy.cuda.Event(disable_timing=True) for _ in range(2)]  # what lies in host has arrived
        self._turn = 0
        self._device = cupy.empty(room, np.int32)
        self._cos_sin = cupy.empty((max_num_tokens, self._rope_table.shape[1]), np.float32)
        self._last_ids = cupy.zeros(max_num_seqs, np.int32)  # by slot
        self._graphs: dict[int, tuple[Any, Array]] = {}  # by size: the graph, its hidden states
        self._pool = cupy.cuda.MemoryPool()  # what graphs compute in stays theirs

    def capture(self, sizes: Sequence[int]) -> None:
        """Runs and captures a decoding step of each size, the largest first: smaller ones fit in its memory."""
        stream = cupy.cuda.get_current_stream()
        with cupy.cuda.using_allocator(self._pool.malloc):
            for size in sorted(sizes, reverse=True):
                batch = self._upload(self._padding(size), size)
                self._run(batch)  # what a kernel needs at its first launch cannot be captured
                stream.synchronize()
                stream.begin_capture()
                hidden = self._run(batch)
                graph = stream.end_capture()
                graph.upload(stream)
                self._graphs[size] = (graph, hidden)
        stream.synchronize()

    def try_prompt(self, size: int) -> Array:
        """Hidden states of prompts of so many tokens in all, whose keys go nowhere and are looked for in block 0.

        What a step of this size takes, memory and kernels, is taken by it.
        """
        longest = self._table_width * self._cache.block_size
        lens = np.full(-(-size // longest), longest, np.int32)
        lens[-1] -= lens.sum() - size
        batch = ForwardBatch(
            token_ids=np.zeros(size, np.int32),
            positions=np.zeros(size, np.int32),
            cu_seqlens_q=np.concatenate([[0], np.cumsum(lens)]).astype(np.int32),
            seq_lens=lens,
            slot_mapping=np.full(size, -1, np.int32),
            block_table=np.zeros((len(lens), self._table_width), np.int32),
            logits_indices=np.zeros(len(lens), np.int32),
            rope_cos_sin=NO_ROWS,
            two_way_lens=np.zeros(len(lens), np.int32),
            num_decodes=0,
        )
        return self._run(self._upload(batch, None))

    def remember(self, slots: Int32, token_ids: Array) -> None:
        """Keeps sampled ids where they are; the host need not have seen them when the next step begins."""
        self._last_ids[cupy.asarray(slots)] = token_ids

    def rows(self, hidden: Array, indices: Int32) -> Array:
        """Gathers rows of the hidden states."""
        return embedding(cupy.asarray(indices), hidden, device=self._gpu)

    def batch(self, plan: StepPlan) -> ForwardBatch:
        """The arrays of a step, on the GPU; of a decoding step padded to the size of a graph."""
        is_decode = plan.num_decodes == plan.num_tokens
        rows = NO_ROWS
        if plan.rope_lens.any():
            rows = self._rope.rows(token_positions(plan), plan.rope_lens[token_sequences(plan)])
        on_host = build_batch(plan, self._cache.block_size, rows)
        size = next((size for size in sorted(self._graphs) if size >= plan.num_seqs), None) if is_decode else None
        return self._upload(on_host, size)

    def __call__(self, batch: ForwardBatch) -> Array:
        """Final-normed hidden states, [num_tokens, hidden_size]."""
        found = self._graphs.get(batch.num_tokens) if batch.num_decodes == batch.num_tokens else None
        if found is None:
            return self._run(batch)
        graph, hidden = found
        graph.launch(cupy.cuda.get_current_stream())
        return hidden

    def _upload(self, batch: ForwardBatch, size: int | None) -> ForwardBatch:
        """The batch on the GPU, with size rows if one is given: one copy of all integers, one of the block table.

        A graph reads the table with rows of its full width, of which only the columns in use are copied.
        """
        num_seqs, used = batch.block_table.shape
        padded, width = (num_seqs, used) if size is None else (size, self._table_width)
        host, copied = self._host[self._turn], self._copied[self._turn]
        self._turn = 1 - self._turn
        copied.synchronize()  # steps that sample nothing are launched without waiting for any before
        placed: dict[str, Array] = {}
        at = 0
        for name in FIELDS:
            value: Int32 = getattr(batch, name)
            count = len(value) + padded - num_seqs
            host[at : at + len(value)] = value
            host[at + len(value) : at + count] = PADDING.get(name, int(batch.cu_seqlens_q[-1]))
            placed[name] = self._device[at : at + count]
            at += count
        host[at : at + num_seqs * used] = batch.block_table.reshape(-1)
        stream = cupy.cuda.get_current_stream()
        address = host.ctypes.data
        self._device.data.copy_from_host_async(address, 4 * at, stream)
        placed["block_table"] = self._device[at : at + padded * width].reshape(padded, width)
        copy_rows(address + 4 * at, placed["block_table"], num_seqs, 4 * used)
        copied.record(stream)
        if (batch.token_ids < 0).any():
            token_ids = placed["token_ids"]
            token_ids[...] = cupy.where(token_ids < 0, self._last_ids[-1 - token_ids], token_ids)
        cos_sin = self._cos_sin[: len(placed["positions"])]  # where a graph looks for them too
        if batch.rope_cos_sin.size:
            cos_sin[: len(batch.rope_cos_sin)] = cupy.asarray(batch.rope_cos_sin)
        else:
            embedding(placed["positions"], self._rope_table, out=cos_sin, device=self._gpu)
        return ForwardBatch(
            **placed,
            rope_cos_sin=cos_sin,
            two_way_lens=batch.two_way_lens,
            num_decodes=padded if size else batch.num_decodes,
        )

    def _padding(self, size: int) -> ForwardBatch:
        """A decoding step of rows that nobody owns."""
        zeros = np.zeros(size, np.int32)
        return ForwardBatch(
            token_ids=zeros,
            positions=zeros,
            cu_seqlens_q=np.arange(size + 1, dtype=np.int32),
            seq_lens=zeros,
            slot_mapping=np.full(size, -1, np.int32),
            block_table=np.full((size, self._table_width), -1, np.int32),
            logits_indices=zeros,
            rope_cos_sin=NO_ROWS,
            two_way_lens=zeros,
            num_decodes=size,
        )
