"""engine.loop: what a client may rely on, and who is hurt when a step fails. Over FakeRunner, without a model."""

import logging

import pytest

from engine.api import GenerationRequest, SamplingParams, TokenEvent
from engine.batch import StepPlan
from engine.errors import EngineDeadError, RequestError
from engine.faults import Faults
from engine.loop import MAX_FAILED_STEPS, Engine, drain
from engine.runner import LogitsHook, StepResult
from tests.engine.engines import Outputs, assert_idle, finish, run
from tests.engine.fake_runner import VOCAB, FakeRunner, expected_output, fake_engine, fake_request

pytestmark = pytest.mark.usefixtures("quiet_loop")


# ---- the contract with a client


def test_every_choice_ends_with_exactly_one_finish_reason() -> None:
    engine, _ = fake_engine(num_blocks=40)
    engine.add(fake_request("a", n=3))
    engine.add(fake_request("b", first=1))
    events = list(drain(engine))
    ends = [(event.request_id, event.index) for event in events if event.finish_reason is not None]
    assert sorted(ends) == [("a", 0), ("a", 1), ("a", 2), ("b", 0)]
    assert all(len(event.token_ids) == 1 for event in events)
    assert_idle(engine)


def test_a_bad_request_is_refused_and_leaves_nothing() -> None:
    engine, _ = fake_engine(num_blocks=4, block_size=4, max_model_len=64)
    for wrong, match in (
        (fake_request("a", 0), "empty"),
        (fake_request("a", 17), "17 tokens, but the KV cache holds 16"),
        (fake_request("a", 64), "maximum context length is 64"),
        (GenerationRequest("a", (VOCAB,), SamplingParams()), "token id 50"),
        (fake_request("a", max_tokens=0), "max_tokens"),
    ):
        for check in (engine.add, engine.validate):
            with pytest.raises(RequestError, match=match):
                check(wrong)
    assert_idle(engine)
    assert run(engine, fake_request("a"))["a"].token_ids == expected_output(fake_request("a"))


def test_an_abort_ends_without_an_event_and_spares_the_other_choices() -> None:
    engine, _ = fake_engine(num_blocks=40)
    one = fake_request("a", n=3, max_tokens=6)
    engine.add(one)
    outputs = Outputs()
    for _ in range(3):
        outputs.take(engine.step())
    engine.abort("a", 1)
    num_events = outputs["a/1"].num_events
    finish(engine, outputs)
    assert (outputs["a/1"].num_events, outputs["a/1"].finish_reason) == (num_events, None)
    assert outputs["a"].token_ids == expected_output(one)
    assert outputs["a/2"].token_ids == expected_output(one, 2)


def test_abort_all_tells_each_choice() -> None:
    engine, _ = fake_engine(num_blocks=40, max_num_seqs=2)
    for number in range(4):
        engine.add(fake_request(str(number), first=number, n=2))
    engine.step()
    events = engine.abort_all()
    assert sorted((event.request_id, event.index) for event in events) == [
        (str(i), j) for i in range(4) for j in (0, 1)
    ]
    assert {event.finish_reason for event in events} == {"abort"}
    assert_idle(engine)
    assert engine.abort_all() == []


def test_the_stop_token_is_the_last_one_reported() -> None:
    one = fake_request("a", max_tokens=4)
    text = expected_output(one)
    engine, _ = fake_engine(eos_token_ids=(text[2],))
    engine.add(one)
    events = list(drain(engine))
    assert [event.token_ids[0] for event in events] == text[:3]
    assert [event.finish_reason for event in events] == [None, None, "stop"]


def test_num_cached_tokens_is_in_every_event_and_stays_through_preemption() -> None:
    engine, _ = fake_engine(num_blocks=40)
    run(engine, fake_request("a", 10))
    engine.add(fake_request("b", 10))
    events: list[TokenEvent] = engine.step()
    engine.scheduler.preempt(engine.scheduler.running[0])
    events += list(drain(engine))
    assert [event.num_cached_tokens for event in events] == [8] * 4


