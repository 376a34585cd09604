"""Deltas of a choice merged into one."""

from __future__ import annotations

from engine.api import OutputDelta, TextLogprob
from server.events import merge

A = TextLogprob("a", 1, -0.1, b"a")
B = TextLogprob("b", 2, -0.2, b"b")


def test_merge_joins_in_order() -> None:
    first = OutputDelta(1, "a", (1,), (A,), None, None, 5, (None, B))
    held = OutputDelta(1, "", (3, 4), (B, A))
    last = OutputDelta(1, "b", (2,), (B,), "stop", "END")
    assert merge([first, held, last]) == OutputDelta(
        index=1,
        text="ab",
        token_ids=(1, 3, 4, 2),
        logprobs=(A, B, A, B),
        finish_reason="stop",
        stop_reason="END",
        num_cached_tokens=5,
        prompt_logprobs=(None, B),
    )


def test_merge_keeps_what_is_absent_absent() -> None:
    merged = merge([OutputDelta(0, None, (1,)), OutputDelta(0, None, (2,), finish_reason="length")])
    assert merged == OutputDelta(0, None, (1, 2), finish_reason="length")
