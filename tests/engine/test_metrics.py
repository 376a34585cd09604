"""engine.metrics: what an operator reads, and that it balances after trouble (MET-02)."""

import pytest

import engine.metrics as metrics_module
from engine.api import GenerationRequest, SamplingParams, TokenEvent
from engine.errors import RequestError
from engine.faults import Faults
from engine.metrics import Metrics
from engine.stats import EngineStats
from tests.engine.fake_runner import fake_engine

pytestmark = pytest.mark.usefixtures("quiet_loop")

REASONS = ("stop", "length", "abort", "error")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The monotonic clock: clock[0] is the time."""
    now = [100.0]
    monkeypatch.setattr(metrics_module.time, "monotonic", lambda: now[0])
    return now


def value(metrics: Metrics, name: str, **labels: str) -> float:
    metrics.text()
    found = metrics.registry.get_sample_value(f"glint:{name}", labels)
    assert found is not None, name
    return found


def finished(metrics: Metrics) -> dict[str, float]:
    return {reason: value(metrics, "request_success_total", finished_reason=reason) for reason in REASONS}


def request(request_id: str, n: int = 1, num_prompt: int = 5, max_tokens: int = 4) -> GenerationRequest:
    first = sum(map(ord, request_id)) % 50
    prompt = tuple((first + 3 * i) % 50 for i in range(num_prompt))
    return GenerationRequest(request_id, prompt, SamplingParams(n=n, max_tokens=max_tokens, seed=1))


def event(request_id: str, *token_ids: int, index: int = 0, finish: str | None = None) -> TokenEvent:
    return TokenEvent(request_id, index, token_ids, finish_reason=finish)  # type: ignore[arg-type]


# ---- latencies


def test_latencies_of_a_choice(clock: list[float]) -> None:
    metrics = Metrics()
    metrics.on_submit(request("a"))
    clock[0] += 2.0  # queueing and prefill count
    metrics.on_event(event("a", 1))
    clock[0] += 0.25
    metrics.on_event(event("a", 2))
    clock[0] += 0.75
    metrics.on_event(event("a", 3, finish="length"))
    assert value(metrics, "time_to_first_token_seconds_count") == 1
    assert value(metrics, "time_to_first_token_seconds_sum") == 2.0
    assert value(metrics, "inter_token_latency_seconds_count") == 2
    assert value(metrics, "inter_token_latency_seconds_sum") == 1.0
    assert value(metrics, "e2e_request_latency_seconds_sum") == 3.0
    assert finished(metrics) == {"stop": 0, "length": 1, "abort": 0, "error": 0}


def test_each_choice_is_observed_once(clock: list[float]) -> None:
    metrics = Metrics()
    metrics.on_submit(request("a", n=2))
    for index in (0, 1):
        clock[0] += 1.0
        metrics.on_event(event("a", 1, index=index, finish="stop"))
    assert value(metrics, "time_to_first_token_seconds_count") == 2
    assert value(metrics, "time_to_first_token_seconds_sum") == 1.0 + 2.0
    assert value(metrics, "e2e_request_latency_seconds_count") == 2
    assert finished(metrics)["stop"] == 2


def test_an_end_without_a_token_is_no_first_token(clock: list[float]) -> None:
    metrics = Metrics()
    metrics.on_submit(request("a"))
    metrics.on_event(event("a", finish="error"))
    assert value(metrics, "time_to_first_token_seconds_count") == 0
    assert finished(metrics)["error"] == 1


def test_a_stop_string_ends_a_choice_for_good() -> None:
    """Tokens that the engine made before it heard of it, and the closing of the request, count no more."""
    metrics = Metrics()
    metrics.on_submit(request("a", n=2))
    metrics.on_event(event("a", 1))
    metrics.on_finish("a", 0, "stop")
    metrics.on_event(event("a", 2, finish="length"))
    metrics.on_event(event("a", 1, index=1, finish="length"))
    metrics.on_close("a", "abort")
    metrics.on_close("a", "abort")
    assert finished(metrics) == {"stop": 1, "length": 1, "abort": 0, "error": 0}


def test_a_refused_request_counts_for_nothing() -> None:
    metrics = Metrics()
    metrics.on_submit(request("a", n=3))
    metrics.on_reject("a")
    metrics.on_close("a", "abort")
    assert sum(finished(metrics).values()) == 0


def test_unknown_events_are_passed_over() -> None:
    metrics = Metrics()
    metrics.on_event(event("nobody", 1, finish="stop"))
    metrics.on_finish("nobody", 0, "stop")
    assert sum(finished(metrics).values()) == 0


# ---- numbers from the engine


def test_gauges_and_counters_follow_the_stats() -> None:
    metrics = Metrics()
    stats = EngineStats(num_running=3, num_waiting=2, num_blocks=10, num_blocks_used=4, prompt_tokens=70, steps=5)
    metrics.on_stats(stats)
    assert value(metrics, "num_requests_running") == 3
    assert value(metrics, "num_requests_waiting") == 2
    assert value(metrics, "kv_cache_usage_perc") == pytest.approx(0.4)
    assert value(metrics, "prompt_tokens_total") == 70
    metrics.on_stats(EngineStats(num_blocks=10, prompt_tokens=90, steps=6))
    assert value(metrics, "prompt_tokens_total") == 90
    assert value(metrics, "engine_steps_total") == 6
    assert value(metrics, "num_requests_running") == 0


def test_before_the_first_stats_everything_is_zero() -> None:
    metrics = Metrics()
    assert value(metrics, "kv_cache_usage_perc") == 0
    assert value(metrics, "generation_tokens_total") == 0
    text = metrics.text().decode()
    for reason in REASONS:
        assert f'glint:request_success_total{{finished_reason="{reason}"}} 0.0' in text


def test_two_engines_in_a_process_do_not_mix() -> None:
    first, second = Metrics(), Metrics("other:")
    first.on_stats(EngineStats(prompt_tokens=1))
    assert value(first, "prompt_tokens_total") == 1
    assert b"other:prompt_tokens_total 0.0" in second.text()


def test_met_02_everything_balances_after_trouble() -> None:
    """MET-02: 100 normal, 100 disconnected, 20 refused, 5 failed, 10 preempted."""
    faults = Faults(
        raise_at={f"failed {i}": 1 for i in range(5)}, preempt_at={f"preempted {i}": {6, 8} for i in range(10)}
    )
    engine, _ = fake_engine(num_blocks=60, max_num_seqs=8, max_model_len=60, faults=faults)
    metrics = Metrics()
    baseline = engine.stats().num_blocks_used
    usage = {"prompt": 0, "output": 0}
    counters = [name for name in metrics._counters if name != "step_seconds"]
    before = dict.fromkeys(counters, 0.0)
    started: dict[str, GenerationRequest] = {}
    finished_ids: set[str] = set()

    def step() -> None:
        for one in engine.step():
            metrics.on_event(one)
            usage["output"] += len(one.token_ids)
            if one.finish_reason is not None:
                finished_ids.add(one.request_id)
        metrics.on_stats(engine.stats())
        for name in counters:
            now = metrics._counters[name]._value.get()
            assert now >= before[name], f"{name} went down"
            before[name] = now

    names = [f"normal {i}" for i in range(100)] + [f"gone {i}" for i in range(100)]
    names += [f"failed {i}" for i in range(5)] + [f"preempted {i}" for i in range(10)]
    for number, name in enumerate(names[number * 83 % len(names)] for number in range(len(names))):
        one = started[name] = request(name, num_prompt=5, max_tokens=5)
        metrics.on_submit(one)
        engine.add(one)
        if number % 10 == 0:
            refused = request(f"refused {number}", num_prompt=61)
            metrics.on_submit(refused)
            with pytest.raises(RequestError):
                engine.add(refused)
            metrics.on_reject(refused.request_id)
        for _ in range(2 if name.startswith("gone") else 1):
            step()
        if name.startswith("gone"):
            engine.abort(name)
            metrics.on_close(name, "abort")
            metrics.on_stats(engine.stats())
    while engine.has_work:
        step()

    assert value(metrics, "num_requests_running") == value(metrics, "num_requests_waiting") == 0
    assert value(metrics, "kv_blocks_used") == baseline == 0
    ends = finished(metrics)
    assert ends["error"] == 5
    assert ends["stop"] == 0
    assert ends["length"] == 110 + sum(name.startswith("gone") for name in finished_ids)
    assert sum(ends.values()) == len(started)
    assert value(metrics, "failed_steps_total") >= 5
    assert value(metrics, "preemptions_total") >= 20
    assert value(metrics, "generation_tokens_total") == usage["output"]
    aborted_unstarted = (len(started) * 5 - value(metrics, "prompt_tokens_total")) / 5
    assert 0 <= aborted_unstarted <= ends["abort"], "only who left before it ran has no prompt tokens"
