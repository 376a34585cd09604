"""Every dense golden through the whole engine on this CPU; and that a wrong number or token is said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from conformance.kernel_models import PROMPT_LENGTHS
from conformance.whole_engine import goldens
from conformance.whole_engine.cases import Device
from conformance.whole_engine.goldens import CASES, golden

CPU = Device("cpu", "float32", length=0)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_golden(case: Callable[[Device], list[str]]) -> None:
    assert case(CPU) == []


def test_other_weights_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a hundredth."""
    monkeypatch.setattr(goldens, "round_to", lambda x, storage: x * np.float32(1.01))
    said = golden("qwen2", CPU)
    for length in PROMPT_LENGTHS:
        assert any(f"prompt of {length}: logprobs: has an error of" in problem for problem in said)


def test_another_token_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*args: Any, **kwargs: Any) -> Any:
        outputs = inner(*args, **kwargs)
        outputs["1"].answer.token_ids[3] ^= 1
        return outputs

    inner = goldens.run
    monkeypatch.setattr(goldens, "run", run)
    said = golden("qwen2", CPU)
    assert any("prompt of 21: token" in problem and "below the best" in problem for problem in said)
    assert all("prompt of 21" in problem for problem in said)


def test_a_lost_answer_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*args: Any, **kwargs: Any) -> Any:
        outputs = inner(*args, **kwargs)
        outputs["0"].answer.token_ids.clear()
        return outputs

    inner = goldens.run
    monkeypatch.setattr(goldens, "run", run)
    assert golden("llama3", CPU) == ["prompt of 5: 0 tokens, error None"]
