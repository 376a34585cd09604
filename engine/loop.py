"""The engine: requests in, token events out, one step after another.

Joins scheduler and runner. Knows nothing of text, processes or HTTP; LLM calls it directly, serve feeds it from
the front end's process.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from engine.api import FinishReason, GenerationRequest, TokenEvent
from engine.batch import StepPlan
from engine.errors import CapacityError, EngineDeadError, RequestError
from engine.faults import Faults
from engine.prefix_lm import check_prefix_request
from engine.runner import ModelRunner, PromptScores, StepResult
from engine.sampler import check_tokens_left
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.stats import EngineStats

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 8  # in a row; then the engine itself is at fault, not a request


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request may ask for."""

    vocab_size: int
    max_model_len: int
    max_logprobs: int
    max_waiting: int
    eos_token_ids: tuple[int, ...]
    soft_prompt_ids: tuple[int, ...] = ()  # before every prompt, in a model that reads it both ways


class Engine:
    """One model being served.

    add, abort and step are called from one thread. Every request that add accepts ends with exactly one event
    with a finish_reason for each of its choices, unless it is aborted, which ends it without one.
    """

    def __init__(
        self, scheduler: Scheduler, runner: ModelRunner, limits: Limits, seed: int = 0, faults: Faults | None = None
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.limits = limits
        self._faults = faults
        self._random = np.random.default_rng(seed)
        self._live: dict[str, list[Sequence]] = {}
        self._failed_in_a_row = 0
        self._prompt_tokens = 0
        self._generated_tokens = 0
        self._bad_rows = 0
        self._failed_steps = 0
        self._steps = 0
        self._step_seconds = 0.0

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def num_requests(self) -> int:
        return len(self._live)

    # ---- requests

    def has_room(self, num_choices: int) -> bool:
        """Whether so many more choices may wait; an idle engine takes any request."""
        num_waiting = len(self.scheduler.waiting)
        return num_waiting == 0 or num_waiting + num_choices <= self.limits.max_waiting

    def validate(self, request: GenerationRequest) -> None:
        """Raises RequestError for a request that can never be served."""
        request.validate(self.limits.vocab_size, self.limits.max_model_len, self.limits.max_logprobs)
        check_tokens_left(request.sampling, self.limits.vocab_size, self.limits.eos_token_ids)
        num_prompt = len(request.prompt_ids)
        num_rows = len(self.limits.soft_prompt_ids) + num_prompt
        if self.limits.soft_prompt_ids:
            check_prefix_request(request, num_rows, self.scheduler.max_num_batched_tokens)
        blocks = self.scheduler.blocks
        if blocks.blocks_for(num_rows) > blocks.num_blocks:
            raise RequestError(
                f"the prompt has {num_prompt} tokens, but the KV cache holds {blocks.num_blocks * blocks.block_size}: "
                "shorten the prompt, or start the server with a larger --num-gpu-blocks-override",
                "prompt",
                "context_length_exceeded",
            )

    def add(self, request: GenerationRequest) -> None:
        """Queues a request.

        Raises:
            RequestError: it can never be served, or its id is in use.
            CapacityError: too many requests are waiting.
        """
        self.validate(request)
        if request.request_id in self._live:
            raise RequestError(f"request id {request.request_id} is in use", "request_id")
        if not self.has_room(request.sampling.n):
            raise CapacityError(f"{len(self.scheduler.waiting)} requests are waiting already; try again later")
        seqs = self._make_sequences(request)
        self._live[request.request_id] = seqs
        self.scheduler.add(seqs)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Ends a request, or one choice of it, at once and without an event; what is not there is ignored."""
        for seq in list(self._live.get(request_id, [])):
            if index is None or seq.index == index:
                self._end(seq)

    def abort_all(self) -> list[TokenEvent]:
        """Ends everything, with an event of finish_reason "abort" for each choice."""
        return [
            event for seqs in list(self._live.values()) for seq in list(seqs) for event in self._finish(seq, "abort")
        ]

    def _make_sequences(self, request: GenerationRequest) -> list[Sequence]:
        sampling = request.sampling
        soft_prompt_ids = self.limits.soft_prompt_ids
        num_prompt = len(soft_prompt_ids) + len(request.prompt_ids)
        max_len = len(soft_prompt_ids) + self.limits.max_model_len
        if sampling.max_tokens is not None:
            max_len = min(max_len, num_prompt + sampling.max_tokens)
        seed = int(self._random.integers(2**63)) if sampling.seed is None else sampling.seed
        stop_ids: dict[int, int | None] = {} if sampling.ignore_eos else dict.fromkeys(self.limits.eos_token_ids)
        stop_ids.update((token_id, token_id) for token_id in sampling.stop_token_ids)
        seqs = [
            Sequence(
                request=request,
                index=index,
                seed=seed,
                max_len=max_len,
                stop_ids=stop_ids,
                rope_len=self.runner.rope.rope_len(num_prompt),
                soft_prompt_ids=soft_prompt_ids,
                two_way_len=num_prompt if soft_prompt_ids else 0,
            )
            for index in range(sampling.n)
        ]
        for seq in seqs[1:]:
            seq.first_sibling = seqs[0]
        return seqs

    # ---- steps

    def step(self) -> list[TokenEvent]:
        """Computes one step and returns what it gave; an empty list while prompts are still being read.

        Raises:
            EngineDeadError: several steps in a row failed; no further step will work.
        """
        started = time.perf_counter()
        try:
            return self._step()
        finally:
            self._step_seconds += time.perf_counter() - started

    def _step(self) -> list[TokenEvent]:
        plan = self._schedule()
        events = [event for seq in self.scheduler.exhausted for event in self._finish(seq, "length")]
        self.scheduler.exhausted.clear()
        self._sync_slots()
        if plan is None:
            return events
        self._steps += 1
        seqs = self.scheduler.planned(plan)
        try:
            result = self._run(plan, seqs)
        except Exception as error:  # whatever a step raises must not end the requests that are not at fault
            return events + self._on_failed_step(seqs, error)
        self._failed_in_a_row = 0
        self.scheduler.commit(plan, seqs)
        return events + self._take_results(plan, seqs, result)

    def _schedule(self) -> StepPlan | None:
        if self._faults is None:
            return self.scheduler.schedule()
        return self._faults.schedule(self._steps + 1, self.scheduler)

    def _run(self, plan: StepPlan, seqs: list[Sequence]) -> StepResult:
        if self._faults is None:
            return self.runner.step(plan)
        faults = self._faults
        faults.before_run(self._steps, seqs)
        sampling = [seq for seq, samples in zip(seqs, plan.samples, strict=True) if samples]
        return self.runner.step(plan, lambda logits, slots: faults.spoil_logits(logits, sampling))

    def _sync_slots(self) -> None:
        """Tells the runner which slots have been left and which were taken."""
        self._forget_released_slots()
        for seq in self.scheduler.admitted:
            sampling = seq.request.sampling
            if seq.index == 0 and seq.num_preemptions == 0:
                self._prompt_tokens += len(seq.request.prompt_ids)
            self.runner.sampler.add(
                slot=seq.slot,
                sampling=sampling,
                seed=seq.seed,
                prompt_ids=seq.request.prompt_ids,
                output_ids=seq.token_ids[seq.num_prompt :],
                eos_token_ids=self.limits.eos_token_ids,
                choice=seq.index,
            )
            if seq.wants_prompt_logprobs:
                prompt_ids = np.array(seq.request.prompt_ids, np.int32)
                self.runner.score_prompt(seq.slot, PromptScores(prompt_ids, sampling.prompt_logprobs or 0))
        self.scheduler.admitted.clear()

    def _forget_released_slots(self) -> None:
        for slot in self.scheduler.released_slots:
            self.runner.release(slot)
        self.scheduler.released_slots.clear()

    def _take_results(self, plan: StepPlan, seqs: list[Sequence], result: StepResult) -> list[TokenEvent]:
        events: list[TokenEvent] = []
        if result.prompt_logprobs:
            for seq in seqs:
                if seq.slot in result.prompt_logprobs:
                    assert seq.prompt_logprobs is not None
                    seq.prompt_logprobs += result.prompt_logprobs[seq.slot]
        sampling = [seq for seq, samples in zip(seqs, plan.samples.tolist(), strict=True) if samples]
        rows = zip(sampling, result.token_ids, result.logprobs, strict=True)
        for row, (seq, token_id, logprob) in enumerate(rows):
            if row in result.errors:
                self._bad_rows += 1
                events += self._finish(seq, "error", result.errors[row], discard=True)
                continue
            seq.token_ids.append(token_id)
            self._generated_tokens += 1
            finish: FinishReason | None = None
            if token_id in seq.stop_ids:
                finish = "stop"
            elif len(seq.token_ids) >= seq.max_len:
                finish = "length"
            event = TokenEvent(
                seq.request.request_id,
                seq.index,
                (token_id,),
                None if logprob is None else (logprob,),
                finish,
                seq.stop_ids[token_id] if finish == "stop" else None,
                seq.num_cached_tokens,
            )
            if not seq.reported:
                seq.reported = True
                event.prompt_logprobs = None if seq.prompt_logprobs is None else tuple(seq.prompt_logprobs)
                seq.prompt_logprobs = None  # a long prompt's take megabytes
            events.append(event)
            if finish is not None:
                self._end(seq)
        self._forget_released_slots()
        return events

    def _finish(
        self, seq: Sequence, reason: FinishReason, error: str | None = None, discard: bool = False
    ) -> list[TokenEvent]:
        """Ends a sequence without a new token."""
        self._end(seq, discard)
        request_id = seq.request.request_id
        return [TokenEvent(request_id, seq.index, finish_reason=reason, error=error)]

    def _end(self, seq: Sequence, discard: bool = False) -> None:
        self.scheduler.remove(seq, discard)
        self._forget_released_slots()
        siblings = self._live[seq.request.request_id]
        siblings.remove(seq)
        if not siblings:
            del self._live[seq.request.request_id]

    def _on_failed_step(self, seqs: list[Sequence], error: Exception) -> list[TokenEvent]:
        """A step that raised: one sequence alone is at fault; of several, each is tried alone."""
        self._failed_steps += 1
        self._failed_in_a_row += 1
        logger.error("a step with %d sequences failed", len(seqs), exc_info=error)
        if self._failed_in_a_row >= MAX_FAILED_STEPS:
            raise EngineDeadError(f"{MAX_FAILED_STEPS} steps in a row failed, the last with {error!r}") from error
        if len(seqs) == 1:
            return self._finish(seqs[0], "error", "the engine failed while computing this request", discard=True)
        for seq in reversed(seqs):
            seq.suspect = True
            self.scheduler.preempt(seq)
        self._forget_released_slots()
        return []

    def stats(self) -> EngineStats:
        scheduler, blocks = self.scheduler, self.scheduler.blocks
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_blocks=blocks.num_blocks,
            num_blocks_used=blocks.num_blocks - blocks.num_free,
            num_blocks_cached=blocks.num_cached,
            prefix_queried_tokens=blocks.num_queried_tokens,
            prefix_hit_tokens=blocks.num_hit_tokens,
            preemptions=scheduler.num_preemptions,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            bad_rows=self._bad_rows,
            failed_steps=self._failed_steps,
            steps=self._steps,
            step_seconds=self._step_seconds,
        )


def drain(engine: Engine) -> Iterable[TokenEvent]:
    """Steps until nothing is left to do, giving events as they come."""
    while engine.has_work:
        yield from engine.step()
