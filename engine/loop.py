"""The engine: requests in, token events out, one step after another.

Joins scheduler and runner. Knows nothing of text, processes or HTTP; LLM calls it directly, serve feeds it from
the front end's process.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from engine.admission import Limits, check_request, make_sequences
from engine.api import FinishReason, GenerationRequest, TokenEvent
from engine.batch import StepPlan
from engine.errors import CapacityError, EngineDeadError, RequestError
from engine.faults import Faults
from engine.in_flight import InFlight, forget_unknown
from engine.runner import ModelRunner, StepResult
from engine.sampler import needs_tokens
from engine.scheduler import Scheduler
from engine.sequence import Sequence, SequenceState, token_event
from engine.slots import release_slots, sync_slots
from engine.stats import EngineStats

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 8  # in a row; then the engine itself is at fault, not a request


class Engine:
    """One model being served.

    add, abort and step are called from one thread. Every request that add accepts ends with exactly one event
    with a finish_reason for each of its choices, unless it is aborted, which ends it without one.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        limits: Limits,
        seed: int = 0,
        faults: Faults | None = None,
        overlap: bool = False,
        late_allocations: Callable[[], int] = lambda: 0,
        num_stages: int = 1,
        num_ranks: int = 1,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.limits = limits
        self._faults = faults
        self._overlap = overlap
        self._num_stages, self._num_ranks = num_stages, num_ranks
        self._late_allocations = late_allocations
        self._in_flight: deque[InFlight] = deque()  # the oldest first
        self._num_informed = 0  # live sequences whose next step needs their tokens on the host
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
        return self.scheduler.has_work or bool(self._in_flight)

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
        check_request(request, self.limits, self.scheduler.blocks, self.scheduler.max_num_batched_tokens)

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
        drawn = int(self._random.integers(2**63)) if request.sampling.seed is None else 0
        seqs = make_sequences(request, self.limits, self.runner.rope, drawn)
        self._live[request.request_id] = seqs
        self._num_informed += len(seqs) * needs_tokens(request.sampling)
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
        overlaps = self._may_overlap()
        if self._in_flight and not overlaps:
            return self._collect()  # what comes next must know everything
        plan = self._schedule()
        self._prompt_tokens += sync_slots(self.scheduler, self.runner, self.limits.eos_token_ids)
        if plan is None:
            return self._collect() + self._end_exhausted()
        self._steps += 1
        seqs = self.scheduler.planned(plan)
        if overlaps:
            return self._launch(plan, seqs) + self._end_exhausted()
        events = self._end_exhausted()
        try:
            result = self._run(plan, seqs)
        except Exception as error:  # whatever a step raises must not end the requests that are not at fault
            return events + self._on_failed_step(seqs, error)
        self._failed_in_a_row = 0
        self.scheduler.commit(plan, seqs)
        return events + self._take_results(plan, seqs, result, None)

    def _may_overlap(self) -> bool:
        """Whether a step may be launched before the one before it is known.

        Its rows then decode from tokens that only the device knows, so no row may need them on the host: for
        penalties, logprobs, or to find out which of several sequences made a step fail. With several stages no step
        names a token that is not known.
        """
        if self._num_stages > 1:
            return self._faults is None
        quiet = self._faults is None and self._num_informed == 0
        return self._overlap and quiet and not (self._failed_steps and any(seq.suspect for seq in self._sequences()))

    def _launch(self, plan: StepPlan, seqs: list[Sequence]) -> list[TokenEvent]:
        """Starts a step, then takes what the oldest gave, while the others are computed: one a stage, or one."""
        try:
            started = self.runner.start(plan)
        except Exception as error:
            events = self._collect()
            return events + self._on_failed_step([seq for seq in seqs if seq.state is SequenceState.RUNNING], error)
        self._in_flight.append(InFlight.of(plan, seqs, started, self.scheduler.blocks.mark))
        if self._num_stages > 1:  # its tokens are known
            self.scheduler.launched(plan)
            self.scheduler.commit(plan, seqs)
            return self._collect() if len(self._in_flight) == self._num_stages else []
        events = self._collect() if len(self._in_flight) > 1 else []
        self.scheduler.commit(plan, seqs)
        return events

    def _collect(self) -> list[TokenEvent]:
        """What the oldest step in flight gives, if there is one."""
        return self._land(self._in_flight.popleft()) if self._in_flight else []

    def _land(self, flight: InFlight) -> list[TokenEvent]:
        """Waits for a step that was launched earlier."""
        try:
            result = self.runner.finish(flight.started)
        except Exception as error:  # steps behind it read what it should have written
            self._in_flight.clear()
            self.scheduler.blocks.forget_since(flight.mark)
            forget_unknown(self._sequences())
            return self._on_failed_step(list(self.scheduler.running), error)
        self._failed_in_a_row = 0
        if self._num_stages > 1:
            self.scheduler.landed(flight.plan)
        return self._take_results(flight.plan, flight.seqs, result, flight.positions)

    def _sequences(self) -> Iterator[Sequence]:
        return (seq for seqs in self._live.values() for seq in seqs)

    def _end_exhausted(self) -> list[TokenEvent]:
        """Ends sequences that have filled the pool alone, unless their last token has ended them."""
        exhausted = [seq for seq in self.scheduler.exhausted if seq.state is not SequenceState.FINISHED]
        self.scheduler.exhausted.clear()
        return [event for seq in exhausted for event in self._finish(seq, "length")]

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

    def _take_results(
        self, plan: StepPlan, seqs: list[Sequence], result: StepResult, positions: list[int] | None
    ) -> list[TokenEvent]:
        """positions: where in its sequence the token of each row that samples belongs; None: at the end."""
        events: list[TokenEvent] = []
        if result.prompt_logprobs:
            for slot, seq in zip(plan.slots.tolist(), seqs, strict=True):
                if slot in result.prompt_logprobs and seq.slot in (slot, -1):  # or it was preempted, and began again
                    assert seq.prompt_logprobs is not None
                    seq.prompt_logprobs += result.prompt_logprobs[slot]
        sampling = [seq for seq, samples in zip(seqs, plan.samples.tolist(), strict=True) if samples]
        rows = zip(sampling, result.token_ids, result.logprobs, strict=True)
        for row, (seq, token_id, logprob) in enumerate(rows):
            if seq.state is SequenceState.FINISHED:  # while the step was under way
                continue
            if row in result.errors:
                self._bad_rows += 1
                events += self._finish(seq, "error", result.errors[row], discard=True)
                continue
            if positions is None:
                seq.token_ids.append(token_id)
            else:
                seq.token_ids[positions[row]] = token_id
            self._generated_tokens += 1
            event = token_event(seq, token_id, logprob)
            events.append(event)
            if event.finish_reason is not None:
                self._end(seq)
        release_slots(self.scheduler, self.runner)
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
        release_slots(self.scheduler, self.runner)
        self._num_informed -= needs_tokens(seq.request.sampling)
        siblings = self._live[seq.request.request_id]
        siblings.remove(seq)
        if not siblings:
            del self._live[seq.request.request_id]

    def _on_failed_step(self, seqs: list[Sequence], error: Exception) -> list[TokenEvent]:
        """A step that raised: one sequence alone is at fault; of several, each is tried alone."""
        self._failed_steps += 1
        self._failed_in_a_row += 1
        logger.error("a step with %d sequences failed", len(seqs), exc_info=error)
        if self._num_ranks > 1:
            raise EngineDeadError(f"a step that other ranks compute too failed with {error!r}") from error
        if self._failed_in_a_row >= MAX_FAILED_STEPS:
            raise EngineDeadError(f"{MAX_FAILED_STEPS} steps in a row failed, the last with {error!r}") from error
        self.scheduler.swap.drop(list(self.scheduler.waiting))  # nobody knows whether theirs was copied
        if len(seqs) == 1:
            return self._finish(seqs[0], "error", "the engine failed while computing this request", discard=True)
        for seq in reversed(seqs):
            seq.suspect = True
            self.scheduler.preempt(seq)
        release_slots(self.scheduler, self.runner)
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
            late_allocations=self._late_allocations(),
            steps=self._steps,
            step_seconds=self._step_seconds,
        )


def drain(engine: Engine) -> Iterable[TokenEvent]:
    """Steps until nothing is left to do, giving events as they come."""
    while engine.has_work:
        yield from engine.step()
