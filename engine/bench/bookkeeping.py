"""What a step costs besides the model and the sampler: schedule, plan → batch, appending ids, stop checks, blocks."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import numpy as np

from engine.admission import Limits
from engine.api import GenerationRequest, SamplingParams
from engine.batch import StepPlan, build_batch
from engine.blocks import BlockManager
from engine.loop import Engine
from engine.runner import StepResult
from engine.scheduler import Scheduler

VOCAB_SIZE = 1000
BLOCK_SIZE = 16


class _NoSampler:
    def add(self, **_: object) -> None: ...


class _NoRope:
    def rope_len(self, num_prompt: int) -> int:
        return 0


class _NoModel:
    """A runner that makes the batch and gives ids without computing anything."""

    def __init__(self) -> None:
        self.sampler = _NoSampler()
        self.rope = _NoRope()

    def release(self, slot: int) -> None: ...

    def step(self, plan: StepPlan) -> StepResult:
        batch = build_batch(plan, BLOCK_SIZE, np.zeros((plan.num_tokens, 2), np.float32))
        token_ids = ((batch.token_ids + 1) % VOCAB_SIZE).tolist()[: int(plan.samples.sum())]
        return StepResult(token_ids, [None] * len(token_ids), {}, {})


@dataclass(frozen=True, slots=True)
class Result:
    """Milliseconds a step."""

    num_seqs: int
    median_ms: float
    p95_ms: float
    min_ms: float


def measure(num_seqs: int = 256, context: int = 512, num_steps: int = 300) -> Result:
    """Times decode steps of num_seqs sequences that hold `context` prompt tokens each, prefix cache on."""
    blocks = BlockManager(num_seqs * (context + num_steps + 2 * BLOCK_SIZE) // BLOCK_SIZE, BLOCK_SIZE)
    scheduler = Scheduler(blocks, num_seqs, 8192, context + num_steps + 2)
    limits = Limits(VOCAB_SIZE, context + num_steps + 2, 20, num_seqs, (VOCAB_SIZE - 1,))
    engine = Engine(scheduler, _NoModel(), limits)  # type: ignore[arg-type]
    sampling = SamplingParams(temperature=0, max_tokens=num_steps + 1, ignore_eos=True)
    for number in range(num_seqs):
        prompt = ((np.arange(context) * (number + 3)) % VOCAB_SIZE).tolist()
        engine.add(GenerationRequest(str(number), tuple(prompt), sampling))
    while len(scheduler.running) < num_seqs or scheduler.running[-1].num_remaining > 1:
        engine.step()
    times: list[float] = []
    while engine.has_work and len(times) < num_steps:
        started = time.perf_counter()
        engine.step()
        times.append((time.perf_counter() - started) * 1e3)
    ordered = sorted(times)
    return Result(num_seqs, statistics.median(ordered), ordered[int(0.95 * len(ordered))], ordered[0])
