"""engine.scheduler in stories: the real loop and block manager over FakeRunner, which checks every plan and read."""

from typing import Any

import numpy as np
import pytest

from engine.api import GenerationRequest, SamplingParams
from engine.batch import StepPlan
from engine.blocks import BlockManager
from engine.errors import CapacityError, RequestError
from engine.loop import Engine
from engine.scheduler import MAX_LOOKAHEAD, MAX_OVERTAKEN, Scheduler
from engine.sequence import Sequence, SequenceState
from tests.engine.engines import Outputs, assert_idle, finish, run
from tests.engine.fake_runner import FakeRunner, fake_engine, next_token

VOCAB = 50


def request(request_id: str, num_prompt: int, first: int = 0, salt: str | None = None, **sampling: Any) -> Any:
    """A prompt that begins with token `first`; requests that begin differently share nothing."""
    prompt = tuple((first + 3 * i) % VOCAB for i in range(num_prompt))
    params = {"max_tokens": 4, "seed": 1} | sampling
    return GenerationRequest(request_id, prompt, SamplingParams(**params), salt)


def expected(one: GenerationRequest, index: int = 0, num_output: int | None = None) -> list[int]:
    """What the fake model gives when nothing disturbs it."""
    text = list(one.prompt_ids)
    for _ in range(one.sampling.max_tokens if num_output is None else num_output):
        text.append(next_token(text, one.sampling.seed or 0, index, VOCAB))
    return text[len(one.prompt_ids) :]


def counts(plan: StepPlan) -> list[int]:
    return np.diff(plan.cu_seqlens_q).tolist()


def find(engine: Engine, request_id: str, index: int = 0) -> Sequence:
    sequences = [*engine.scheduler.running, *engine.scheduler.waiting]
    return next(seq for seq in sequences if (seq.request.request_id, seq.index) == (request_id, index))


# ---- what a step holds


def test_a_long_prompt_is_read_in_chunks_and_only_the_last_samples() -> None:
    engine, runner = fake_engine(max_num_batched_tokens=8)
    one = request("a", 20, max_tokens=2)
    assert run(engine, one)["a"].token_ids == expected(one)
    assert [counts(plan) for plan in runner.plans] == [[8], [8], [4], [1]]
    assert [plan.samples.tolist() for plan in runner.plans] == [[False], [False], [True], [True]]
    assert [plan.num_logits.tolist() for plan in runner.plans] == [[0], [0], [1], [1]]
    assert [plan.starts.tolist() for plan in runner.plans] == [[0], [8], [16], [20]]
    assert [plan.num_decodes for plan in runner.plans] == [0, 0, 0, 1]


def test_decodes_go_first_and_prefills_of_several_prompts_share_what_is_left() -> None:
    engine, runner = fake_engine(num_blocks=40, max_num_batched_tokens=10)
    requests = [request("a", 3, first=0), request("b", 6, first=1), request("c", 12, first=2)]
    outputs = run(engine, *requests)
    assert counts(runner.plans[0]) == [3, 6, 1], "three prompts in one step, the last one cut"
    assert counts(runner.plans[1]) == [1, 1, 8], "two decodes, and the next chunk within the budget"
    assert runner.plans[1].num_decodes == 2
    assert counts(runner.plans[2]) == [1, 1, 3]
    assert counts(runner.plans[3]) == [1, 1, 1]
    for one in requests:
        assert outputs[one.request_id].token_ids == expected(one)


def test_prefills_go_on_in_order_of_admission() -> None:
    engine, runner = fake_engine(num_blocks=40, max_num_batched_tokens=8)
    run(engine, request("a", 12, first=0, max_tokens=1), request("b", 12, first=1, max_tokens=1))
    assert [counts(plan) for plan in runner.plans] == [[8], [4, 4], [8]]


def test_a_prompt_whose_last_chunk_is_one_token_decodes_it() -> None:
    engine, runner = fake_engine(max_num_batched_tokens=4)
    one = request("a", 5, max_tokens=1)
    assert run(engine, one)["a"].token_ids == expected(one)
    assert [plan.num_decodes for plan in runner.plans] == [0, 1]


