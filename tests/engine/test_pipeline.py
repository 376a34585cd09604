"""Several steps on their way at once, one a stage: each output is that of an undisturbed run."""

import random
from typing import Any

import pytest

from engine.errors import EngineDeadError
from engine.loop import Engine, drain
from tests.engine.fake_runner import (
    FakeRunner,
    FakeStages,
    expected_output,
    fake_engine,
    fake_request,
    find_sequence,
    row_counts,
)
from tests.engine.test_overlap import outputs
from tests.engine.traffic import HASHES, VOCAB, Traffic

STAGES = (2, 3, 4)


def staged(num_stages: int, **settings: Any) -> tuple[Engine, FakeStages]:
    engine, runner = fake_engine(num_stages=num_stages, **({"num_blocks": 64} | settings))
    assert isinstance(runner, FakeStages)
    return engine, runner


@pytest.mark.parametrize("num_stages", STAGES)
def test_sequences_are_shared_out(num_stages: int) -> None:
    """Each stage has a step, with its share of what decodes."""
    engine, runner = staged(num_stages, max_num_seqs=12, max_num_batched_tokens=100)
    wanted = {}
    for i in range(12):
        one = fake_request(str(i), first=i, max_tokens=9)
        wanted[str(i), 0] = (expected_output(one), "length")
        engine.add(one)
    assert outputs(list(drain(engine))) == wanted
    assert runner.most_on_their_way == num_stages
    decoding = [plan.num_seqs for plan in runner.plans if plan.num_decodes == plan.num_seqs]
    assert decoding == [12 // num_stages] * (8 * num_stages)


def test_chunks_of_one_prompt_follow_each_other() -> None:
    """Nobody waits for a token to read more of a prompt."""
    engine, runner = staged(4, max_num_seqs=1, max_num_batched_tokens=5)
    one = fake_request("a", 20, max_tokens=3)
    engine.add(one)
    for launched in (1, 2, 3):
        assert engine.step() == []
        assert len(runner.on_their_way) == launched
    assert outputs(list(drain(engine)))["a", 0] == (expected_output(one), "length")
    assert [row_counts(plan) for plan in runner.plans] == [[5], [5], [5], [5], [1], [1]]


def test_one_sequence_waits_for_its_tokens() -> None:
    engine, runner = staged(2)
    engine.add(fake_request("a", max_tokens=6, logprobs=0, presence_penalty=0.5))
    assert len(outputs(list(drain(engine)))["a", 0][0]) == 6
    assert (runner.most_on_their_way, len(runner.plans)) == (1, 6)


@pytest.mark.parametrize("num_stages", STAGES)
@pytest.mark.parametrize("seed", range(15))
def test_storm(num_stages: int, seed: int) -> None:
    """All that test_scheduler_invariants has, but failing steps: those end everything (see below)."""
    rng = random.Random(seed)
    max_num_seqs = rng.randint(1, 6)
    traffic = Traffic(
        num_blocks=rng.randint(2, 24),
        block_size=rng.randint(1, 4),
        max_model_len=rng.randint(8, 32),
        hash_name=rng.choice(sorted(HASHES)),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + rng.randint(0, 10),
        enable_prefix_caching=rng.random() < 0.8,
        rope_limit=rng.choice([5, 1000]),
        num_stages=num_stages,
    )
    for _ in range(150):
        dice = rng.random()
        if dice < 0.25:
            traffic.arrive(
                base=rng.randint(0, 1),
                num_prompt=rng.randint(1, 24),
                changed_at=rng.choice([None, rng.randint(0, 24)]),
                salt=rng.choice([None, None, "a"]),
                n=rng.choice([1, 1, 2, 3]),
                max_tokens=rng.choice([None, rng.randint(1, 12)]),
                stop_token_ids=rng.choice([(), (rng.randint(0, VOCAB - 1),)]),
                prompt_logprobs=rng.choice([None, None, 0]),
            )
        elif dice < 0.32 and traffic.open_choices:
            traffic.abort(rng.choice(traffic.open_choices), whole=rng.random() < 0.5)
        elif dice < 0.37 and traffic.engine.scheduler.running:
            traffic.preempt(rng.randrange(len(traffic.engine.scheduler.running)))
        elif dice < 0.40 and traffic.engine.has_work:
            traffic.spoil_a_row()
        else:
            traffic.step()
    traffic.close()


def four_on_their_way() -> tuple[Engine, FakeStages]:
    """Four stages with a step each, which decodes one of four sequences."""
    engine, runner = staged(4, max_num_seqs=5)
    for name in "abcd":
        engine.add(fake_request(name, first=ord(name) % 50, max_tokens=40, ignore_eos=True))
    while len(runner.on_their_way) < 3 or any(plan.num_decodes != 1 for plan in runner.on_their_way):
        engine.step()
    assert [plan.num_seqs for plan in runner.on_their_way] == [1, 1, 1]
    return engine, runner


def test_dst_08_abort_all_with_steps_on_their_way() -> None:
    """DST-08: everything is free after two rounds, nothing more is said, and a new request is served right."""
    engine, runner = four_on_their_way()
    for name in "abcd":
        engine.abort(name)
    assert engine.scheduler.blocks.num_free == 64
    one = fake_request("e", first=7)
    engine.add(one)
    events = [event for _ in range(8) for event in engine.step()]
    assert {event.request_id for event in events} == {"e"}
    events += list(drain(engine))
    assert outputs(events) == {("e", 0): (expected_output(one), "length")}
    assert not runner.on_their_way
    assert not runner.sampler.slots
    assert engine.scheduler.blocks.num_free == 64


def test_dst_08_abort_one_of_four() -> None:
    """DST-08: one whose step is on its way. The others' tokens are right; its blocks are used again by a step behind
    that one, which all stages compute in order."""
    engine, runner = four_on_their_way()
    (slot,) = runner.on_their_way[-1].slots.tolist()
    gone = next(seq for seq in engine.scheduler.running if seq.slot == slot)
    blocks, num_before = set(gone.block_ids), len(runner.plans) + len(runner.on_their_way)
    engine.abort(gone.request.request_id)
    wanted = {
        (name, 0): (expected_output(fake_request(name, first=ord(name) % 50, max_tokens=40)), "length")
        for name in "abcd"
        if name != gone.request.request_id
    }
    engine.add(fake_request("new", 9, first=9, max_tokens=20))
    wanted["new", 0] = (expected_output(fake_request("new", 9, first=9, max_tokens=20)), "length")
    assert runner.on_their_way[-1].slots.tolist() == [slot]
    engine.step()
    assert blocks & set(runner.on_their_way[-1].block_table.ravel().tolist())
    found = outputs([*drain(engine)])
    assert {key: ids[-10:] for key, (ids, _) in found.items()} == {key: ids[-10:] for key, (ids, _) in wanted.items()}
    assert len(runner.plans) > num_before


@pytest.mark.parametrize("num_stages", STAGES)
def test_dst_08_a_stop_id_while_others_are_on_their_way(num_stages: int) -> None:
    """DST-08: no token after the stop, the others go on."""
    engine, _ = staged(num_stages)
    wanted = {}
    for i in range(4):
        one = fake_request(str(i), first=i, max_tokens=12, stop_token_ids=())
        ids = expected_output(one)
        if i == 1:
            one = fake_request(str(i), first=i, max_tokens=12, stop_token_ids=(ids[5],))
            ids = ids[: ids.index(ids[5]) + 1]
        wanted[str(i), 0] = (ids, "stop" if i == 1 else "length")
        engine.add(one)
    assert outputs(list(drain(engine))) == wanted


def test_a_slot_is_not_given_away_under_a_step() -> None:
    """As many sequences as slots: who comes after an abort waits until the step that samples there has landed."""
    engine, runner = staged(2, max_num_seqs=2)
    for name in ("a", "b"):
        engine.add(fake_request(name, first=ord(name) % 50, max_tokens=20))
    for _ in range(5):
        engine.step()
    ((slot,),) = [plan.slots.tolist() for plan in runner.on_their_way]
    busy = next(seq for seq in engine.scheduler.running if seq.slot == slot)
    engine.abort(busy.request.request_id)
    engine.add(fake_request("c", first=4, max_tokens=5))
    engine.step()
    assert find_sequence(engine, "c").slot == -1 or find_sequence(engine, "c").slot != slot
    events = list(drain(engine))
    assert outputs([event for event in events if event.request_id == "c"])["c", 0][0] == expected_output(
        fake_request("c", first=4, max_tokens=5)
    )


def test_a_step_that_fails_ends_the_engine() -> None:
    """Other ranks are in the middle of it: there is no second try."""
    engine, runner = fake_engine(num_blocks=64, num_stages=2, num_ranks=2)
    engine.add(fake_request("a"))
    runner.fail_next = True
    with pytest.raises(EngineDeadError, match="other ranks"):
        list(drain(engine))


def test_stages_that_lose_a_slot_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake stages would see a slot that is given away too early."""
    monkeypatch.setattr("engine.scheduler.Scheduler.launched", lambda self, plan: None)
    monkeypatch.setattr("engine.scheduler.Scheduler.landed", lambda self, plan: None)
    engine, runner = four_on_their_way()
    (slot,) = runner.on_their_way[0].slots.tolist()
    busy = next(seq for seq in engine.scheduler.running if seq.slot == slot)
    with pytest.raises(AssertionError, match="a step on its way needs the slot's state"):
        engine.abort(busy.request.request_id)


def test_unknown_tokens_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that is planned before it is sampled."""
    engine, _ = staged(2, num_ranks=2)
    monkeypatch.setattr(engine.scheduler, "_num_stages", 1)
    engine.add(fake_request("a"))
    with pytest.raises(EngineDeadError, match="cannot know what is sampled here"):
        list(drain(engine))


def test_one_stage_is_the_engine_as_it_was() -> None:
    engine, runner = fake_engine()
    assert type(runner) is FakeRunner
    engine.add(fake_request("a"))
    assert len(outputs(list(drain(engine)))["a", 0][0]) == 4
