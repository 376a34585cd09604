"""A model's forward pass on a GPU: a step's integers go up in one copy, captured graphs are launched.

Graphs are captured for a few sizes; a step of another size is padded up with rows that touch no block. A decoding step
is one graph, another is pieces between which attention is launched. Steps of many tokens are launched kernel by kernel:
the GPU is busy with one for longer than it takes to launch the next.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import cupy
import numpy as np
from numpy.typing import NDArray

from engine.batch import ForwardBatch, StepPlan, build_batch, token_positions, token_sequences
from engine.comm.communicator import Communicator, OneRank
from engine.config import StepLimits
from engine.errors import KernelError
from engine.forward import EagerForward
from engine.halves import PER_TOKEN, Halving, split_batch
from engine.kernels.embedding import embedding
from engine.kernels.gpu import Gpu, copy_rows
from engine.kernels.graphs import Pieces, Recorder
from engine.kernels.side_stream import SideStream
from engine.kv_cache import KVCache
from engine.memory_plan import ALWAYS, STEP, Buffer
from engine.models.model import Model
from engine.rope_table import RopeTable

Array = Any
Int32 = NDArray[np.int32]

logger = logging.getLogger(__name__)

TOKEN_PADDING = {"token_ids": 0, "positions": 0, "slot_mapping": -1}  # fields with a number a token
SEQUENCE_PADDING = {"cu_seqlens_q": None, "seq_lens": 0, "logits_indices": 0}  # a sequence; None: the last one again
COUNTED = ("cu_seqlens_q", "seq_lens", "logits_indices")
NO_ROWS = np.empty((0, 0), np.float32)
MOST_IN_PIECES = 512  # tokens of a step that has a graph in pieces
FEW = 4  # times as many tokens as rows that are wanted, at least, where the last piece is for these alone

known_ids = cupy.ElementwiseKernel(  # see batch.unknown_id
    "int32 token_id, raw int32 last_ids", "int32 known", "known = token_id < 0 ? last_ids[-1 - token_id] : token_id"
)


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes that get a graph: padding wastes at most half of a small batch and an eighth of a large one."""
    sizes = [size for size in (1, 2, 4, 8, 12, 16) if size < max_num_seqs]
    sizes += range(24, min(max_num_seqs, 128), 8)
    sizes += range(128, max_num_seqs, 16)
    return sorted({*sizes, max_num_seqs})


def piece_sizes(max_num_tokens: int) -> list[int]:
    """Numbers of tokens that get a graph in pieces: as far as launching takes longer than computing."""
    sizes = (8, 16, 24, 32, 48, *range(64, MOST_IN_PIECES + 1, 64))
    return sorted({*(size for size in sizes if size < max_num_tokens), min(sizes[-1], max_num_tokens)})