def test_no_more_sequences_run_than_there_are_slots() -> None:
    engine, runner = fake_engine(max_num_seqs=2)
    run(engine, *[request(str(i), 2, first=i) for i in range(5)])
    assert max(plan.num_seqs for plan in runner.plans) == 2
    assert {slot for plan in runner.plans for slot in plan.slots.tolist()} == {0, 1}


def test_max_tokens_context_and_stop_ids_end_a_choice() -> None:
    engine, _ = fake_engine(max_model_len=10, eos_token_ids=(7,))
    free = request("a", 6, max_tokens=None)
    text = expected(free, num_output=4)
    outputs = run(engine, free, request("b", 6, max_tokens=None, stop_token_ids=(text[1],)))
    assert (outputs["a"].token_ids, outputs["a"].finish_reason) == (text, "length")
    assert (outputs["b"].token_ids, outputs["b"].finish_reason) == (text[:2], "stop")
    assert outputs["b"].stop_reason == text[1]


def test_the_models_own_end_has_no_stop_reason_and_ignore_eos_goes_past_it() -> None:
    one = request("a", 6, max_tokens=3)
    text = expected(one)
    engine, _ = fake_engine(eos_token_ids=(text[1],))
    outputs = run(engine, one, request("b", 6, max_tokens=3, ignore_eos=True))
    assert (outputs["a"].token_ids, outputs["a"].finish_reason, outputs["a"].stop_reason) == (text[:2], "stop", None)
    assert (outputs["b"].token_ids, outputs["b"].finish_reason) == (text, "length")


# ---- blocks run out


def test_when_blocks_run_out_the_youngest_waits_and_is_computed_again() -> None:
    """SCH-03: what it had is kept, nothing comes twice, and though it has output it is not taken for a decode."""
    engine, runner = fake_engine(num_blocks=6, block_size=2, enable_prefix_caching=False)
    old, young = request("old", 3, first=0, max_tokens=6), request("young", 3, first=1, max_tokens=6)
    engine.add(old)
    engine.add(young)
    outputs = Outputs()
    while engine.stats().preemptions == 0:
        outputs.take(engine.step())
    assert [seq.request.request_id for seq in engine.scheduler.running] == ["old"]
    waiting = engine.scheduler.waiting[0]
    assert (waiting.request.request_id, waiting.num_computed, waiting.block_ids) == ("young", 0, [])
    num_output = waiting.num_output
    assert num_output > 0
    finish(engine, outputs)
    again = next(plan for plan in runner.plans if counts(plan)[-1] == 3 + num_output)
    assert (again.starts[-1], again.num_decodes) == (0, len(counts(again)) - 1)
    for one in (old, young):
        assert outputs[one.request_id].token_ids == expected(one)
        assert outputs[one.request_id].num_events == 6


def test_what_is_preempted_goes_before_what_has_not_run_yet() -> None:
    engine, _ = fake_engine(num_blocks=9, block_size=2, enable_prefix_caching=False, max_num_seqs=2)
    for number in range(4):
        engine.add(request(str(number), 3, first=number, max_tokens=12))
    while engine.stats().preemptions == 0:
        engine.step()
    waiting = [seq.request.request_id for seq in engine.scheduler.waiting]
    assert waiting[0] == "1"
    engine.scheduler.preempt(engine.scheduler.running[0])
    assert [seq.request.request_id for seq in engine.scheduler.waiting] == ["0", *waiting]


def test_a_preempted_sequence_finds_its_own_blocks_in_the_prefix_cache() -> None:
    engine, runner = fake_engine(num_blocks=20)
    one = request("a", 9, max_tokens=4)
    engine.add(one)
    outputs = Outputs()
    outputs.take(engine.step())
    engine.scheduler.preempt(engine.scheduler.running[0])
    finish(engine, outputs)
    assert runner.plans[1].starts.tolist() == [8]
    assert outputs["a"].token_ids == expected(one)
    assert outputs["a"].num_cached_tokens == 0, "its own blocks are no cached prompt"


