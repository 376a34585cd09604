"""Tiny engines for tests, and what they gave: a real model of a few kilobytes, real scheduler, cache and sampler."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.api import GenerationRequest, SamplingParams, TokenEvent, TokenLogprob
from engine.build import build_engine
from engine.config import EngineConfig
from engine.faults import Faults
from engine.loop import Engine

TOLERANCE = 1e-4  # of float32 logprobs between two shapes of the same computation
MAX_STEPS = 20_000  # far above what any test here needs: an engine that hangs fails instead

SMALL = {
    "block_size": 4,
    "num_gpu_blocks_override": 64,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "max_model_len": 160,
    "num_threads": 1,
}


def tiny_engine(folder: Path, faults: Faults | None = None, **settings: Any) -> Engine:
    """An engine over the checkpoint in folder; settings are fields of EngineConfig, small unless given."""
    return build_engine(EngineConfig(model=str(folder), **(SMALL | settings)), faults, progress=False).engine


def request(request_id: str, prompt_ids: Sequence[int], cache_salt: str | None = None, **sampling: Any) -> Any:
    """A request that is greedy, goes on to its max_tokens and reports the two best logprobs, unless told otherwise."""
    params = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, "logprobs": 2} | sampling
    return GenerationRequest(request_id, tuple(prompt_ids), SamplingParams(**params), cache_salt)


@dataclass
class Output:
    """All events of one choice, joined; the first event's own fields are kept once."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    num_events: int = 0
    finish_reason: str | None = None
    stop_reason: int | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprob | None] | None = None
    error: str | None = None

    def take(self, event: TokenEvent) -> None:
        assert self.finish_reason is None, "an event after the last one"
        if self.num_events == 0:
            self.num_cached_tokens = event.num_cached_tokens
            if event.prompt_logprobs is not None:
                self.prompt_logprobs = list(event.prompt_logprobs)
        else:
            assert event.prompt_logprobs is None, "prompt logprobs come once"
        self.num_events += 1
        self.token_ids += event.token_ids
        self.logprobs += event.logprobs or ()
        self.finish_reason, self.stop_reason, self.error = event.finish_reason, event.stop_reason, event.error


class Outputs(dict[str, Output]):
    """Outputs by request id; choices other than the first are "id/index"."""

    def take(self, events: Iterable[TokenEvent]) -> None:
        for event in events:
            name = event.request_id if event.index == 0 else f"{event.request_id}/{event.index}"
            self.setdefault(name, Output()).take(event)


def finish(engine: Engine, outputs: Outputs | None = None) -> Outputs:
    """Steps until nothing is left to do; the books must balance after every step, and nothing may stay behind."""
    outputs = Outputs() if outputs is None else outputs
    for _ in range(MAX_STEPS):
        if not engine.has_work:
            assert_idle(engine)
            return outputs
        outputs.take(engine.step())
        engine.scheduler.blocks.audit(engine.scheduler.running)
    raise AssertionError(f"{engine.stats()}: work is left after {MAX_STEPS} steps")


def run(engine: Engine, *requests: GenerationRequest) -> Outputs:
    """All requests at once, to their end."""
    for one in requests:
        engine.add(one)
    return finish(engine)


def assert_idle(engine: Engine) -> None:
    """Nothing runs, waits or owns a block; blocks kept for reuse are free."""
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_blocks_used, engine.num_requests) == (0, 0, 0, 0)
    engine.scheduler.blocks.audit([])


def assert_equal(undisturbed: Output, other: Output, tolerance: float = TOLERANCE) -> None:
    """Two runs of one greedy request in different shapes: logprobs within the tolerance, and the same ids up to the
    first place where the undisturbed run's two best are closer than that. Needs logprobs=2 or more.
    """
    assert undisturbed.finish_reason == other.finish_reason
    for place, (ours, theirs) in enumerate(zip(undisturbed.logprobs, other.logprobs, strict=True)):
        (_, best), (_, second) = ours.top[:2]
        if best - second < tolerance:
            return
        assert theirs.token_id == ours.token_id, f"another token at {place}"
        assert abs(theirs.logprob - ours.logprob) <= tolerance, f"another logprob at {place}"
        for (_, mine), (_, yours) in zip(ours.top, theirs.top, strict=True):
            assert abs(mine - yours) <= tolerance, f"another best logprob at {place}"
    assert other.token_ids == undisturbed.token_ids


def assert_same_draws(undisturbed: Output, other: Output, tolerance: float = TOLERANCE) -> None:
    """Two runs of one seeded request: the same draws give the same ids, with logprobs within the tolerance."""
    assert (other.token_ids, other.finish_reason) == (undisturbed.token_ids, undisturbed.finish_reason)
    for ours, theirs in zip(undisturbed.logprobs, other.logprobs, strict=True):
        assert abs(theirs.logprob - ours.logprob) <= tolerance


def assert_prompt_logprobs(
    expected: Sequence[TokenLogprob | None], found: Sequence[TokenLogprob | None], tolerance: float = TOLERANCE
) -> None:
    """Complete, in order, None first, and the same numbers."""
    assert len(found) == len(expected)
    assert found[0] is None
    for ours, theirs in zip(expected[1:], found[1:], strict=True):
        assert ours is not None
        assert theirs is not None
        assert theirs.token_id == ours.token_id
        assert abs(theirs.logprob - ours.logprob) <= tolerance
        for (_, mine), (_, yours) in zip(ours.top, theirs.top, strict=True):
            assert abs(mine - yours) <= tolerance
