"""Run under mpirun by test_pipeline_ranks: four stages with a step each, requests that are aborted, one rank beside."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from conformance.golden_models import rand_model
from engine.api import GenerationRequest, SamplingParams, TokenEvent
from engine.build import build_engine
from engine.comm.failure import Followed
from engine.comm.ranks import Ranks
from engine.config import EngineConfig
from engine.loop import Engine, drain

NUM_STAGES = 4
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "num_threads": 1,
    "block_size": 4,
    "num_gpu_blocks_override": 60,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 24,
    "max_model_len": 96,
}


def requests() -> list[GenerationRequest]:
    """Greedy and drawn, with penalties and logprobs, prompts of one chunk and of several; one with a stop id."""
    rng = np.random.default_rng(4)
    found = []
    for i in range(12):
        params: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True, "seed": i, "logprobs": 0 if i % 2 else None}
        params |= {"temperature": 0.0} if i % 3 else {"temperature": 0.8, "frequency_penalty": 0.3}
        params |= {"prompt_logprobs": 0} if i % 4 == 0 else {}
        ids = tuple(rng.integers(3, 1000, 3 + 7 * (i % 6)).tolist())
        found.append(GenerationRequest(str(i), ids, SamplingParams(**params)))
    return found


def run(engine: Engine, gone: dict[int, str]) -> dict[str, tuple[list[int], list[float], str | None]]:
    """Ids, logprobs (of prompts too) and how it ended, by request. gone: which are aborted after how many steps."""
    for one in requests():
        engine.add(one)
    answers: dict[str, tuple[list[int], list[float], str | None]] = {
        one.request_id: ([], [], None) for one in requests()
    }
    steps, most = 0, 0
    while engine.has_work:
        if steps in gone:
            engine.abort(gone[steps])
            answers.pop(gone[steps])
        steps += 1
        for event in engine.step():
            _take(answers, event)
        most = max(most, len(engine._in_flight))
    assert engine.num_requests == 0
    assert engine.scheduler.blocks.num_free == engine.scheduler.blocks.num_blocks
    assert most == (NUM_STAGES - 1 if engine._num_stages > 1 else 0), f"{most} steps were on their way"
    return answers


def _take(answers: dict[str, tuple[list[int], list[float], str | None]], event: TokenEvent) -> None:
    ids, logprobs, reason = answers[event.request_id]  # who is gone gets no event
    assert reason is None
    ids += event.token_ids
    logprobs += [entry.logprob for entry in event.prompt_logprobs or () if entry is not None]
    logprobs += [entry.logprob for entry in event.logprobs or ()]
    answers[event.request_id] = ids, logprobs, event.finish_reason


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = rand_model(Path(scratch), num_hidden_layers=NUM_STAGES)
        config = EngineConfig(model=str(folder), **SETTINGS)
        staged = EngineConfig(model=str(folder), pipeline_parallel_size=NUM_STAGES, **SETTINGS)
        try:
            built = build_engine(staged, progress=False)
        except Followed as end:
            if end.code:
                raise
            return
        gone = {9: "2", 14: "7", 23: "0"}
        found = run(built.engine, gone)
        again = run(built.engine, {})
        built.close()
        alone = run(build_engine(config, progress=False, ranks=Ranks()).engine, {})
    for name, (ids, logprobs, reason) in alone.items():
        for other in (found.get(name), again[name]):
            if other is not None:
                assert (other[0], other[2]) == (ids, reason), f"request {name}: {other[0]}, alone {ids}"
                np.testing.assert_allclose(other[1], logprobs, atol=1e-4)
    assert set(alone) - set(found) == set(gone.values())
    for _ in drain(built.engine):
        raise AssertionError("nothing is left")
    sys.stdout.write("ok\n")


if __name__ == "__main__":
    main()