def test_sch_01_a_request_alone_ends_with_length_when_the_pool_is_full() -> None:
    """SCH-01: POOL of 8 blocks of 16, context 4096. Pool tokens - prompt + 1 tokens come out, then "length"."""
    engine, _ = fake_engine(num_blocks=8, block_size=16, max_model_len=4096, max_num_batched_tokens=64)
    too_long = request("too long", 200, max_tokens=1)
    with pytest.raises(RequestError, match=r"200 tokens, but the KV cache holds 128") as error:
        engine.add(too_long)
    assert (error.value.param, error.value.code) == ("prompt", "context_length_exceeded")
    big = request("big", 120, max_tokens=1000, ignore_eos=True)
    small = [request(str(i), 5, first=1 + i) for i in range(5)]
    outputs = run(engine, big, *small)
    assert outputs["big"].finish_reason == "length"
    assert outputs["big"].token_ids == expected(big, num_output=128 - 120 + 1)
    for one in small:
        assert outputs[one.request_id].token_ids == expected(one)
        assert outputs[one.request_id].finish_reason == "length"


@pytest.mark.parametrize("num_prompt", [127, 128])
def test_a_prompt_that_fills_the_pool_gets_its_first_token(num_prompt: int) -> None:
    engine, _ = fake_engine(num_blocks=8, block_size=16, max_model_len=4096)
    one = request("a", num_prompt, max_tokens=1000)
    output = run(engine, one)["a"]
    assert output.token_ids == expected(one, num_output=129 - num_prompt)
    assert output.finish_reason == "length"


def test_sch_03_eight_requests_that_need_twice_the_pool() -> None:
    """SCH-03: every output is as it would be alone, each token comes once, and preemption did happen."""
    engine, _ = fake_engine(num_blocks=32, block_size=4, max_num_seqs=8, max_model_len=128)
    requests = [request(str(i), 4, first=i, max_tokens=28) for i in range(8)]
    outputs = run(engine, *requests)
    assert engine.stats().preemptions > 0
    for one in requests:
        assert outputs[one.request_id].token_ids == expected(one)
        assert outputs[one.request_id].num_events == 28
    assert engine.stats().prompt_tokens == 8 * 4, "what is computed again counts once"
    assert engine.stats().generated_tokens == 8 * 28


# ---- who goes first


def test_sch_06_small_requests_start_while_a_big_one_waits() -> None:
    """SCH-06: 90 % of the pool is taken; one needs half of it, then 20 short ones come."""
    engine, _ = fake_engine(num_blocks=40, block_size=4, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=160)
    long_ones = [request(f"long {i}", 66, first=i, max_tokens=20) for i in range(2)]
    for one in long_ones:
        engine.add(one)
    outputs = Outputs()
    for _ in range(3):
        outputs.take(engine.step())
    assert engine.stats().num_blocks_used >= 0.85 * 40
    big = request("big", 80, first=2)
    small = [request(f"small {i}", 3, first=3 + i, max_tokens=2) for i in range(20)]
    for one in [big, *small]:
        engine.add(one)
    while find(engine, "big").state is SequenceState.WAITING:
        outputs.take(engine.step())
    assert sum(outputs[one.request_id].finish_reason is not None for one in small if one.request_id in outputs) >= 10
    finish(engine, outputs)
    for one in [*long_ones, big, *small]:
        assert outputs[one.request_id].token_ids == expected(one)


def test_sch_06_a_big_request_is_overtaken_only_so_often_however_many_small_ones_come() -> None:
    """SCH-06: several start in one step, and still none too many; the big one starts in bounded time."""
    engine, _ = fake_engine(num_blocks=20, block_size=4, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=80)
    engine.add(request("first", 3, max_tokens=70))
    engine.step()
    engine.add(request("big", 70, first=1, max_tokens=2))
    outputs = Outputs()
    for number in range(400):
        for twin in range(5):
            engine.add(request(f"small {number} {twin}", 3, first=2 + twin, max_tokens=1 + (number + twin) % 3))
        outputs.take(engine.step())
        if "big" in outputs:
            break
        assert find(engine, "big").num_overtaken <= MAX_OVERTAKEN
    assert "big" in outputs, "it starved"


def test_a_waiting_suspect_is_overtaken_only_so_often_too() -> None:
    scheduler = Scheduler(BlockManager(100, 4), 8, 400, 400)
    holder, suspect = sequence("holder", 160), sequence("suspect", 300)
    scheduler.add([holder])
    compute(scheduler)
    suspect.suspect = True
    scheduler.add([suspect])
    for number in range(100):
        scheduler.add([sequence(f"small {number}", 3)])
        compute(scheduler)
        for seq in list(scheduler.running):
            if seq is not holder:
                scheduler.remove(seq)
        scheduler.released_slots.clear()
    assert suspect.num_overtaken == MAX_OVERTAKEN
    scheduler.remove(holder)
    compute(scheduler)
    assert suspect.state is SequenceState.RUNNING


