"""What a step costs besides the model and the sampler: schedule, plan → batch, appending ids, stop checks, blocks."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import numpy as np

from engine.api import GenerationRequest, SamplingParams
from engine.batch import StepPlan, build_batch
from engine.blocks import BlockManager
from engine.config import RopeConfig
from engine.loop import Engine, Limits
from engine.runner import StepResult
from engine.scheduler import Scheduler
from engine.stats import EngineStats

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
