"""engine.scheduler in stories: what a step holds, and what happens when blocks run out.

The real loop and block manager over FakeRunner, which checks every plan and read.
"""

import pytest

from engine.errors import RequestError
from tests.engine.engines import Outputs, finish, run
from tests.engine.fake_runner import expected_output, fake_engine, fake_request, row_counts

# ---- what a step holds


def test_a_long_prompt_is_read_in_chunks_and_only_the_last_samples() -> None:
    engine, runner = fake_engine(max_num_batched_tokens=8)
    one = fake_request("a", 20, max_tokens=2)
    assert run(engine, one)["a"].token_ids == expected_output(one)
    assert [row_counts(plan) for plan in runner.plans] == [[8], [8], [4], [1]]
    assert [plan.samples.tolist() for plan in runner.plans] == [[False], [False], [True], [True]]
    assert [plan.num_logits.tolist() for plan in runner.plans] == [[0], [0], [1], [1]]
    assert [plan.starts.tolist() for plan in runner.plans] == [[0], [8], [16], [20]]
    assert [plan.num_decodes for plan in runner.plans] == [0, 0, 0, 1]


def test_decodes_go_first_and_prefills_of_several_prompts_share_what_is_left() -> None:
    engine, runner = fake_engine(num_blocks=40, max_num_batched_tokens=10)
    requests = [fake_request("a", 3, first=0), fake_request("b", 6, first=1), fake_request("c", 12, first=2)]
    outputs = run(engine, *requests)
    assert row_counts(runner.plans[0]) == [3, 6, 1], "three prompts in one step, the last one cut"
    assert row_counts(runner.plans[1]) == [1, 1, 8], "two decodes, and the next chunk within the budget"
    assert runner.plans[1].num_decodes == 2
    assert row_counts(runner.plans[2]) == [1, 1, 3]
    assert row_counts(runner.plans[3]) == [1, 1, 1]
    for one in requests:
        assert outputs[one.request_id].token_ids == expected_output(one)


def test_prefills_go_on_in_order_of_admission() -> None:
    engine, runner = fake_engine(num_blocks=40, max_num_batched_tokens=8)
    run(engine, fake_request("a", 12, first=0, max_tokens=1), fake_request("b", 12, first=1, max_tokens=1))
    assert [row_counts(plan) for plan in runner.plans] == [[8], [4, 4], [8]]


def test_a_prompt_whose_last_chunk_is_one_token_decodes_it() -> None:
    engine, runner = fake_engine(max_num_batched_tokens=4)
    one = fake_request("a", 5, max_tokens=1)
    assert run(engine, one)["a"].token_ids == expected_output(one)
    assert [plan.num_decodes for plan in runner.plans] == [0, 1]


def test_no_more_sequences_run_than_there_are_slots() -> None:
    engine, runner = fake_engine(max_num_seqs=2)
    run(engine, *[fake_request(str(i), 2, first=i) for i in range(5)])
    assert max(plan.num_seqs for plan in runner.plans) == 2
    assert {slot for plan in runner.plans for slot in plan.slots.tolist()} == {0, 1}


def test_max_tokens_context_and_stop_ids_end_a_choice() -> None:
    engine, _ = fake_engine(max_model_len=10, eos_token_ids=(7,))
    free = fake_request("a", 6, max_tokens=None)
    text = expected_output(free, num_output=4)
    outputs = run(engine, free, fake_request("b", 6, max_tokens=None, stop_token_ids=(text[1],)))
    assert (outputs["a"].token_ids, outputs["a"].finish_reason) == (text, "length")
    assert (outputs["b"].token_ids, outputs["b"].finish_reason) == (text[:2], "stop")
    assert outputs["b"].stop_reason == text[1]


def test_the_models_own_end_has_no_stop_reason_and_ignore_eos_goes_past_it() -> None:
    one = fake_request("a", 6, max_tokens=3)
    text = expected_output(one)
    engine, _ = fake_engine(eos_token_ids=(text[1],))
    outputs = run(engine, one, fake_request("b", 6, max_tokens=3, ignore_eos=True))
    assert (outputs["a"].token_ids, outputs["a"].finish_reason, outputs["a"].stop_reason) == (text[:2], "stop", None)
    assert (outputs["b"].token_ids, outputs["b"].finish_reason) == (text, "length")


# ---- blocks run out


