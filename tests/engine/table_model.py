"""A model that is a table: the logits after token t are row t of it, so a run of many steps is cheap and exact."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.api import SamplingParams
from engine.cpu import sampling as ops
from engine.sampler import Sampler, SampleResult

VOCAB = 200
EOS = 2
INF = np.inf
TABLE = (np.random.default_rng(0).normal(size=(VOCAB, VOCAB)) * 3).astype(np.float32)
GREEDY = SamplingParams(temperature=0.0)


def new_sampler(num_slots: int = 16) -> Sampler:
    return Sampler(VOCAB, num_slots, ops)


def step(sampler: Sampler, last_ids: Sequence[int], slots: Sequence[int]) -> SampleResult:
    return sampler.sample(TABLE[list(last_ids)], np.array(slots, dtype=np.int32))


def run(sampling: SamplingParams, prompt: Sequence[int] = (5, 6), num_steps: int = 24, **add: Any) -> list[int]:
    """The output of one sequence alone in a sampler."""
    sampler = new_sampler()
    sampler.add(3, sampling, add.pop("seed", 1), prompt, (), [EOS], **add)
    output: list[int] = []
    for _ in range(num_steps):
        output.append(int(step(sampler, [(*prompt, *output)[-1]], [3]).token_ids[0]))
    return output


def run_one_step(samplings: Sequence[SamplingParams], logits: np.ndarray, prompt: Sequence[int] = (5,)) -> SampleResult:
    """Row i of logits with samplings[i], in slot i with seed i."""
    sampler = Sampler(logits.shape[1], len(samplings), ops)
    for slot, sampling in enumerate(samplings):
        sampler.add(slot, sampling, slot, prompt, (), [EOS])
    return sampler.sample(logits.copy(), np.arange(len(samplings), dtype=np.int32))
