"""Run under mpirun by test_rank_engines: engines over four ranks, with requests that are aborted, and one rank beside.

Four stages with a step each; then four ranks of one stage, whose steps are launched before what the last one sampled
is known.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from conformance.golden_models import rand_model
from engine.api import GenerationRequest, SamplingParams, TokenEvent
from engine.backends import cpu
from engine.backends.backend import Place
from engine.backends.cpu import CpuBackend
from engine.build import build_engine
from engine.comm.failure import Followed
from engine.comm.mpi_ranks import MpiRanks
from engine.comm.ranks import Ranks
from engine.config import EngineConfig
from engine.loop import Engine

Answer = tuple[list[int], list[float], str | None]  # ids, logprobs (of the prompt too), how it ended

NUM_RANKS = 4
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "num_threads": 1,
    "block_size": 4,
    "num_gpu_blocks_override": 60,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 24,
    "max_model_len": 96,
}


def requests(quiet: bool) -> list[GenerationRequest]:
    """Prompts of one chunk and of several; unless quiet some are drawn, with penalties, or with logprobs."""
    rng = np.random.default_rng(4)
    found = []
    for i in range(12):
        params: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True, "seed": i, "temperature": 0.0}
        if not quiet:
            params |= {"temperature": 0.8} if i % 3 == 0 else {}
            params |= {"logprobs": 0} if i % 2 else {"frequency_penalty": 0.3}
            params |= {"prompt_logprobs": 0} if i % 4 == 0 else {}
        ids = tuple(rng.integers(3, 1000, 3 + 7 * (i % 6)).tolist())
        found.append(GenerationRequest(str(i), ids, SamplingParams(**params)))
    return found


def run(engine: Engine, quiet: bool, gone: dict[int, str], most_in_flight: int = 0) -> dict[str, Answer]:
    """By request. gone: which are aborted after how many steps."""
    answers: dict[str, Answer] = {}
    for one in requests(quiet):
        engine.add(one)
        answers[one.request_id] = [], [], None
    steps, most = 0, 0
    while engine.has_work:
        if steps in gone:
            engine.abort(gone[steps])
            answers.pop(gone[steps])
        steps += 1
        for event in engine.step():
            _take(answers, event)
        most = max(most, len(engine._in_flight))
    assert (engine.num_requests, engine.stats().failed_steps) == (0, 0)
    assert engine.scheduler.blocks.num_free == engine.scheduler.blocks.num_blocks
    assert most == most_in_flight, f"{most} steps were on their way"
    return answers


def _take(answers: dict[str, Answer], event: TokenEvent) -> None:
    ids, logprobs, reason = answers[event.request_id]  # who is gone gets no event
    assert reason is None
    ids += event.token_ids
    logprobs += [entry.logprob for entry in event.prompt_logprobs or () if entry is not None]
    logprobs += [entry.logprob for entry in event.logprobs or ()]
    answers[event.request_id] = ids, logprobs, event.finish_reason


def compare(folder: Path, quiet: bool, most_in_flight: int, **split: int) -> None:
    """Twice over all ranks, with aborts and without, then on one. Ranks but rank 0 follow."""
    try:
        built = build_engine(EngineConfig(model=str(folder), **SETTINGS, **split), progress=False)
    except Followed as end:
        if end.code:
            raise
        return
    gone = {9: "2", 14: "7", 23: "0"}
    found = run(built.engine, quiet, gone, most_in_flight)
    again = run(built.engine, quiet, {}, most_in_flight)
    built.close()
    one = build_engine(EngineConfig(model=str(folder), **SETTINGS), progress=False, ranks=Ranks()).engine
    one._overlap = False
    alone = run(one, quiet, {})
    for name, (ids, logprobs, reason) in alone.items():
        for other in (found.get(name), again[name]):
            if other is not None:
                assert (other[0], other[2]) == (ids, reason), f"request {name}: {other[0]}, alone {ids}"
                np.testing.assert_allclose(other[1], logprobs, atol=1e-4)
    assert set(alone) - set(found) == set(gone.values())


def overlapping(config: EngineConfig, place: Place) -> CpuBackend:
    """Of a CPU that launches steps before it knows what the one before gave."""
    backend = CpuBackend(config, place)
    backend.overlaps = True
    return backend


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = rand_model(Path(scratch), num_hidden_layers=NUM_RANKS)
        compare(folder, False, NUM_RANKS - 1, pipeline_parallel_size=NUM_RANKS, tensor_parallel_size=1)
        MpiRanks.shares_ids = True
        cpu.CpuBackend = overlapping  # type: ignore[misc,assignment]
        compare(folder, True, 1, tensor_parallel_size=NUM_RANKS, pipeline_parallel_size=1)
    sys.stdout.write("ok\n")


if __name__ == "__main__":
    main()