def test_when_blocks_run_out_the_youngest_waits_and_is_computed_again() -> None:
    """SCH-03: what it had is kept, nothing comes twice, and though it has output it is not taken for a decode."""
    engine, runner = fake_engine(num_blocks=6, block_size=2, enable_prefix_caching=False)
    old, young = fake_request("old", 3, first=0, max_tokens=6), fake_request("young", 3, first=1, max_tokens=6)
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
    again = next(plan for plan in runner.plans if row_counts(plan)[-1] == 3 + num_output)
    assert (again.starts[-1], again.num_decodes) == (0, len(row_counts(again)) - 1)
    for one in (old, young):
        assert outputs[one.request_id].token_ids == expected_output(one)
        assert outputs[one.request_id].num_events == 6


def test_what_is_preempted_goes_before_what_has_not_run_yet() -> None:
    engine, _ = fake_engine(num_blocks=9, block_size=2, enable_prefix_caching=False, max_num_seqs=2)
    for number in range(4):
        engine.add(fake_request(str(number), 3, first=number, max_tokens=12))
    while engine.stats().preemptions == 0:
        engine.step()
    waiting = [seq.request.request_id for seq in engine.scheduler.waiting]
    assert waiting[0] == "1"
    engine.scheduler.preempt(engine.scheduler.running[0])
    assert [seq.request.request_id for seq in engine.scheduler.waiting] == ["0", *waiting]


def test_a_preempted_sequence_finds_its_own_blocks_in_the_prefix_cache() -> None:
    engine, runner = fake_engine(num_blocks=20)
    one = fake_request("a", 9, max_tokens=4)
    engine.add(one)
    outputs = Outputs()
    outputs.take(engine.step())
    engine.scheduler.preempt(engine.scheduler.running[0])
    finish(engine, outputs)
    assert runner.plans[1].starts.tolist() == [8]
    assert outputs["a"].token_ids == expected_output(one)
    assert outputs["a"].num_cached_tokens == 0, "its own blocks are no cached prompt"


def test_sch_01_a_request_alone_ends_with_length_when_the_pool_is_full() -> None:
    """SCH-01: POOL of 8 blocks of 16, context 4096. Pool tokens - prompt + 1 tokens come out, then "length"."""
    engine, _ = fake_engine(num_blocks=8, block_size=16, max_model_len=4096, max_num_batched_tokens=64)
    too_long = fake_request("too long", 200, max_tokens=1)
    with pytest.raises(RequestError, match=r"200 tokens, but the KV cache holds 128") as error:
        engine.add(too_long)
    assert (error.value.param, error.value.code) == ("prompt", "context_length_exceeded")
    big = fake_request("big", 120, max_tokens=1000, ignore_eos=True)
    small = [fake_request(str(i), 5, first=1 + i) for i in range(5)]
    outputs = run(engine, big, *small)
    assert outputs["big"].finish_reason == "length"
    assert outputs["big"].token_ids == expected_output(big, num_output=128 - 120 + 1)
    for one in small:
        assert outputs[one.request_id].token_ids == expected_output(one)
        assert outputs[one.request_id].finish_reason == "length"


@pytest.mark.parametrize("num_prompt", [127, 128])
def test_a_prompt_that_fills_the_pool_gets_its_first_token(num_prompt: int) -> None:
    engine, _ = fake_engine(num_blocks=8, block_size=16, max_model_len=4096)
    one = fake_request("a", num_prompt, max_tokens=1000)
    output = run(engine, one)["a"]
    assert output.token_ids == expected_output(one, num_output=129 - num_prompt)
    assert output.finish_reason == "length"


def test_sch_03_eight_requests_that_need_twice_the_pool() -> None:
    """SCH-03: every output is as it would be alone, each token comes once, and preemption did happen."""
    engine, _ = fake_engine(num_blocks=32, block_size=4, max_num_seqs=8, max_model_len=128)
    requests = [fake_request(str(i), 4, first=i, max_tokens=28) for i in range(8)]
    outputs = run(engine, *requests)
    assert engine.stats().preemptions > 0
    for one in requests:
        assert outputs[one.request_id].token_ids == expected_output(one)
        assert outputs[one.request_id].num_events == 28
    assert engine.stats().prompt_tokens == 8 * 4, "what is computed again counts once"
    assert engine.stats().generated_tokens == 8 * 28


def test_planned_gives_the_rows_in_order() -> None:
    engine, _ = fake_engine(num_blocks=40)
    for i in range(3):
        engine.add(fake_request(str(i), 4, first=i))
    engine.step()
    plan = engine.scheduler.schedule()
    assert plan is not None
    assert [seq.slot for seq in engine.scheduler.planned(plan)] == plan.slots.tolist()


def test_an_empty_scheduler_plans_nothing() -> None:
    engine, _ = fake_engine()
    assert engine.scheduler.schedule() is None
    assert engine.step() == []
    assert not engine.has_work
