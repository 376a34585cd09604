"""Scheduler, block manager and loop under random traffic, over a runner that knows what every KV slot stands for.

Arrivals of all shapes, aborts, preemptions, failing steps and refused blocks in any order, on pools that are far too
small. FakeRunner checks each plan and each read, Traffic the books and what the clients see.
"""

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from tests.engine.traffic import HASHES, VOCAB, Traffic

pytestmark = pytest.mark.usefixtures("quiet_loop")

REQUEST: dict[str, Any] = {
    "base": st.integers(0, 1),
    "num_prompt": st.integers(1, 31),
    "changed_at": st.none() | st.integers(0, 30),
    "salt": st.sampled_from([None, "a", "b"]),
    "n": st.integers(1, 3),
    "max_tokens": st.none() | st.integers(1, 12),
    "stop_token_ids": st.just(()) | st.tuples(st.integers(0, VOCAB - 1)),
    "prompt_logprobs": st.sampled_from([None, 0]),
}
LIMITS: dict[str, Any] = {
    "num_blocks": st.integers(1, 12),
    "block_size": st.integers(1, 4),
    "max_model_len": st.integers(4, 32),
    "hash_name": st.sampled_from(sorted(HASHES)),
    "max_num_seqs": st.integers(1, 6),
    "more_budget": st.integers(0, 10),
    "enable_prefix_caching": st.booleans(),
    "rope_limit": st.sampled_from([5, 1000]),
    "num_swap_places": st.integers(0, 12),
}


class Clients(RuleBasedStateMachine):
    """Few events, in the order that hypothesis likes; what fails is shrunk to a story."""

    traffic: Traffic | None = None

    @initialize(**LIMITS)
    def start(self, max_num_seqs: int, more_budget: int, **limits: Any) -> None:
        budget = max_num_seqs + more_budget
        self.traffic = Traffic(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, **limits)

    @rule(requests=st.lists(st.fixed_dictionaries(REQUEST), min_size=1, max_size=4))
    def arrive(self, requests: list[dict[str, Any]]) -> None:
        for one in requests:
            self.traffic.arrive(**one)

    @rule(times=st.integers(1, 12))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.traffic.step()

    @precondition(lambda self: self.traffic.open_choices)
    @rule(data=st.data(), whole=st.booleans())
    def abort(self, data: st.DataObject, whole: bool) -> None:
        place = data.draw(st.integers(0, len(self.traffic.open_choices) - 1))
        self.traffic.abort(self.traffic.open_choices[place], whole)

    @precondition(lambda self: self.traffic.engine.scheduler.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self.traffic.preempt(data.draw(st.integers(0, len(self.traffic.engine.scheduler.running) - 1)))

    @precondition(lambda self: self.traffic.engine.has_work)
    @rule(kind=st.sampled_from(["fail_a_step", "spoil_a_row", "refuse_blocks"]))
    def disturb(self, kind: str) -> None:
        getattr(self.traffic, kind)()

    def teardown(self) -> None:
        if self.traffic is not None:
            self.traffic.close()


def storm(seed: int, num_events: int) -> Traffic:
    """Many events, close together."""
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
        num_swap_places=rng.choice([0, rng.randint(1, 24)]),
    )
    with_faults = rng.random() < 0.5
    for _ in range(num_events):
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
        elif dice < 0.30 and traffic.open_choices:
            traffic.abort(rng.choice(traffic.open_choices), whole=rng.random() < 0.5)
        elif dice < 0.35 and traffic.engine.scheduler.running:
            traffic.preempt(rng.randrange(len(traffic.engine.scheduler.running)))
        elif dice < 0.40 and with_faults and traffic.engine.has_work:
            getattr(traffic, rng.choice(["fail_a_step", "spoil_a_row", "refuse_blocks"]))()
        else:
            traffic.step()
    traffic.close()
    return traffic


def check_clients(max_examples: int, num_events: int) -> None:
    suppressed = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    limits = settings(
        max_examples=max_examples,
        stateful_step_count=num_events,
        derandomize=True,
        deadline=None,
        suppress_health_check=suppressed,
    )
    run_state_machine_as_test(Clients, settings=limits)


def test_clients_of_all_kinds() -> None:
    check_clients(max_examples=60, num_events=20)


@pytest.mark.slow
def test_many_clients_of_all_kinds() -> None:
    check_clients(max_examples=1500, num_events=50)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_storm(seed: int) -> None:
    storm(seed, num_events=150)


@pytest.mark.slow
@settings(max_examples=1000, derandomize=True, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_long_storm(seed: int) -> None:
    storm(seed, num_events=400)


def test_the_storms_meet_what_they_are_for() -> None:
    """A storm without preemptions, hits, failures and copies to the host would prove nothing."""
    engines = [storm(seed, num_events=200).engine for seed in range(12)]
    found = [engine.stats() for engine in engines]
    assert sum(engine.scheduler.swap.num_swapped_tokens for engine in engines) > 50
    assert sum(stats.preemptions for stats in found) > 60
    assert sum(stats.prefix_hit_tokens for stats in found) > 150
    assert sum(stats.failed_steps for stats in found) > 5
    assert sum(stats.bad_rows for stats in found) > 5
    assert sum(stats.generated_tokens for stats in found) > 1000
