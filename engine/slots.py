"""Tells the runner what the scheduler did with slots: which sequences have left theirs, and which have taken one."""

from __future__ import annotations

from collections.abc import Sequence as Ids

import numpy as np

from engine.runner import ModelRunner, PromptScores
from engine.scheduler import Scheduler


def sync_slots(scheduler: Scheduler, runner: ModelRunner, eos_token_ids: Ids[int]) -> int:
    """Releases, then takes; the number of prompt tokens of requests that start."""
    release_slots(scheduler, runner)
    num_prompt_tokens = 0
    for seq in scheduler.admitted:
        sampling = seq.request.sampling
        if seq.index == 0 and seq.num_preemptions == 0:
            num_prompt_tokens += len(seq.request.prompt_ids)
        runner.sampler.add(
            slot=seq.slot,
            sampling=sampling,
            seed=seq.seed,
            prompt_ids=seq.request.prompt_ids,
            output_ids=seq.token_ids[seq.num_prompt :],
            eos_token_ids=eos_token_ids,
            choice=seq.index,
        )
        if seq.wants_prompt_logprobs:
            prompt_ids = np.array(seq.request.prompt_ids, np.int32)
            runner.score_prompt(seq.slot, PromptScores(prompt_ids, sampling.prompt_logprobs or 0))
    scheduler.admitted.clear()
    return num_prompt_tokens


def release_slots(scheduler: Scheduler, runner: ModelRunner) -> None:
    """Has the runner forget the slots that were left."""
    for slot in scheduler.released_slots:
        runner.release(slot)
    scheduler.released_slots.clear()
