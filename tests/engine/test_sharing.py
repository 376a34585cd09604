"""engine.scheduler in stories: prompts that share blocks, one after another or as choices of one request.

Over FakeRunner, which knows what every KV slot stands for; under a real model the same cases are in test_prefix_cache.
"""

import numpy as np
import pytest

from engine.api import GenerationRequest, SamplingParams
from tests.engine.engines import Outputs, finish, run
from tests.engine.fake_runner import VOCAB, expected_output, fake_engine, fake_request, row_counts

# ---- the prefix cache, seen from a request


def test_a_second_request_reads_the_prefix_of_the_first() -> None:
    engine, runner = fake_engine()
    first, second = fake_request("a", 11, max_tokens=2), fake_request("b", 11, max_tokens=2)
    assert run(engine, first)["a"].num_cached_tokens == 0
    num_plans = len(runner.plans)
    output = run(engine, second)["b"]
    assert output.num_cached_tokens == 8
    assert (runner.plans[num_plans].starts.tolist(), row_counts(runner.plans[num_plans])) == ([8], [3])
    assert output.token_ids == expected_output(second)


@pytest.mark.parametrize("num_prompt", [3, 4, 5, 8, 32])
def test_pfx_01_a_whole_cached_prompt(num_prompt: int) -> None:
    """PFX-01: lengths around multiples of the block size, three times, and two at the same moment."""
    engine, _ = fake_engine(num_blocks=40)
    for name in ("first", "second", "third"):
        one = fake_request(name, num_prompt)
        output = run(engine, one)[name]
        assert output.token_ids == expected_output(one)
        assert output.num_cached_tokens == (0 if name == "first" else (num_prompt - 1) // 4 * 4)
    twins = [fake_request("twin 1", num_prompt), fake_request("twin 2", num_prompt)]
    outputs = run(engine, *twins)
    assert [outputs[one.request_id].token_ids for one in twins] == [expected_output(one) for one in twins]


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
        assert outputs[one.request_id].token_ids == expected_output(one)
    assert engine.stats().preemptions > 0
    assert engine.stats().prefix_hit_tokens >= 200 * 256


def test_pfx_04_twins_that_fill_the_same_prefix_and_strangers_that_reuse_pages() -> None:
    """PFX-04: 16 identical requests on a cold cache, then 200 others while they still decode."""
    engine, _ = fake_engine(num_blocks=100, max_num_seqs=32, max_num_batched_tokens=64, max_model_len=120)
    twins = [fake_request(f"twin {i}", 13, max_tokens=40) for i in range(16)]
    strangers = [fake_request(f"stranger {i}", 5 + i % 9, first=1 + i % 40, max_tokens=1 + i % 5) for i in range(200)]
    for one in twins:
        engine.add(one)
    outputs = Outputs()
    outputs.take(engine.step())
    for one in strangers:
        engine.add(one)
    finish(engine, outputs)
    for one in twins + strangers:
        assert outputs[one.request_id].token_ids == expected_output(one)


@pytest.mark.parametrize("how", ["abort", "preempt", "fail"])
def test_pfx_05_a_prefill_that_is_dropped_half_way_leaves_nothing_wrong(how: str) -> None:
    """PFX-05: dropped after each of its 8 chunks in turn; then the pool is filled and the prompt comes again."""
    engine, runner = fake_engine(num_blocks=24, max_num_batched_tokens=6, max_model_len=90)
    for number in range(24):
        victim = fake_request(f"victim {number}", 48, max_tokens=1)
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
        filler = fake_request(f"filler {number}", 40, first=1 + number, max_tokens=1)
        engine.add(filler)
        finish(engine, outputs)
        again = fake_request(f"again {number}", 48, max_tokens=3)
        assert run(engine, again)[again.request_id].token_ids == expected_output(again)
        assert outputs[filler.request_id].token_ids == expected_output(filler)


def test_pfx_06_a_pool_for_three_prompts() -> None:
    """PFX-06: ten prompts, twenty times in changing order, lengths around multiples of the block size."""
    engine, _ = fake_engine(num_blocks=15, max_model_len=60)
    rng = np.random.default_rng(0)
    for round_number in range(20):
        for which in rng.permutation(10).tolist():
            one = fake_request(f"{round_number} {which}", int(rng.integers(15, 18)), first=which, max_tokens=2)
            assert run(engine, one)[one.request_id].token_ids == expected_output(one)
    assert engine.stats().prefix_hit_tokens > 0
    assert engine.scheduler.blocks.num_free == 15


def test_pfx_07_salts_do_not_share() -> None:
    """PFX-07: the same prompt under another salt finds nothing; under its own it does."""
    engine, _ = fake_engine(num_blocks=40)
    salts = ["s1", "s2", None, "s1", "s2", None]
    found = [run(engine, fake_request(str(i), 9, salt=salt))[str(i)].num_cached_tokens for i, salt in enumerate(salts)]
    assert found == [0, 0, 0, 8, 8, 8]


def test_sequences_with_their_own_rope_table_share_with_their_like_only() -> None:
    engine, _ = fake_engine(num_blocks=60, rope_limit=10)
    lengths = [9, 10, 11, 12, 11, 12, 10]
    found = [run(engine, fake_request(str(i), n))[str(i)].num_cached_tokens for i, n in enumerate(lengths)]
    assert found == [0, 8, 0, 0, 8, 8, 8]


# ---- several choices of one request


def test_choices_wait_for_the_first_and_share_the_blocks_of_the_prompt() -> None:
    engine, runner = fake_engine(num_blocks=40, max_num_seqs=8)
    one = fake_request("a", 10, n=4, max_tokens=5)
    engine.add(one)
    outputs = Outputs()
    outputs.take(engine.step())
    assert runner.plans[0].num_seqs == 1
    outputs.take(engine.step())
    running = engine.scheduler.running
    assert [row_counts(plan) for plan in runner.plans] == [[10], [1, 2, 2, 2]]
    assert all(seq.block_ids[:2] == running[0].block_ids[:2] for seq in running)
    assert engine.stats().num_blocks_used == 2 + 4
    finish(engine, outputs)
    for index in range(4):
        name = "a" if index == 0 else f"a/{index}"
        assert outputs[name].token_ids == expected_output(one, index)
        assert outputs[name].num_cached_tokens == (0 if index == 0 else 8)
    assert len({tuple(output.token_ids) for output in outputs.values()}) == 4
    assert engine.stats().prompt_tokens == 10, "usage counts the prompt once"


def test_choices_go_on_when_the_first_is_aborted_or_preempted() -> None:
    for how in ("abort", "preempt"):
        engine, _ = fake_engine(num_blocks=40, max_num_seqs=8, max_num_batched_tokens=8)
        one = fake_request("a", 10, n=3)
        engine.add(one)
        outputs = Outputs()
        outputs.take(engine.step())  # half of the prompt
        if how == "abort":
            engine.abort("a", 0)
        else:
            engine.scheduler.preempt(engine.scheduler.running[0])
        finish(engine, outputs)
        assert [outputs[f"a/{index}"].token_ids for index in (1, 2)] == [
            expected_output(one, index) for index in (1, 2)
        ]
        assert ("a" in outputs) == (how == "preempt")


def test_without_a_prefix_cache_choices_wait_for_nobody() -> None:
    engine, runner = fake_engine(num_blocks=40, max_num_batched_tokens=32, enable_prefix_caching=False)
    one = fake_request("a", 10, n=3)
    outputs = run(engine, one)
    assert row_counts(runner.plans[0]) == [10, 10, 10]
    assert outputs["a/2"].token_ids == expected_output(one, 2)
