"""Steps that are launched before the one before is known give what steps one after another give."""

import random
from pathlib import Path

import pytest

from conformance.golden_models import rand_model
from engine.api import GenerationRequest, SamplingParams, TokenEvent
from engine.errors import RequestError
from engine.loop import Engine, drain
from tests.engine.engines import Outputs, assert_idle, finish, run, tiny_engine
from tests.engine.fake_runner import VOCAB, expected_output, fake_engine, fake_request, row_counts


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


@pytest.mark.parametrize("num_steps", range(1, 9))
@pytest.mark.parametrize("goes", ["", "a", "b"])
def test_what_a_lost_step_should_have_written_is_found_by_nobody(num_steps: int, goes: str) -> None:
    """A step that fails after it was launched: its blocks, and those of the step behind it, were registered already.

    Also those of a request that is aborted meanwhile, which another with the same prompt would take.
    """
    engine, runner = fake_engine(num_blocks=60, block_size=2, max_num_batched_tokens=8, overlap=True)
    asked = {name: fake_request(name, 9, max_tokens=8, first=ord(name)) for name in ("a", "b")}
    for one in asked.values():
        engine.add(one)
    events = [event for _ in range(num_steps) for event in engine.step()]
    if goes:
        engine.abort(goes)
    runner.lose_next = True
    asked["again"] = fake_request("again", 9, max_tokens=8, first=ord(goes or "a"))
    engine.add(asked["again"])
    events += list(drain(engine))
    assert not runner.lose_next
    assert engine.stats().failed_steps == 1, "nobody reads what was not written"
    assert_idle(engine)
    for (name, _), (ids, reason) in outputs(events).items():
        if name != goes and reason != "error":  # one that ran alone
            assert ids == expected_output(asked[name])


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
        found = outputs(list(drain(engine)))
        assert engine.stats().failed_steps == 0, "a step that fails is computed again, and nobody sees it"
        return found

    assert run(overlap=True) == run(overlap=False)


# ---- hard cases while steps overlap


def test_sch_01_a_request_that_fills_the_pool_and_one_that_never_fits() -> None:
    """SCH-01: the pool's tokens − prompt + 1 come out, then "length"; short ones behind it are served."""
    engine, runner = fake_engine(
        num_blocks=8, block_size=16, max_model_len=4096, max_num_batched_tokens=64, overlap=True
    )
    with pytest.raises(RequestError, match="200 tokens, but the KV cache holds 128"):
        engine.add(fake_request("too long", 200, max_tokens=1))
    big = fake_request("big", 120, max_tokens=1000, ignore_eos=True)
    small = [fake_request(str(i), 5, first=1 + i) for i in range(5)]
    outputs = run(engine, big, *small)
    assert outputs["big"].token_ids == expected_output(big, num_output=128 - 120 + 1)
    assert outputs["big"].finish_reason == "length"
    assert all(outputs[one.request_id].token_ids == expected_output(one) for one in small)
    assert runner.num_unknown > 0


@pytest.mark.parametrize("num_steps", range(9))
def test_sch_02_aborts_at_every_moment(num_steps: int) -> None:
    """SCH-02: waiting, just admitted, in a chunk, and with a step in flight whose token nobody wants any more."""
    engine, _ = fake_engine(num_blocks=40, max_num_seqs=2, max_num_batched_tokens=4, overlap=True)
    for i in range(16):
        engine.add(fake_request(str(i), 10, first=i, max_tokens=3, n=1 + i % 2))
    for _ in range(num_steps):
        engine.step()
    for i in range(16):
        engine.abort(str(i))
        engine.abort(str(i))
        engine.scheduler.blocks.audit(engine.scheduler.running)
    engine.abort("nobody")
    assert list(drain(engine)) == []
    assert_idle(engine)
    one = fake_request("later", 10)
    assert run(engine, one)["later"].token_ids == expected_output(one)


