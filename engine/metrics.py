"""Prometheus metrics of the engine, kept where the front end is: gauges from its stats, latencies from its events.

Times are taken with the monotonic clock when an event reaches the front end, so they hold queueing and the way
between the processes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from engine.api import GenerationRequest, TokenEvent
from engine.stats import EngineStats

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_OUTCOMES = ("stop", "length", "abort", "error")

# name, help, field of EngineStats
_GAUGES = (
    ("num_requests_running", "Choices that own KV blocks", "num_running"),
    ("num_requests_waiting", "Choices waiting to be admitted", "num_waiting"),
    ("kv_blocks", "KV blocks in the pool", "num_blocks"),
    ("kv_blocks_used", "KV blocks owned by running choices", "num_blocks_used"),
    ("kv_blocks_cached", "KV blocks kept for reuse", "num_blocks_cached"),
)
_COUNTERS = (
    ("prefix_cache_queries", "Tokens looked up in the prefix cache", "prefix_queried_tokens"),
    ("prefix_cache_hits", "Tokens found in the prefix cache", "prefix_hit_tokens"),
    ("preemptions", "Choices sent back to the queue for want of blocks", "preemptions"),
    ("prompt_tokens", "Prompt tokens of requests that were started", "prompt_tokens"),
    ("generation_tokens", "Tokens generated", "generated_tokens"),
    ("bad_logits_rows", "Rows of logits that were not numbers", "bad_rows"),
    ("failed_steps", "Steps that raised", "failed_steps"),
    ("late_allocations", "Times that GPU memory was allocated while serving", "late_allocations"),
    ("engine_steps", "Steps computed", "steps"),
    ("engine_step_seconds", "Seconds spent in steps", "step_seconds"),
)


@dataclass(slots=True)
class _Clock:
    """When things happened to one choice that has not ended, in seconds of the monotonic clock."""

    arrival: float
    last_token: float | None = None


class Metrics:
    """One registry of its own, so that several engines in a process do not mix."""

    def __init__(self, prefix: str = "glint:") -> None:
        self.registry = CollectorRegistry()
        self._stats = EngineStats()
        self._gauges = {
            name: Gauge(prefix + text, help_text, registry=self.registry) for text, help_text, name in _GAUGES
        }
        self._usage = Gauge(prefix + "kv_cache_usage_perc", "Share of KV blocks owned, 0 to 1", registry=self.registry)
        self._counters = {
            name: Counter(prefix + text, help_text, registry=self.registry) for text, help_text, name in _COUNTERS
        }
        self._finished = Counter(
            prefix + "request_success",
            "Choices ended, by reason; abort is a client that left",
            ["finished_reason"],
            registry=self.registry,
        )
        for outcome in _OUTCOMES:
            self._finished.labels(outcome)
        self._first_token = self._histogram(prefix + "time_to_first_token_seconds", "From arrival to the first token")
        self._between = self._histogram(prefix + "inter_token_latency_seconds", "Between tokens of a choice")
        self._whole = self._histogram(prefix + "e2e_request_latency_seconds", "From arrival to the end of a choice")
        self._open: dict[str, dict[int, _Clock]] = {}  # request → choices that have not ended

    def _histogram(self, name: str, help_text: str) -> Histogram:
        return Histogram(name, help_text, registry=self.registry, buckets=_SECONDS)

    def on_submit(self, request: GenerationRequest) -> None:
        """A request goes to the engine."""
        now = time.monotonic()
        self._open[request.request_id] = {index: _Clock(now) for index in range(request.sampling.n)}

    def on_event(self, event: TokenEvent) -> None:
        """An event has arrived; one of a choice that has ended here already is passed over."""
        clock = self._open.get(event.request_id, {}).get(event.index)
        if clock is None:
            return
        if event.token_ids:
            now = time.monotonic()
            if clock.last_token is None:
                self._first_token.observe(now - clock.arrival)
            else:
                self._between.observe((now - clock.last_token) / len(event.token_ids))
            clock.last_token = now
        if event.finish_reason is not None:
            self.on_finish(event.request_id, event.index, event.finish_reason)

    def on_finish(self, request_id: str, index: int, reason: str) -> None:
        """A choice has ended, by the engine's word or by a stop string."""
        clock = self._open.get(request_id, {}).pop(index, None)
        if clock is not None:
            self._finished.labels(reason).inc()
            self._whole.observe(time.monotonic() - clock.arrival)

    def on_close(self, request_id: str, reason: str) -> None:
        """Nobody listens to this request any more; what has not ended is counted under reason."""
        for index in list(self._open.get(request_id, {})):
            self.on_finish(request_id, index, reason)
        self._open.pop(request_id, None)

    def on_reject(self, request_id: str) -> None:
        """The engine did not take the request: it counts for nothing here."""
        self._open.pop(request_id, None)

    def on_stats(self, stats: EngineStats) -> None:
        """New numbers from the engine."""
        for name, counter in self._counters.items():
            counter.inc(getattr(stats, name) - getattr(self._stats, name))
        self._stats = stats

    def text(self) -> bytes:
        """The registry in the Prometheus text format."""
        stats = self._stats
        for name, gauge in self._gauges.items():
            gauge.set(getattr(stats, name))
        self._usage.set(stats.num_blocks_used / stats.num_blocks if stats.num_blocks else 0.0)
        return generate_latest(self.registry)
