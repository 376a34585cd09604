"""engine.scheduler in stories: who is admitted when, who overtakes whom, and who leaves the queue early."""

import numpy as np
import pytest

from engine.blocks import BlockManager
from engine.errors import CapacityError, RequestError
from engine.scheduler import MAX_LOOKAHEAD, MAX_OVERTAKEN, Scheduler
from engine.sequence import Sequence, SequenceState
from tests.engine.engines import Outputs, assert_idle, finish, run
from tests.engine.fake_runner import expected_output, fake_engine, fake_request, find_sequence

# ---- who goes first


def test_sch_06_small_requests_start_while_a_big_one_waits() -> None:
    """SCH-06: 90 % of the pool is taken; one needs half of it, then 20 short ones come."""
    engine, _ = fake_engine(num_blocks=40, block_size=4, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=160)
    long_ones = [fake_request(f"long {i}", 66, first=i, max_tokens=20) for i in range(2)]
    for one in long_ones:
        engine.add(one)
    outputs = Outputs()
    for _ in range(3):
        outputs.take(engine.step())
    assert engine.stats().num_blocks_used >= 0.85 * 40
    big = fake_request("big", 80, first=2)
    small = [fake_request(f"small {i}", 3, first=3 + i, max_tokens=2) for i in range(20)]
    for one in [big, *small]:
        engine.add(one)
    while find_sequence(engine, "big").state is SequenceState.WAITING:
        outputs.take(engine.step())
    assert sum(outputs[one.request_id].finish_reason is not None for one in small if one.request_id in outputs) >= 10
    finish(engine, outputs)
    for one in [*long_ones, big, *small]:
        assert outputs[one.request_id].token_ids == expected_output(one)


def test_sch_06_a_big_request_is_overtaken_only_so_often_however_many_small_ones_come() -> None:
    """SCH-06: seven start in every step, and still none too many; the big one starts in bounded time."""
    engine, _ = fake_engine(num_blocks=60, max_num_seqs=20, max_num_batched_tokens=64, max_model_len=240)
    engine.add(fake_request("first", 20, max_tokens=100))
    engine.step()
    engine.add(fake_request("big", 230, first=1, max_tokens=2))
    outputs = Outputs()
    overtaken = [0]
    for number in range(300):
        for twin in range(7):
            engine.add(fake_request(f"small {number} {twin}", 3, first=2 + twin, max_tokens=1))
        outputs.take(engine.step())
        if "big" in outputs:
            break
        overtaken.append(find_sequence(engine, "big").num_overtaken)
    assert "big" in outputs, "it starved"
    assert max(overtaken) == MAX_OVERTAKEN
    assert max(np.diff(overtaken)) > 1, "several passed it in one step"


def test_a_waiting_suspect_is_overtaken_only_so_often_too() -> None:
    scheduler = Scheduler(BlockManager(100, 4), 8, 400, 400)
    holder, suspect = sequence("holder", 160), sequence("suspect", 300)
    scheduler.add([holder])
    compute(scheduler)
    small_suspect = sequence("another", 3)
    suspect.suspect = small_suspect.suspect = True
    scheduler.add([suspect, small_suspect])
    for number in range(100):
        scheduler.add([sequence(f"small {number}", 3)])
        compute(scheduler)
        for seq in list(scheduler.running):
            if seq is not holder:
                scheduler.remove(seq)
        scheduler.released_slots.clear()
    assert suspect.num_overtaken == MAX_OVERTAKEN
    assert small_suspect.state is SequenceState.WAITING, "it would fit, but not alone"
    scheduler.remove(holder)
    compute(scheduler)
    assert suspect.state is SequenceState.RUNNING


def test_only_so_many_waiting_requests_are_tried_in_a_step() -> None:
    engine, _ = fake_engine(num_blocks=20, block_size=4, max_num_seqs=30, max_num_batched_tokens=64, max_model_len=80)
    engine.add(fake_request("first", 8, max_tokens=60))
    engine.step()
    for number in range(MAX_LOOKAHEAD):
        engine.add(fake_request(f"big {number}", 72, first=1, max_tokens=1))
    engine.add(fake_request("small", 3, first=2))
    engine.step()
    assert find_sequence(engine, "small").state is SequenceState.WAITING
    engine.abort("big 3")
    engine.step()
    assert find_sequence(engine, "small").state is SequenceState.RUNNING


def test_a_prompt_is_admitted_only_with_a_block_to_spare_for_each_running_sequence() -> None:
    engine, _ = fake_engine(num_blocks=4, block_size=4)
    engine.add(fake_request("a", 4, first=0))
    engine.add(fake_request("b", 4, first=1))
    engine.add(fake_request("c", 4, first=2))
    engine.step()
    assert [seq.request.request_id for seq in engine.scheduler.running] == ["a", "b"]
    finish(engine)
    assert engine.stats().preemptions == 0


# ---- aborts and the queue


def test_sch_02_aborts_at_every_moment() -> None:
    """SCH-02: 64 requests with two running: aborted while waiting, in the step of admission, at the last chunk, at the
    end, twice, and an id that nobody knows.
    """
    for num_steps in range(9):
        engine, _ = fake_engine(num_blocks=40, max_num_seqs=2, max_num_batched_tokens=4)
        for i in range(64):
            engine.add(fake_request(str(i), 10, first=i, max_tokens=3, n=1 + i % 2))
        for _ in range(num_steps):
            engine.step()
        for i in range(64):
            engine.abort(str(i))
            engine.abort(str(i))
            engine.scheduler.blocks.audit(engine.scheduler.running)
        engine.abort("nobody")
        assert engine.step() == []
        assert_idle(engine)
        one = fake_request("later", 10)
        assert run(engine, one)["later"].token_ids == expected_output(one)


def test_sch_05_an_id_in_use_is_refused_and_free_again_after_an_abort() -> None:
    """SCH-05 at the engine's border; the server makes ids of its own, so a client's header never gets here."""
    engine, _ = fake_engine()
    one, other = fake_request("same", 5), fake_request("same", 6, first=9)
    engine.add(one)
    with pytest.raises(RequestError, match="same is in use"):
        engine.add(other)
    assert finish(engine)["same"].token_ids == expected_output(one)
    engine.add(one)
    engine.step()
    engine.abort("same")
    engine.add(other)
    assert finish(engine)["same"].token_ids == expected_output(other)


def test_a_full_queue_refuses_but_an_idle_engine_takes_any_request() -> None:
    engine, _ = fake_engine(max_waiting=4)
    big = fake_request("big", 5, n=6)
    engine.add(big)
    with pytest.raises(CapacityError, match="6 requests are waiting"):
        engine.add(fake_request("late", 5))
    outputs = finish(engine)
    assert len(outputs) == 6
    engine.add(fake_request("late", 5))
    finish(engine)


def sequence(name: str, num_prompt: int) -> Sequence:
    return Sequence(fake_request(name, num_prompt, first=len(name)), index=0, seed=0, max_len=1000, stop_ids={})


def compute(scheduler: Scheduler) -> None:
    """One step whose tokens are all zeros."""
    plan = scheduler.schedule()
    assert plan is not None
    seqs = scheduler.planned(plan)
    scheduler.commit(plan, seqs)
    for seq, samples in zip(seqs, plan.samples.tolist(), strict=True):
        if samples:
            seq.token_ids.append(0)