def test_only_so_many_waiting_requests_are_tried_in_a_step() -> None:
    engine, _ = fake_engine(num_blocks=20, block_size=4, max_num_seqs=30, max_num_batched_tokens=64, max_model_len=80)
    engine.add(request("first", 8, max_tokens=60))
    engine.step()
    for number in range(MAX_LOOKAHEAD):
        engine.add(request(f"big {number}", 72, first=1, max_tokens=1))
    engine.add(request("small", 3, first=2))
    engine.step()
    assert find(engine, "small").state is SequenceState.WAITING
    engine.abort("big 3")
    engine.step()
    assert find(engine, "small").state is SequenceState.RUNNING


def test_a_prompt_is_admitted_only_with_a_block_to_spare_for_each_running_sequence() -> None:
    engine, _ = fake_engine(num_blocks=4, block_size=4)
    engine.add(request("a", 4, first=0))
    engine.add(request("b", 4, first=1))
    engine.add(request("c", 4, first=2))
    engine.step()
    assert [seq.request.request_id for seq in engine.scheduler.running] == ["a", "b"]
    finish(engine)
    assert engine.stats().preemptions == 0


# ---- the prefix cache, seen from a request


def test_a_second_request_reads_the_prefix_of_the_first() -> None:
    engine, runner = fake_engine()
    first, second = request("a", 11, max_tokens=2), request("b", 11, max_tokens=2)
    assert run(engine, first)["a"].num_cached_tokens == 0
    num_plans = len(runner.plans)
    output = run(engine, second)["b"]
    assert output.num_cached_tokens == 8
    assert (runner.plans[num_plans].starts.tolist(), counts(runner.plans[num_plans])) == ([8], [3])
    assert output.token_ids == expected(second)


