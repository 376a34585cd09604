"""Computes a step: StepPlan → ForwardBatch → pieces → logits → sampled ids. Every rank runs the same.

Takes plans from the loop; knows nothing of requests, queues or text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.api import TokenLogprob
from engine.batch import ForwardBatch, StepPlan, build_batch, token_positions, token_sequences
from engine.comm.communicator import OneRank
from engine.kv_cache import KVCache
from engine.models.model import Model
from engine.ops import OpTable
from engine.rope_table import RopeTable
from engine.sampler import Sampler, prompt_logprobs
from engine.weights import Norm

Array = Any
LogitsHook = Callable[[Array, NDArray[np.int32]], None]  # (logits, slots); for fault injection in tests

PROMPT_LOGPROB_ROWS = 64  # logits rows made at once for prompt logprobs, to bound memory


@dataclass(frozen=True, slots=True)
class PromptScores:
    """The prompt ids of a sequence that wants prompt logprobs, and how many alternatives it wants."""

    prompt_ids: NDArray[np.int32]
    num_top: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave. Lists are by rows of the plan that sample, in order; prompt_logprobs is by slot."""

    token_ids: list[int]
    logprobs: list[TokenLogprob | None]
    errors: dict[int, str]  # row → why it could not be sampled; its token id means nothing
    prompt_logprobs: dict[int, list[TokenLogprob]]


class ModelRunner:
    """Holds the model, its cache and the sampler's rows; one step at a time."""

    def __init__(
        self, model: Model, ops: OpTable, comm: OneRank, cache: KVCache, rope: RopeTable, sampler: Sampler
    ) -> None:
        self.model = model
        self.sampler = sampler
        self.rope = rope
        self._ops = ops
        self._comm = comm
        self.cache = cache
        self._prompt_scores: dict[int, PromptScores] = {}
        norms = [piece.norm for piece in model.pieces] + [model.final_norm]
        self._first_norm, self._next_norms = norms[0], norms[1:]

    def score_prompt(self, slot: int, scores: PromptScores) -> None:
        """From now on rows of this slot's prompt give prompt logprobs, until release."""
        self._prompt_scores[slot] = scores

    def release(self, slot: int) -> None:
        """Forgets the state of a slot."""
        self._prompt_scores.pop(slot, None)
        self.sampler.remove(slot)

    def step(self, plan: StepPlan, logits_hook: LogitsHook | None = None) -> StepResult:
        """Runs the model on a plan, writes the KV of its tokens, and samples the rows that want it."""
        positions = token_positions(plan)
        rope_rows = self.rope.rows(positions, plan.rope_lens[token_sequences(plan)])
        batch = build_batch(plan, self.cache.block_size, rope_rows)
        hidden = self.forward(batch)
        scores = self._score_prompts(plan, hidden)
        rows = np.flatnonzero(plan.samples)
        if not len(rows):
            return StepResult([], [], {}, scores)
        logits = self.model.logits(hidden[plan.cu_seqlens_q[rows + 1] - 1])
        slots = plan.slots[rows]
        if logits_hook is not None:
            logits_hook(logits, slots)
        sampled = self.sampler.sample(logits, slots)
        return StepResult(sampled.token_ids.tolist(), sampled.logprobs, sampled.errors, scores)

    def forward(self, batch: ForwardBatch) -> Array:
        """Final-normed hidden states, [num_tokens, hidden_size]."""
        residual = self.model.embed(batch)
        hidden = self._normed(residual, self._first_norm)
        for piece, norm in zip(self.model.pieces, self._next_norms, strict=True):
            partial = piece.forward(hidden, batch, self.cache)
            hidden, residual = self._comm.reduce_add_norm(partial, residual, norm)
        return hidden

    def _normed(self, x: Array, norm: Norm) -> Array:
        if norm.kind == "layernorm":
            return self._ops.layernorm(x, norm.weight, norm.bias, norm.eps)
        return self._ops.rmsnorm(x, norm.weight, norm.eps)

    def _score_prompts(self, plan: StepPlan, hidden: Array) -> dict[int, list[TokenLogprob]]:
        """Logprobs of the prompt token after each row that has one."""
        found: dict[int, list[TokenLogprob]] = {}
        if not self._prompt_scores:
            return found
        num_prompt_rows = plan.num_logits - plan.samples
        for row in np.flatnonzero(num_prompt_rows).tolist():
            slot, start, count = int(plan.slots[row]), int(plan.starts[row]), int(num_prompt_rows[row])
            scores = self._prompt_scores[slot]
            first = int(plan.cu_seqlens_q[row])
            next_ids = scores.prompt_ids[start + 1 : start + 1 + count]
            found[slot] = []
            for low in range(0, count, PROMPT_LOGPROB_ROWS):
                high = min(low + PROMPT_LOGPROB_ROWS, count)
                logits = self.model.logits(hidden[first + low : first + high])
                found[slot] += prompt_logprobs(logits, next_ids[low:high], scores.num_top, self._ops.sampling)
        return found
