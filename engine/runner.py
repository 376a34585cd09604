"""Computes a step: StepPlan → ForwardBatch → pieces → logits → sampled ids. Every rank runs the same.

Takes plans from the loop; knows nothing of requests, queues or text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.api import TokenLogprob
from engine.batch import StepPlan
from engine.forward import Forward
from engine.kv_cache import KVCache
from engine.models.model import Model
from engine.ops import SamplingOps
from engine.rope_table import RopeTable
from engine.sampler import Draw, Sampler, prompt_logprobs

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


@dataclass(frozen=True, slots=True)
class StartedStep:
    """A step that has been launched."""

    draw: Draw | None  # None: no row samples
    prompt_logprobs: dict[int, list[TokenLogprob]]


class ModelRunner:
    """Holds the model, its cache and the sampler's rows; one step at a time."""

    def __init__(
        self, model: Model, forward: Forward, cache: KVCache, rope: RopeTable, sampler: Sampler, ops: SamplingOps
    ) -> None:
        self.model = model
        self.forward = forward
        self.cache = cache
        self.rope = rope
        self.sampler = sampler
        self._ops = ops
        self._prompt_scores: dict[int, PromptScores] = {}

    def score_prompt(self, slot: int, scores: PromptScores) -> None:
        """From now on rows of this slot's prompt give prompt logprobs, until release."""
        self._prompt_scores[slot] = scores

    def release(self, slot: int) -> None:
        """Forgets the state of a slot."""
        self._prompt_scores.pop(slot, None)
        self.sampler.remove(slot)

    def step(self, plan: StepPlan, logits_hook: LogitsHook | None = None) -> StepResult:
        """Runs the model on a plan, writes the KV of its tokens, and samples the rows that want it."""
        return self.finish(self.start(plan, logits_hook))

    def start(self, plan: StepPlan, logits_hook: LogitsHook | None = None) -> StartedStep:
        """Launches a step and waits for nothing, save where prompt logprobs are wanted.

        A token id below 0 is batch.unknown_id(slot): what the step before samples in that slot.
        """
        hidden = self.forward(self.forward.batch(plan))
        scores = self._score_prompts(plan, hidden)
        rows = np.flatnonzero(plan.samples)
        if not len(rows):
            return StartedStep(None, scores)
        logits = self.model.logits(self.forward.rows(hidden, plan.cu_seqlens_q[rows + 1] - np.int32(1)))
        slots = plan.slots[rows]
        if logits_hook is not None:
            logits_hook(logits, slots)
        draw = self.sampler.start(logits, slots)
        self.forward.remember(slots, draw.sampled[0])
        return StartedStep(draw, scores)

    def finish(self, started: StartedStep) -> StepResult:
        """Waits for what a step gave."""
        if started.draw is None:
            return StepResult([], [], {}, started.prompt_logprobs)
        sampled = self.sampler.finish(started.draw)
        return StepResult(sampled.token_ids.tolist(), sampled.logprobs, sampled.errors, started.prompt_logprobs)

    def prompt_logits(self, plan: StepPlan) -> Iterator[NDArray[np.float32]]:
        """Runs the model on a plan for nothing but the logits of all its tokens, on the host: [num_rows, vocab_size] in
        the order of the tokens, PROMPT_LOGPROB_ROWS at a time."""
        hidden = self.forward(self.forward.batch(plan))
        for low in range(0, plan.num_tokens, PROMPT_LOGPROB_ROWS):
            high = min(low + PROMPT_LOGPROB_ROWS, plan.num_tokens)
            yield self._ops.start_copy(self.model.logits(hidden[low:high]))()

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
                found[slot] += prompt_logprobs(logits, next_ids[low:high], scores.num_top, self._ops)
        return found