class GpuForward:
    """Holds the model, its cache, the graphs and the buffers of a step's integers."""

    def __init__(
        self,
        model: Model,
        comm: Communicator,
        cache: KVCache,
        rope: RopeTable,
        gpu: Gpu,
        recorder: Recorder,
        limits: StepLimits,
        table_width: int,
    ) -> None:
        max_num_tokens, max_num_seqs = limits.max_num_batched_tokens, limits.max_num_seqs
        self._side = SideStream()
        self._run = EagerForward(model, comm, cache, rope, max_num_seqs, side=self._side)
        self._halving = Halving()
        self._recorder = recorder
        self._ends_by_token = isinstance(comm, OneRank) and model.pieces[-1].is_by_token
        self._wanted: Int32 = np.empty(0, np.int32)  # rows of the newest batch whose hidden states are wanted
        self._cache, self._rope, self._gpu = cache, rope, gpu
        self._table_width = table_width
        self._rope_table = cupy.asarray(rope.table)
        # Three numbers a token and three a sequence, of which a prompt's step may have one for every two tokens.
        room = 6 * max_num_tokens + 2 * (max_num_seqs + 1) + max_num_seqs * table_width
        pinned = [cupy.cuda.alloc_pinned_memory(4 * room) for _ in range(2)]
        self._host: list[Int32] = [np.frombuffer(memory, np.int32, room) for memory in pinned]
        self._copied = [cupy.cuda.Event(disable_timing=True) for _ in range(2)]  # what lies in host has arrived
        self._turn = 0
        self._device = cupy.empty(room, np.int32)
        self._cos_sin = cupy.empty((max_num_tokens, self._rope_table.shape[1]), np.float32)
        self._last_ids = cupy.zeros(max_num_seqs, np.int32)  # by slot
        known_ids(self._last_ids, self._last_ids, self._last_ids)  # changes none, but has it compiled before a step
        self._graphs: dict[int, tuple[Any, Array]] = {}  # of decoding, by sequences: the graph, its hidden states
        self._pieces: dict[int, Pieces] = {}  # of other steps, by tokens

    def capture(self, batch_sizes: Sequence[int], token_sizes: Sequence[int]) -> None:
        """Captures steps of these sizes, the largest first: smaller ones fit in its memory."""
        for size in sorted(token_sizes, reverse=True):
            self._pieces.pop(size, None)  # which is cut elsewhere, if there is one
            with _optional(f"steps of {size} tokens"):
                self._pieces[size], _ = self._cut(size, self._halving.num_first_prompts(size))
        for size in sorted(batch_sizes, reverse=True):
            batch = self._upload(self._padding(size), size, is_graph=True)
            with _optional(f"decoding steps of {size} sequences"):
                self._graphs[size] = self._recorder.whole(partial(self._run, batch))

    def halve(self, halving: Halving) -> None:
        """Graphs whose steps are cut elsewhere from now on are captured anew."""
        before, self._halving = self._halving, halving
        decodes, prompts = Halving.num_first_decodes, Halving.num_first_prompts
        self.capture(
            [size for size in self._graphs if decodes(before, size) != decodes(halving, size)],
            [size for size in self._pieces if prompts(before, size) != prompts(halving, size)],
        )

    def pieces_of_prompt(self, size: int, num_first: int) -> Callable[[], Array]:
        """try_prompt as a graph in pieces, which each call launches; for a step of at most MOST_IN_PIECES tokens.

        Raises:
            KernelError, CUDARuntimeError: it cannot be captured.
        """
        pieces, batch = self._cut(size, num_first)
        return partial(pieces.launch, batch)

    def _cut(self, size: int, num_first: int) -> tuple[Pieces, ForwardBatch]:
        """A step of prompts of so many tokens in pieces; num_first: of its first half; 0: whole."""
        batch = self._upload(self._prompts(size), size, num_first=num_first)
        return self._recorder.pieces(partial(self._run, batch), self._side.catch_up), batch

    def try_prompt(self, size: int, num_first: int = 0) -> Array:
        """Hidden states of prompts of so many tokens in all, whose keys go nowhere and are looked for in block 0.

        What a step of this size takes, memory and kernels, is taken by it. num_first: of its first half; 0: whole.
        """
        return self._run(self._upload(self._prompts(size), size, num_first=num_first))

    def buffers(self) -> tuple[Buffer, ...]:
        """What it holds beside the graphs."""
        return (
            Buffer("rope table", int(self._rope_table.nbytes), ALWAYS),
            Buffer("rope rows of a step", int(self._cos_sin.nbytes), STEP),
            Buffer("integers of a step", int(self._device.nbytes), STEP),
            Buffer("integers of a step", sum(host.nbytes for host in self._host), STEP, "host", "two, in turn"),
            Buffer("sampled ids", int(self._last_ids.nbytes), STEP),
        )

    def remember(self, slots: Int32, token_ids: Array) -> None:
        """Keeps sampled ids where they are; the host need not have seen them when the next step begins."""
        self._last_ids[cupy.asarray(slots)] = token_ids

    def rows(self, hidden: Array, indices: Int32) -> Array:
        """Gathers rows of the hidden states; those of a decoding step lie together already."""
        if len(indices) and indices[-1] == len(indices) - 1:  # they ascend
            return hidden[: len(indices)]
        return embedding(cupy.asarray(indices), hidden, device=self._gpu)

    def batch(self, plan: StepPlan) -> ForwardBatch:
        """The arrays of a step, on the GPU, padded to the size of a graph."""
        is_decode = plan.num_decodes == plan.num_tokens
        rows = NO_ROWS
        if plan.rope_lens.any():
            rows = self._rope.rows(token_positions(plan), plan.rope_lens[token_sequences(plan)])
        on_host = build_batch(plan, self._cache.block_size, rows)
        self._wanted = on_host.logits_indices
        sizes = sorted(self._graphs if is_decode else self._pieces)
        size = next((size for size in sizes if size >= plan.num_tokens), None)
        if size is None:
            return self._upload(on_host, plan.num_tokens, num_first=self._halving.num_first(plan))
        num_first = 0 if is_decode else self._halving.num_first_prompts(size)  # as it was captured
        return self._upload(on_host, size, is_graph=is_decode, num_first=num_first)

    def __call__(self, batch: ForwardBatch) -> Array:
        """Final-normed hidden states, [num_tokens, hidden_size], of padding too.

        In steps that are larger than any with a graph, rows whose logits nobody wants are as the first that is wanted.
        """
        num_tokens = batch.num_tokens
        if batch.num_decodes == num_tokens and num_tokens in self._graphs:
            graph, hidden = self._graphs[num_tokens]
            graph.launch(cupy.cuda.get_current_stream())
            return hidden
        if batch.num_decodes < num_tokens and num_tokens in self._pieces:
            return self._pieces[num_tokens].launch(batch)
        is_for_few = 0 < len(self._wanted) * FEW <= num_tokens
        if is_for_few and self._ends_by_token and num_tokens > MOST_IN_PIECES and batch.halves is None:
            return self._run_to_few(batch, self._wanted)
        return self._run(batch)

    def _run_to_few(self, batch: ForwardBatch, wanted: Int32) -> Array:
        """The last piece for the wanted rows alone: of a prompt, that is most of a layer less."""
        found = self._run(batch, lambda array: embedding(batch.logits_indices, array, device=self._gpu))
        places = np.zeros(batch.num_tokens, np.int32)
        places[wanted] = np.arange(len(wanted))
        return embedding(cupy.asarray(places), found, device=self._gpu)

    def _upload(self, batch: ForwardBatch, num_tokens: int, is_graph: bool = False, num_first: int = 0) -> ForwardBatch:
        """The batch on the GPU, padded to num_tokens: one copy of all integers, one of the block table.

        is_graph: a decoding step for a graph, whose padding is sequences too, and which reads the block table with rows
        of its full width, of which only the columns in use are copied. num_first: tokens of the first half of a step
        that is no graph of decoding, whose padding is in the second; 0: it is whole.
        """
        num_seqs, used = batch.block_table.shape
        padded, width = (num_tokens, self._table_width) if is_graph else (num_seqs, used)
        host, copied = self._host[self._turn], self._copied[self._turn]
        self._turn = 1 - self._turn
        copied.synchronize()  # steps that sample nothing are launched without waiting for any before
        placed: dict[str, Array] = {}
        at = 0
        for name, padding in (TOKEN_PADDING | SEQUENCE_PADDING).items():
            value: Int32 = getattr(batch, name)
            count = num_tokens if name in TOKEN_PADDING else len(value) + padded - num_seqs
            host[at : at + len(value)] = value
            host[at + len(value) : at + count] = value[-1] if padding is None else padding
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
            known_ids(placed["token_ids"], self._last_ids, placed["token_ids"])
        cos_sin = self._cos_sin[:num_tokens]  # where a graph looks for them too
        if batch.rope_cos_sin.size:
            cos_sin[: len(batch.rope_cos_sin)] = cupy.asarray(batch.rope_cos_sin)
        else:
            embedding(placed["positions"], self._rope_table, out=cos_sin, device=self._gpu)
        uploaded = ForwardBatch(
            **placed,
            rope_cos_sin=cos_sin,
            two_way_lens=batch.two_way_lens,
            num_decodes=padded if is_graph else batch.num_decodes,
        )
        if is_graph:
            num_first = self._halving.num_first_decodes(padded)
            return replace(uploaded, halves=_decoding_halves(uploaded, num_first)) if num_first else uploaded
        return replace(uploaded, halves=_halves(uploaded, batch, num_first)) if num_first else uploaded

    def _prompts(self, size: int) -> ForwardBatch:
        """Prompts of so many tokens in all, as long as may be, that nobody owns."""
        longest = self._table_width * self._cache.block_size
        lens = np.full(-(-size // longest), longest, np.int32)
        lens[-1] -= lens.sum() - size
        return ForwardBatch(
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


def _halves(batch: ForwardBatch, on_host: ForwardBatch, num_first: int) -> tuple[ForwardBatch, ForwardBatch]:
    """Views of what lies on the GPU, and, in a copy of its own, what each half counts anew."""
    counted = {name: getattr(on_host, name) for name in COUNTED}
    halves = split_batch(replace(batch, **counted), num_first)
    numbers = [getattr(half, name) for half in halves for name in COUNTED]
    placed = cupy.asarray(np.concatenate(numbers))
    ends = np.cumsum([0, *map(len, numbers)]).tolist()
    views = (placed[begin:end] for begin, end in pairwise(ends))
    first, second = (replace(half, **{name: next(views) for name in COUNTED}) for half in halves)
    return first, second


def _decoding_halves(batch: ForwardBatch, num_first: int) -> tuple[ForwardBatch, ForwardBatch]:
    """Of a graph: all is where it always lies, as each half counts its sequences as the whole does."""
    names = *PER_TOKEN, "block_table", "seq_lens", "logits_indices", "two_way_lens"
    first, second = (
        replace(
            batch,
            **{name: getattr(batch, name)[part] for name in names},
            cu_seqlens_q=batch.cu_seqlens_q[: part.stop - part.start + 1],
            num_decodes=part.stop - part.start,
        )
        for part in (slice(0, num_first), slice(num_first, batch.num_tokens))
    )
    return first, second


@contextmanager
def _optional(steps: str) -> Iterator[None]:
    """A graph that cannot be captured only costs time."""
    try:
        yield
    except (KernelError, cupy.cuda.runtime.CUDARuntimeError) as error:
        logger.warning("%s are launched kernel by kernel: no graph of them could be made (%s)", steps, error)
