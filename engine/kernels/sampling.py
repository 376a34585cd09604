"""Sampling on a GPU: cuda/sampling*.cu. SamplingOps, defined by ref.sampling and ref.philox."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.api import GREEDY_TEMPERATURE
from engine.errors import KernelError
from engine.kernels.check import ceil_div, require, stride
from engine.kernels.device import Device, Instance
from engine.logit_edits import ALLOWED, NOT_FINITE, LogitEdits
from engine.memory_plan import ALWAYS, Buffer

Array = Any
Numbers = NDArray[Any]  # of the host

ROW_THREADS = 1024  # of a block that owns a row
PART_THREADS = 256  # of a block that owns a part of one
MIN_PART = 4096  # numbers of a row that are worth a block
BLOCKS_PER_SM = 8
MAX_VOCAB = 2**20  # so many weights of 2^44 are the largest sum of 64 bits
WEIGHT_ONE = 2.0**44  # see cuda/include/ranked_row.cuh
GREEDY = Instance("sampling", "greedy")
SAMPLE_ROWS = Instance("sampling", "sample_rows")
EDIT_LOGITS = Instance("sampling_edits", "edit_logits")
TOKEN_LOGPROBS = Instance("sampling_logprobs", "token_logprobs")


class KernelSampling:
    """SamplingOps of a device. Small arrays go up in one copy an op, ids with their flags come back in one.

    Args:
        max_num_rows: rows of logits at most.
        row_threads: threads of a block that owns a row, 2 to 32 whole warps.
    """

    def __init__(self, device: Device, max_num_rows: int, row_threads: int = ROW_THREADS) -> None:
        self._device = device
        self._max_num_rows = max_num_rows
        self._row_threads = row_threads
        self._best = self._upload(np.zeros(max_num_rows, np.uint64))  # greedy leaves both at 0
        self._num_done = self._upload(np.zeros(max_num_rows, np.uint32))

    def buffers(self) -> tuple[Buffer, ...]:
        """What it holds."""
        return (Buffer("sampler", int(self._best.nbytes + self._num_done.nbytes), ALWAYS),)

    def edit_logits(self, logits: Array, edits: LogitEdits) -> tuple[Array, Array]:
        """See engine.cpu.sampling.edit_logits."""
        num_rows, vocab_size = self._check(logits)
        num_edited = len(edits.rows)
        raw_index = np.where(edits.keeps_raw, np.cumsum(edits.keeps_raw) - 1, -1).astype(np.int32)
        ids = edits.token_ids
        if len(ids) and not (ids.min() >= 0 and ids.max() < vocab_size):
            raise KernelError(f"edit_logits: token ids {ids.min()} … {ids.max()}; expected 0 … {vocab_size - 1}")
        reasons = np.full(num_rows, NOT_FINITE, np.int32)
        lists = (edits.rows, edits.bounds, ids, edits.values, edits.repetition_penalty, raw_index, reasons)
        words = self._upload(np.concatenate([part.reshape(-1).view(np.int32) for part in lists]))
        ends = np.cumsum([part.size for part in lists]).tolist()
        parts = [words[end - part.size : end] for part, end in zip(lists, ends, strict=True)]
        parts[3], parts[4] = parts[3].view(np.float32), parts[4].view(np.float32)
        raw = self._device.empty((int(edits.keeps_raw.sum()), vocab_size), np.float32)
        has_mask = bool((edits.bounds[:, ALLOWED] < edits.bounds[:, ALLOWED + 1]).any())
        arguments = (logits, stride(logits), np.int32(vocab_size), *parts[:6], raw, parts[6])
        shared_bytes = 4 * ceil_div(vocab_size, 32) * has_mask
        self._device.launch(EDIT_LOGITS, (num_edited,), (self._row_threads,), arguments, shared_bytes)
        return parts[6], raw

    def sample_rows(
        self,
        logits: Array,
        temperature: Numbers,
        top_k: Numbers,
        top_p: Numbers,
        min_p: Numbers,
        seed: Numbers,
        position: Numbers,
        stream: Numbers,
        reasons: Array | None = None,
    ) -> Array:
        """See engine.cpu.sampling.sample_rows."""
        num_rows, vocab_size = self._check(logits)
        sampled = self._device.empty((2, num_rows), np.int32)
        if not num_rows:
            return sampled
        head = (logits, stride(logits), np.int32(vocab_size))
        if not (temperature >= GREEDY_TEMPERATURE).any():
            wanted = self._device.num_sms * BLOCKS_PER_SM // num_rows
            grid = (min(max(wanted, 1), ceil_div(vocab_size, MIN_PART)), num_rows)
            arguments = (*head, reasons, self._best, self._num_done, sampled)
            self._device.launch(GREEDY, grid, (PART_THREADS,), arguments)
            return sampled
        fields = (
            np.asarray(temperature, np.float64),
            np.asarray(top_k, np.int64),
            np.asarray(top_p, np.float64),
            _rounded_up(min_p),
            np.asarray(seed, np.uint64),
            np.asarray(position, np.int64),
            np.asarray(stream, np.int64),
        )
        words = self._upload(np.stack([field.view(np.int64) for field in fields]))
        filters = [words[i].view(field.dtype) for i, field in enumerate(fields)]
        self._device.launch(SAMPLE_ROWS, (num_rows,), (self._row_threads,), (*head, *filters, reasons, sampled))
        return sampled

    def token_logprobs(
        self, logits: Array, token_ids: Numbers, k: int, rows: Numbers | None = None, raw: Array | None = None
    ) -> tuple[Numbers, Numbers, Numbers]:
        """See engine.cpu.sampling.token_logprobs."""
        _, vocab_size = self._check(logits)
        num_wanted, num_top = len(token_ids), min(k, vocab_size)
        wanted = np.arange(num_wanted) if rows is None else rows
        words = self._upload(np.stack([wanted, token_ids]).astype(np.int32))
        found = self._device.empty((num_wanted, 4 + 2 * num_top), np.uint32)
        if num_wanted:
            arguments = (
                logits,
                stride(logits),
                raw,
                np.int32(vocab_size),
                words[0],
                words[1],
                np.int32(num_top),
                found,
            )
            self._device.launch(TOKEN_LOGPROBS, (num_wanted,), (self._row_threads,), arguments)
        return _logprobs(self._device.to_host(found), num_top)

    def start_copy(self, array: Array) -> Callable[[], NDArray[Any]]:
        """See engine.cpu.sampling.start_copy."""
        return self._device.start_copy(array)

    def _check(self, logits: Array) -> tuple[int, int]:
        require("sampling", "logits", logits, (None, None), np.float32)
        num_rows, vocab_size = logits.shape
        if not (num_rows <= self._max_num_rows and 0 < vocab_size < MAX_VOCAB):
            raise KernelError(
                f"sampling: logits have shape {list(logits.shape)}; at most {self._max_num_rows} rows of 1 to "
                f"{MAX_VOCAB - 1} tokens are possible"
            )
        return num_rows, vocab_size

    def _upload(self, array: Numbers) -> Array:
        out = self._device.empty(array.shape, array.dtype)
        self._device.to_device(array, out)
        return out


def _rounded_up(min_p: Numbers) -> NDArray[np.float64]:
    """The smallest float32 from min_p on: a float32 weight reaches one if and only if it reaches the other."""
    rounded = np.asarray(min_p, np.float32)
    rounded = np.where(rounded < min_p, np.nextafter(rounded, np.float32(np.inf)), rounded)
    return rounded.astype(np.float64)


def _logprobs(found: NDArray[np.uint32], num_top: int) -> tuple[Numbers, Numbers, Numbers]:
    """The words that the kernel wrote as logprobs, the best first."""
    totals = np.ascontiguousarray(found[:, :2]).view(np.uint64)[:, 0]
    log_total = np.log(totals / WEIGHT_ONE)[:, None]
    logits = found.view(np.float32)
    best = logits[:, 3:4]
    ids, top = found[:, 4 : 4 + num_top].astype(np.int64), logits[:, 4 + num_top :]
    order = np.lexsort((ids, -top), axis=-1)
    ids, top = np.take_along_axis(ids, order, axis=-1), np.take_along_axis(top, order, axis=-1)
    own = (logits[:, 2:3] - best) - log_total
    return own[:, 0].astype(np.float32), ids, ((top - best) - log_total).astype(np.float32)
