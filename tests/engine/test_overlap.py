"""Steps that are launched before the one before is known give what steps one after another give."""

import random
from pathlib import Path

import pytest

from conformance.golden_models import rand_model
from engine.api import GenerationRequest, SamplingParams, TokenEvent
from engine.loop import Engine, drain
from tests.engine.engines import tiny_engine
from tests.engine.fake_runner import VOCAB, expected_output, fake_engine, fake_request


def outputs(events: list[TokenEvent]) -> dict[tuple[str, int], tuple[list[int], str | None]]:
    """Token ids and finish reason of each choice."""
    found: dict[tuple[str, int], tuple[list[int], str | None]] = {}
    for event in events:
        ids, reason = found.get((event.request_id, event.index), ([], None))
        assert reason is None, "an event after the last one"
        found[event.request_id, event.index] = (ids + list(event.token_ids), event.finish_reason)
    return found


def expected(one: GenerationRequest, index: int, max_model_len: int) -> tuple[list[int], str]:
    """The whole output of a choice, cut at its first stop id or at the context limit."""
    room = min(one.sampling.max_tokens or 0, max_model_len - len(one.prompt_ids))
    ids = expected_output(one, index, room)
    for end, token_id in enumerate(ids):
        if token_id in one.sampling.stop_token_ids:
            return ids[: end + 1], "stop"
    return ids, "length"


@pytest.mark.parametrize("seed", range(40))
def test_random_traffic(seed: int) -> None:
    """Arrivals, aborts, stop ids, choices, a small pool: each output is exactly that of an undisturbed run."""
    rng = random.Random(seed)
    engine, runner = fake_engine(
        num_blocks=rng.choice([14, 20, 60]),
        block_size=rng.choice([1, 3, 4]) if seed % 3 else 4,
        max_num_seqs=rng.randint(1, 6),
        max_num_batched_tokens=rng.randint(6, 24),
        max_model_len=12,
        overlap=True,
    )
    asked: dict[str, GenerationRequest] = {}
    events: list[TokenEvent] = []
    while len(asked) < 25 or engine.has_work:
        if len(asked) < 25 and rng.random() < 0.4:
            stop = tuple(rng.sample(range(VOCAB), rng.choice([0, 0, 8])))
            one = fake_request(
                str(len(asked)),
                num_prompt=rng.randint(1, 9),
                first=rng.randrange(3),
                max_tokens=rng.randint(1, 9),
                stop_token_ids=stop,
                n=rng.choice([1, 1, 2]),
                seed=rng.randrange(5),
            )
            asked[one.request_id] = one
            engine.add(one)
        if asked and rng.random() < 0.05:
            gone = rng.choice(list(asked))
            engine.abort(gone)
            asked.pop(gone, None)
            events = [event for event in events if event.request_id != gone]
            asked[f"gone {gone}"] = fake_request(f"gone {gone}")
        events += [event for event in engine.step() if event.request_id in asked]
        engine.scheduler.blocks.audit(engine.scheduler.running)
    wanted = {
        (one.request_id, index): expected(one, index, 12)
        for one in asked.values()
        if not one.request_id.startswith("gone")
        for index in range(one.sampling.n)
    }
    assert outputs(events) == wanted
    assert not runner.sampler.slots
    assert engine.num_requests == 0


def test_steps_do_overlap() -> None:
    """While a sequence decodes, every step but the first is launched with a token that nobody knows yet."""
    engine, runner = fake_engine(overlap=True)
    engine.add(fake_request("a", max_tokens=6))
    assert outputs(list(drain(engine)))["a", 0] == (expected_output(fake_request("a", max_tokens=6)), "length")
    assert runner.num_unknown == 5
    assert len(runner.plans) == 6, "no step after the last token, whose place is known"


@pytest.mark.parametrize("sampling", [{"logprobs": 0}, {"presence_penalty": 0.5}, {"prompt_logprobs": 1}])
def test_who_needs_its_tokens_waits_for_them(sampling: dict[str, float]) -> None:
    engine, runner = fake_engine(overlap=True)
    engine.add(fake_request("a", max_tokens=6, **sampling))
    events = list(drain(engine))
    assert len([event for event in events if event.token_ids]) == 6
    assert runner.num_unknown == 0


def test_a_step_that_cannot_be_launched_hurts_only_the_one_at_fault() -> None:
    engine, runner = fake_engine(num_blocks=40, overlap=True)
    for name in ("a", "b"):
        engine.add(fake_request(name, max_tokens=8, first=ord(name)))
    events = engine.step() + engine.step() + engine.step()
    runner.fail_next = True
    events += list(drain(engine))
    assert {key: len(ids) for key, (ids, _) in outputs(events).items()} == {("a", 0): 8, ("b", 0): 8}
    assert engine.stats().failed_steps == 1


def test_a_bad_row_ends_its_request_one_step_late() -> None:
    engine, runner = fake_engine(num_blocks=40, overlap=True)
    for name in ("a", "b"):
        engine.add(fake_request(name, max_tokens=8, first=ord(name)))
    events = engine.step() + engine.step()
    runner.spoil_next = True
    events += list(drain(engine))
    found = outputs(events)
    assert sorted(reason or "" for _, reason in found.values()) == ["error", "length"]


@pytest.mark.parametrize("pool", [64, 14])
def test_a_real_model(pool: int, tmp_path: Path) -> None:
    """Greedy and drawn, alone or preempted: the ids of a run in which every step waits."""
    folder = rand_model(tmp_path / "model", vocab_size=64)
    prompts = [[(7 * i + j) % 64 for j in range(3 + 4 * i)] for i in range(5)]

    def run(overlap: bool) -> dict[tuple[str, int], tuple[list[int], str | None]]:
        engine = tiny_engine(folder, num_gpu_blocks_override=pool, enable_prefix_caching=False)
        engine = Engine(engine.scheduler, engine.runner, engine.limits, 0, None, overlap)
        for i, prompt in enumerate(prompts):
            sampling = SamplingParams(temperature=float(i % 2), max_tokens=12, ignore_eos=True, seed=i)
            engine.add(GenerationRequest(str(i), tuple(prompt), sampling))
        return outputs(list(drain(engine)))

    assert run(overlap=True) == run(overlap=False)