def test_sch_03_eight_requests_that_need_twice_the_pool() -> None:
    """SCH-03: also those that are preempted with a token that is not known yet."""
    engine, runner = fake_engine(num_blocks=32, block_size=4, max_num_seqs=8, max_model_len=128, overlap=True)
    requests = [fake_request(str(i), 4, first=i, max_tokens=28) for i in range(8)]
    outputs = run(engine, *requests)
    assert engine.stats().preemptions > 0
    assert runner.num_unknown > 0
    for one in requests:
        assert outputs[one.request_id].token_ids == expected_output(one)
        assert outputs[one.request_id].num_events == 28
    assert (engine.stats().prompt_tokens, engine.stats().generated_tokens) == (8 * 4, 8 * 28)


@pytest.mark.parametrize("chunk", [1, 3, 16])
def test_sch_04_chunk_borders(chunk: int) -> None:
    """SCH-04: prompts around multiples of the chunk beside running decodes; the runner checks every position it reads.

    A prompt is read whole steps ahead of what is known.
    """
    engine, runner = fake_engine(
        num_blocks=80, block_size=4, max_num_seqs=min(chunk, 6), max_num_batched_tokens=chunk, overlap=True
    )
    lengths = [n for n in (chunk - 1, chunk, chunk + 1, 2 * chunk, 2 * chunk + 1, 3 * chunk - 1) if n > 0]
    requests = [fake_request(f"{i}", n, first=i, max_tokens=7) for i, n in enumerate(lengths)]
    outputs = run(engine, *requests)
    for one in requests:
        assert outputs[one.request_id].token_ids == expected_output(one)
    assert max(sum(row_counts(plan)) for plan in runner.plans) <= chunk


def test_sch_05_an_id_is_free_again_while_its_step_is_in_flight() -> None:
    """SCH-05: the old request's late token does not go to the new one."""
    engine, _ = fake_engine(num_blocks=40, overlap=True)
    one, other = fake_request("same", 5, max_tokens=9), fake_request("same", 6, first=9)
    engine.add(one)
    engine.step()
    engine.step()
    engine.abort("same")
    engine.add(other)
    assert finish(engine)["same"].token_ids == expected_output(other)


@pytest.mark.parametrize("length", [3, 4, 5, 8, 32])
def test_pfx_01_the_same_prompt_again_and_twice_at_once(length: int) -> None:
    """PFX-01, PFX-04: lengths around multiples of a block; a token is always computed."""
    engine, _ = fake_engine(num_blocks=80, max_num_batched_tokens=40, overlap=True)
    expected = expected_output(fake_request("x", length, max_tokens=6))
    for number in range(3):
        output = run(engine, fake_request(str(number), length, max_tokens=6))[str(number)]
        assert output.token_ids == expected
        assert output.num_cached_tokens == (0 if number == 0 else (length - 1) // 4 * 4)
    twins = run(engine, *(fake_request(name, length, max_tokens=6) for name in "abcd"))
    assert all(output.token_ids == expected for output in twins.values())


@pytest.mark.parametrize("how", ["abort", "fail"])
def test_pfx_05_a_prefill_that_is_dropped_half_way_leaves_nothing_wrong(how: str) -> None:
    """PFX-05: while one of its chunks is in flight; blocks of a step that failed are nobody's prefix."""
    engine, runner = fake_engine(num_blocks=24, max_num_batched_tokens=6, max_model_len=90, overlap=True)
    for number in range(24):
        victim = fake_request(f"victim {number}", 48, max_tokens=1)
        engine.add(victim)
        outputs = Outputs()
        for _ in range(number % 8):
            outputs.take(engine.step())
        if how == "abort":
            engine.abort(victim.request_id)
        else:
            runner.fail_next = True
            outputs.take(engine.step())
            runner.fail_next = False
        filler = fake_request(f"filler {number}", 40, first=1 + number, max_tokens=1)
        engine.add(filler)
        finish(engine, outputs)
        again = fake_request(f"again {number}", 48, max_tokens=3)
        assert run(engine, again)[again.request_id].token_ids == expected_output(again)
        assert outputs[filler.request_id].token_ids == expected_output(filler)
