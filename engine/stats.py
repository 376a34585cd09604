"""Numbers about the engine that cross to the front end with every step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Gauges and ever-growing counters, taken between steps."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_blocks_used: int = 0
    num_blocks_cached: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    bad_rows: int = 0
    failed_steps: int = 0
    steps: int = 0
    late_allocations: int = 0  # of GPU memory, since the engine is ready
    step_seconds: float = 0.0  # spent in steps