def test_stats_count_what_happened() -> None:
    engine, _ = fake_engine(num_blocks=20, max_num_seqs=2)
    for number in range(3):
        engine.add(fake_request(str(number), 6, first=number))
    engine.step()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_blocks, stats.num_blocks_used) == (2, 1, 20, 4)
    assert (stats.prompt_tokens, stats.generated_tokens, stats.steps) == (12, 2, 1)
    finish(engine)
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_blocks_used) == (0, 0, 0)
    assert (stats.prompt_tokens, stats.generated_tokens) == (18, 12)
    assert stats.num_blocks_cached == 3 * 2
    assert stats.prefix_queried_tokens == 18


def test_cached_prompt_tokens_are_prompt_tokens_too() -> None:
    """MET-02: the counter is the sum of usage, which knows nothing of the cache or of choices."""
    engine, _ = fake_engine(num_blocks=40)
    run(engine, fake_request("a", 10))
    run(engine, fake_request("b", 10))
    run(engine, fake_request("c", 10, n=3))
    assert engine.stats().prompt_tokens == 30


# ---- failing steps


def test_only_the_culprit_fails_when_a_step_raises() -> None:
    """Of a step with several sequences each is tried alone; the others go on as if nothing had been."""
    engine, _ = fake_engine(num_blocks=40, faults=Faults(raise_at={"bad": 2}))
    requests = [fake_request(name, first=i, max_tokens=6) for i, name in enumerate(("a", "bad", "b", "c"))]
    outputs = run(engine, *requests)
    for one in requests:
        if one.request_id != "bad":
            assert outputs[one.request_id].token_ids == expected_output(one)
            assert outputs[one.request_id].num_events == 6
    assert (outputs["bad"].finish_reason, outputs["bad"].token_ids) == ("error", expected_output(requests[1])[:2])
    assert outputs["bad"].error == "the engine failed while computing this request"
    assert engine.stats().failed_steps == 2, "once with the others, once alone"


def test_a_step_that_fails_once_hurts_nobody_if_there_are_several() -> None:
    for step in range(1, 8):
        engine, _ = fake_engine(num_blocks=40, max_num_batched_tokens=9, faults=Faults(raise_once_at={step}))
        requests = [fake_request(str(i), first=i, max_tokens=6, n=1 + i % 2) for i in range(3)]
        outputs = run(engine, *requests)
        for one in requests:
            assert outputs[one.request_id].token_ids == expected_output(one)
            assert outputs[one.request_id].finish_reason == "length"


class FailsBehind(FakeRunner):
    """Fails whenever a row of the given prompt goes beyond a position."""

    def __init__(self, inner: FakeRunner, prompt_ids: tuple[int, ...], position: int) -> None:
        self.__dict__ = inner.__dict__
        self.bad_prompt, self.bad_position = list(prompt_ids), position

    def step(self, plan: StepPlan, logits_hook: LogitsHook | None = None) -> StepResult:
        for row, slot in enumerate(plan.slots.tolist()):
            end = int(plan.starts[row] + plan.cu_seqlens_q[row + 1] - plan.cu_seqlens_q[row])
            is_bad = self.sampler.slots[slot].token_ids[: len(self.bad_prompt)] == self.bad_prompt
            if is_bad and end > self.bad_position:
                raise ValueError("too far")
        return super().step(plan, logits_hook)


@pytest.mark.parametrize("caching", [True, False])
def test_a_culprit_that_fails_in_its_second_chunk_is_found_too(caching: bool) -> None:
    """It must survive alone until it has caught up, or the same steps would fail for ever."""
    engine, runner = fake_engine(num_blocks=40, max_num_batched_tokens=8, enable_prefix_caching=caching)
    bad = fake_request("bad", 20, first=9)
    engine.runner = FailsBehind(runner, bad.prompt_ids, 12)  # type: ignore[assignment]
    others = [fake_request(str(i), 4, first=i, max_tokens=12) for i in range(2)]
    outputs = run(engine, *others, bad)
    assert outputs["bad"].finish_reason == "error"
    for one in others:
        assert outputs[one.request_id].token_ids == expected_output(one)