@pytest.mark.parametrize("num_prompt", [3, 4, 5, 8, 32])
def test_pfx_01_a_whole_cached_prompt(num_prompt: int) -> None:
    """PFX-01: lengths around multiples of the block size, three times, and two at the same moment."""
    engine, _ = fake_engine(num_blocks=40)
    for name in ("first", "second", "third"):
        one = request(name, num_prompt)
        output = run(engine, one)[name]
        assert output.token_ids == expected(one)
        assert output.num_cached_tokens == (0 if name == "first" else (num_prompt - 1) // 4 * 4)
    twins = [request("twin 1", num_prompt), request("twin 2", num_prompt)]
    outputs = run(engine, *twins)
    assert [outputs[one.request_id].token_ids for one in twins] == [expected(one) for one in twins]


def test_pfx_02_a_shared_prefix_a_budget_of_one_prompt_and_a_pool_that_is_too_small() -> None:
    """PFX-02: 465 tokens a step, prompts of 465 of which 256 are shared, 256 of them at once. FakeRunner checks the
    budget, and every read of a block.
    """
    engine, _ = fake_engine(
        num_blocks=120,
        block_size=16,
        max_num_seqs=64,
        max_num_batched_tokens=465,
        max_model_len=600,
        max_waiting=1000,
    )
    requests = []
    for i in range(256):
        prompt = tuple([3 * k % VOCAB for k in range(256)] + [(i + 7 * k) % VOCAB for k in range(209)])
        requests.append(GenerationRequest(str(i), prompt, SamplingParams(max_tokens=40, seed=i)))
    outputs = run(engine, *requests)
    for one in requests:
        assert outputs[one.request_id].token_ids == expected(one)
    assert engine.stats().preemptions > 0
    assert engine.stats().prefix_hit_tokens >= 200 * 256


def test_pfx_04_twins_that_fill_the_same_prefix_and_strangers_that_reuse_pages() -> None:
    """PFX-04: 16 identical requests on a cold cache, then 200 others while they still decode."""
    engine, _ = fake_engine(num_blocks=100, max_num_seqs=32, max_num_batched_tokens=64, max_model_len=120)
    twins = [request(f"twin {i}", 13, max_tokens=40) for i in range(16)]
    strangers = [request(f"stranger {i}", 5 + i % 9, first=1 + i % 40, max_tokens=1 + i % 5) for i in range(200)]
    for one in twins:
        engine.add(one)
    outputs = Outputs()
    outputs.take(engine.step())
    for one in strangers:
        engine.add(one)
    finish(engine, outputs)
    for one in twins + strangers:
        assert outputs[one.request_id].token_ids == expected(one)


@pytest.mark.parametrize("how", ["abort", "preempt", "fail"])
def test_pfx_05_a_prefill_that_is_dropped_half_way_leaves_nothing_wrong(how: str) -> None:
    """PFX-05: dropped after each of its 8 chunks in turn; then the pool is filled and the prompt comes again."""
    engine, runner = fake_engine(num_blocks=24, max_num_batched_tokens=6, max_model_len=90)
    for number in range(24):
        victim = request(f"victim {number}", 48, max_tokens=1)
        engine.add(victim)
        outputs = Outputs()
        for _ in range(number % 8):
            outputs.take(engine.step())
        if how == "abort":
            engine.abort(victim.request_id)
        elif how == "preempt" and engine.scheduler.running:
            engine.scheduler.preempt(engine.scheduler.running[0])
        elif how == "fail":
            runner.fail_next = engine.has_work
        filler = request(f"filler {number}", 40, first=1 + number, max_tokens=1)
        engine.add(filler)
        finish(engine, outputs)
        again = request(f"again {number}", 48, max_tokens=3)
        assert run(engine, again)[again.request_id].token_ids == expected(again)
        assert outputs[filler.request_id].token_ids == expected(filler)


def test_pfx_06_a_pool_for_three_prompts() -> None:
    """PFX-06: ten prompts, twenty times in changing order, lengths around multiples of the block size."""
    engine, _ = fake_engine(num_blocks=15, max_model_len=60)
    rng = np.random.default_rng(0)
    for round_number in range(20):
        for which in rng.permutation(10).tolist():
            one = request(f"{round_number} {which}", int(rng.integers(15, 18)), first=which, max_tokens=2)
            assert run(engine, one)[one.request_id].token_ids == expected(one)
    assert engine.stats().prefix_hit_tokens > 0
    assert engine.scheduler.blocks.num_free == 15


def test_pfx_07_salts_do_not_share() -> None:
    """PFX-07: the same prompt under another salt finds nothing; under its own it does."""
    engine, _ = fake_engine(num_blocks=40)
    salts = ["s1", "s2", None, "s1", "s2", None]
    found = [run(engine, request(str(i), 9, salt=salt))[str(i)].num_cached_tokens for i, salt in enumerate(salts)]
    assert found == [0, 0, 0, 8, 8, 8]


def test_sequences_with_their_own_rope_table_share_with_their_like_only() -> None:
    engine, _ = fake_engine(num_blocks=60, rope_limit=10)
    lengths = [9, 10, 11, 12, 11, 12, 10]
    found = [run(engine, request(str(i), n))[str(i)].num_cached_tokens for i, n in enumerate(lengths)]
    assert found == [0, 8, 0, 0, 8, 8, 8]


# ---- several choices of one request


def test_choices_wait_for_the_first_and_share_the_blocks_of_the_prompt() -> None:
    engine, runner = fake_engine(num_blocks=40, max_num_seqs=8)
    one = request("a", 10, n=4, max_tokens=5)
    engine.add(one)
    outputs = Outputs()
    outputs.take(engine.step())
    assert runner.plans[0].num_seqs == 1
    outputs.take(engine.step())
    running = engine.scheduler.running
    assert [counts(plan) for plan in runner.plans] == [[10], [1, 2, 2, 2]]
    assert all(seq.block_ids[:2] == running[0].block_ids[:2] for seq in running)
    assert engine.stats().num_blocks_used == 2 + 4
    finish(engine, outputs)
    for index in range(4):
        name = "a" if index == 0 else f"a/{index}"
        assert outputs[name].token_ids == expected(one, index)
        assert outputs[name].num_cached_tokens == (0 if index == 0 else 8)
    assert len({tuple(output.token_ids) for output in outputs.values()}) == 4
    assert engine.stats().prompt_tokens == 10, "usage counts the prompt once"


def test_choices_go_on_when_the_first_is_aborted_or_preempted() -> None:
    for how in ("abort", "preempt"):
        engine, _ = fake_engine(num_blocks=40, max_num_seqs=8, max_num_batched_tokens=8)
        one = request("a", 10, n=3)
        engine.add(one)
        outputs = Outputs()
        outputs.take(engine.step())  # half of the prompt
        if how == "abort":
            engine.abort("a", 0)
        else:
            engine.scheduler.preempt(engine.scheduler.running[0])
        finish(engine, outputs)
        assert [outputs[f"a/{index}"].token_ids for index in (1, 2)] == [expected(one, index) for index in (1, 2)]
        assert ("a" in outputs) == (how == "preempt")


def test_without_a_prefix_cache_choices_wait_for_nobody() -> None:
    engine, runner = fake_engine(num_blocks=40, max_num_batched_tokens=32, enable_prefix_caching=False)
    one = request("a", 10, n=3)
    outputs = run(engine, one)
    assert counts(runner.plans[0]) == [10, 10, 10]
    assert outputs["a/2"].token_ids == expected(one, 2)


# ---- aborts and the queue


def test_sch_02_aborts_at_every_moment() -> None:
    """SCH-02: 64 requests with two running: aborted while waiting, in the step of admission, at the last chunk, at the
    end, twice, and an id that nobody knows.
    """
    for num_steps in range(9):
        engine, _ = fake_engine(num_blocks=40, max_num_seqs=2, max_num_batched_tokens=4)
        for i in range(64):
            engine.add(request(str(i), 10, first=i, max_tokens=3, n=1 + i % 2))
        for _ in range(num_steps):
            engine.step()
        for i in range(64):
            engine.abort(str(i))
            engine.abort(str(i))
            engine.scheduler.blocks.audit(engine.scheduler.running)
        engine.abort("nobody")
        assert engine.step() == []
        assert_idle(engine)
        one = request("later", 10)
        assert run(engine, one)["later"].token_ids == expected(one)


def test_sch_05_an_id_in_use_is_refused_and_free_again_after_an_abort() -> None:
    """SCH-05 at the engine's border; the server makes ids of its own, so a client's header never gets here."""
    engine, _ = fake_engine()
    one, other = request("same", 5), request("same", 6, first=9)
    engine.add(one)
    with pytest.raises(RequestError, match="same is in use"):
        engine.add(other)
    assert finish(engine)["same"].token_ids == expected(one)
    engine.add(one)
    engine.step()
    engine.abort("same")
    engine.add(other)
    assert finish(engine)["same"].token_ids == expected(other)


def test_a_full_queue_refuses_but_an_idle_engine_takes_any_request() -> None:
    engine, _ = fake_engine(max_waiting=4)
    big = request("big", 5, n=6)
    engine.add(big)
    with pytest.raises(CapacityError, match="6 requests are waiting"):
        engine.add(request("late", 5))
    outputs = finish(engine)
    assert len(outputs) == 6
    engine.add(request("late", 5))
    finish(engine)


def sequence(name: str, num_prompt: int) -> Sequence:
    return Sequence(request(name, num_prompt, first=len(name)), index=0, seed=0, max_len=1000, stop_ids={})


def compute(scheduler: Scheduler) -> None:
    """One step whose tokens are all zeros."""
    plan = scheduler.schedule()
    assert plan is not None
    seqs = scheduler.planned(plan)
    scheduler.commit(plan, seqs)
    for seq, samples in zip(seqs, plan.samples.tolist(), strict=True):
        if samples:
            seq.token_ids.append(0)


def test_planned_gives_the_rows_in_order() -> None:
    engine, runner = fake_engine(num_blocks=40)
    for i in range(3):
        engine.add(request(str(i), 4, first=i))
    engine.step()
    plan = engine.scheduler.schedule()
    assert plan is not None
    assert [seq.slot for seq in engine.scheduler.planned(plan)] == plan.slots.tolist()
    assert isinstance(runner, FakeRunner)


def test_an_empty_scheduler_plans_nothing() -> None:
    engine, _ = fake_engine()
    assert engine.scheduler.schedule() is None
    assert engine.step() == []
    assert not engine.has_work
