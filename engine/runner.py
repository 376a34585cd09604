"""Computes a step: StepPlan → ForwardBatch → pieces → logits → sampled ids.

Takes plans from the loop; knows nothing of requests, queues or text. Where a model is split, rank 0 has the runner, and
hands each plan to the other ranks, which follow: their part of the forward pass and of the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.api import TokenLogprob
from engine.batch import StepPlan
from engine.comm.communicator import Communicator
from engine.forward import Forward
from engine.kv_cache import KVCache
from engine.models.model import Model
from engine.ops import SamplingOps
from engine.rope_table import RopeTable
from engine.sampler import Draw, Sampler, prompt_logprobs

Array = Any
LogitsHook = Callable[[Array, NDArray[np.int32]], None]  # (logits, slots); for fault injection in tests
Publish = Callable[[StepPlan], None]  # hands a plan to the ranks that follow
Swap = Callable[[StepPlan], None]  # copies the blocks that a plan names (see engine.kv_cache.KVSwap)

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
    later: StepPlan | None = None  # what this rank has yet to compute


class ModelRunner:
    """Holds the model, its cache and the sampler's rows; one step at a time. Of ranks, rank 0 alone has one."""

    def __init__(
        self,
        model: Model,
        forward: Forward,
        comm: Communicator,
        cache: KVCache,
        rope: RopeTable,
        sampler: Sampler,
        ops: SamplingOps,
        publish: Publish = lambda plan: None,
        defers: bool = False,
    ) -> None:
        """defers: start would wait for the stages before this one, so it hands the plan on, and finish computes."""
        self.model = model
        self.forward = forward
        self.cache = cache
        self.rope = rope
        self.sampler = sampler
        self.comm = comm
        self._ops = ops
        self._publish, self._defers = publish, defers
        self.swap: Swap = lambda plan: None
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
        self._publish(plan)
        return self._finish(self._compute(plan, logits_hook))

    def start(self, plan: StepPlan) -> StartedStep:
        """Launches a step and waits for nothing, save where prompt logprobs are wanted.

        A token id below 0 is batch.unknown_id(slot): what the step before samples in that slot.
        """
        self._publish(plan)
        return StartedStep(None, {}, plan) if self._defers else self._compute(plan)

    def finish(self, started: StartedStep) -> StepResult:
        """Waits for what a step gave. Steps end in the order in which they were started."""
        return self._finish(started if started.later is None else self._compute(started.later))

    def _compute(self, plan: StepPlan, logits_hook: LogitsHook | None = None) -> StartedStep:
        self.swap(plan)
        hidden = self.forward(self.forward.batch(plan))
        scores = self._score_prompts(plan, hidden)
        rows = np.flatnonzero(plan.samples)
        if not len(rows):
            return StartedStep(None, scores)
        logits = self._logits(self.forward.rows(hidden, last_rows(plan)))
        slots = plan.slots[rows]
        if logits_hook is not None:
            logits_hook(logits, slots)
        draw = self.sampler.start(logits, slots)
        self.forward.remember(slots, draw.sampled[0])
        if self.comm.shares_ids:
            self.comm.share_ids(draw.sampled[0], len(slots))
        return StartedStep(draw, scores)

    def _finish(self, started: StartedStep) -> StepResult:
        if started.draw is None:
            return StepResult([], [], {}, started.prompt_logprobs)
        sampled = self.comm.settle(partial(self.sampler.finish, started.draw))
        return StepResult(sampled.token_ids.tolist(), sampled.logprobs, sampled.errors, started.prompt_logprobs)

    def prompt_logits(self, plan: StepPlan) -> Iterator[NDArray[np.float32]]:
        """Runs the model on a plan for nothing but the logits that it asks for without sampling, on the host:
        [num_rows, vocab_size] in the order of the tokens, PROMPT_LOGPROB_ROWS at a time at most."""
        self._publish(plan)
        hidden = self.forward(self.forward.batch(plan))
        for _, rows in scored_rows(plan):
            yield self._ops.start_copy(self._logits(hidden[rows]))()

    def _score_prompts(self, plan: StepPlan, hidden: Array) -> dict[int, list[TokenLogprob]]:
        """Logprobs of the prompt token after each row that has one."""
        found: dict[int, list[TokenLogprob]] = {}
        for row, rows in scored_rows(plan):
            slot, first = int(plan.slots[row]), int(plan.starts[row] - plan.cu_seqlens_q[row])
            scores = self._prompt_scores[slot]
            next_ids = scores.prompt_ids[first + rows.start + 1 : first + rows.stop + 1]
            logits = self._logits(hidden[rows])
            found.setdefault(slot, []).extend(prompt_logprobs(logits, next_ids, scores.num_top, self._ops))
        return found

    def _logits(self, rows: Array) -> Array:
        """[num_rows, hidden_size] → [num_rows, vocab_size]."""
        logits = self.comm.gather_logits(self.model.logits(rows))
        assert logits is not None, "the runner is rank 0's"
        return logits


def follow(plan: StepPlan, model: Model, forward: Forward, comm: Communicator) -> None:
    """This rank's share of a step that rank 0 computes: the same calls of comm in the same order."""
    hidden = forward(forward.batch(plan))
    if not comm.is_last:
        return
    for _, rows in scored_rows(plan):
        comm.gather_logits(model.logits(hidden[rows]))
    if plan.samples.any():
        comm.gather_logits(model.logits(forward.rows(hidden, last_rows(plan))))
        if comm.shares_ids:
            slots = plan.slots[plan.samples]
            forward.remember(slots, comm.share_ids(None, len(slots)))


def last_rows(plan: StepPlan) -> NDArray[np.int32]:
    """Where in the step's tokens the last of each sequence that samples is."""
    return plan.cu_seqlens_q[1:][plan.samples] - np.int32(1)


def scored_rows(plan: StepPlan) -> Iterator[tuple[int, slice]]:
    """(sequence, where in the step's tokens) of tokens whose logits are wanted for prompt logprobs, as many as are made
    at once."""
    num_scored = plan.num_logits - plan.samples
    for row in np.flatnonzero(num_scored).tolist():
        first = int(plan.cu_seqlens_q[row])
        last = first + int(num_scored[row])
        for low in range(first, last, PROMPT_LOGPROB_ROWS):
            yield row, slice(low, min(low + PROMPT_LOGPROB_ROWS, last))