def test_suspects_go_one_by_one_and_newcomers_wait() -> None:
    faults = Faults(raise_once_at={3})
    engine, runner = fake_engine(num_blocks=40, faults=faults)
    for number in range(3):
        engine.add(fake_request(str(number), first=number, max_tokens=8))
    for _ in range(3):
        engine.step()
    engine.add(fake_request("new", first=9))
    num_plans = len(runner.plans)
    outputs = Outputs()
    for _ in range(4):
        outputs.take(engine.step())
    assert [plan.num_seqs for plan in runner.plans[num_plans:]] == [1, 1, 1, 4]
    finish(engine, outputs)
    assert outputs["new"].token_ids == expected_output(fake_request("new", first=9))


def test_blocks_of_a_culprit_are_not_used_again() -> None:
    engine, _ = fake_engine(num_blocks=40, faults=Faults(raise_at={"bad": 1}))
    run(engine, fake_request("bad", 10))
    assert engine.stats().num_blocks_cached == 0
    assert run(engine, fake_request("later", 10))["later"].num_cached_tokens == 0


def test_kvm_03_memory_that_is_missing_once() -> None:
    """KVM-03: the step that lacks memory has written half of its KV; in prefill and in decode at step 20. Several
    requests are tried again one by one and end right, one alone fails; memory comes back, later requests work.
    """
    for failing_step in (1, 20):
        engine, runner = fake_engine(num_blocks=60, block_size=4, max_model_len=64)
        requests = [fake_request(str(i), 9, first=i, max_tokens=24) for i in range(4)]
        for one in requests:
            engine.add(one)
        outputs = Outputs()
        for _ in range(failing_step - 1):
            outputs.take(engine.step())
        runner.fail_next = True
        finish(engine, outputs)
        assert engine.stats().failed_steps == 1
        for one in requests:
            assert outputs[one.request_id].token_ids == expected_output(one)
        runner.fail_next = True
        assert run(engine, fake_request("alone"))["alone"].finish_reason == "error"
        assert run(engine, fake_request("later", 9))["later"].token_ids == expected_output(fake_request("later", 9))


def add_and_step_for_ever(engine: Engine) -> None:
    for number in range(100):
        engine.add(fake_request(f"more {number}", first=number))
        engine.step()


def test_after_so_many_failed_steps_in_a_row_the_engine_is_dead(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "engine.loop")
    engine, _ = fake_engine(num_blocks=40, faults=Faults(raise_once_at=set(range(3, 100))))
    for number in range(3):
        engine.add(fake_request(str(number), first=number, max_tokens=50))
    for _ in range(2):
        engine.step()
    with pytest.raises(EngineDeadError, match=f"{MAX_FAILED_STEPS} steps in a row failed.*step 10") as error:
        add_and_step_for_ever(engine)
    assert error.value.__cause__ is not None
    assert engine.stats().failed_steps == MAX_FAILED_STEPS
    assert "a step with 3 sequences failed" in caplog.text


def test_a_step_that_works_in_between_starts_the_count_anew() -> None:
    failing = {step for step in range(1, 100) if step % 3}
    engine, _ = fake_engine(num_blocks=40, faults=Faults(raise_once_at=failing))
    for number in range(20):
        assert run(engine, fake_request(str(number), max_tokens=1)).keys() == {str(number)}
    assert engine.stats().failed_steps > MAX_FAILED_STEPS


def test_an_exhausted_sequence_is_told_in_the_same_step() -> None:
    engine, _ = fake_engine(num_blocks=2, block_size=4)
    engine.add(fake_request("a", 7, max_tokens=20))
    events: list[TokenEvent] = []
    while engine.has_work:
        events = engine.step()
    assert [(event.finish_reason, event.token_ids) for event in events] == [("length", ())]


def test_an_engine_steps_from_an_empty_queue() -> None:
    engine: Engine = fake_engine()[0]
    assert engine.step() == []
    assert engine.stats().steps == 0
