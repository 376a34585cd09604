"""Hard cases of the whole engine on this CPU, in small; and that each of them sees what it is there to see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from conformance.whole_engine import cases
from conformance.whole_engine.__main__ import main
from conformance.whole_engine.cases import CASES, Device, bad_logits, needle, neighbours, prompt_logprobs, run
from conformance.whole_engine.needle import ASK, FILLERS, VALUES, needle_model, needle_prompt
from engine.loop import Engine

SMALL = Device("cpu", "float32", length=600)


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "NUM_OTHERS", (3,))
    monkeypatch.setattr(cases, "REPEATS", 2)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_hard_cases(case: Any) -> None:
    """KRN-01, KRN-09, SAM-05, API-09, PFX-08; with longer prompts and more neighbours by the command, on a GPU."""
    assert case(SMALL) == []


def test_the_needle_prompt() -> None:
    ids = needle_prompt(100, 0.25, VALUES[2])
    assert (len(ids), ids[24], ids[-1]) == (100, VALUES[2], ASK)
    assert all(token_id in FILLERS for place, token_id in enumerate(ids) if place not in (24, 99))


def test_without_a_needle_the_model_knows_no_value(tmp_path: Path) -> None:
    """So an answer can only come from the needle."""
    engine = SMALL.engine(needle_model(tmp_path, 128, "float32"), num_gpu_blocks_override=32)
    prompt = [*FILLERS[:40], ASK]
    output = run(engine, {"one": prompt}, 1)["one"]
    assert output.answer.token_ids[0] not in VALUES
    found = run(engine, {"one": [*prompt[:20], VALUES[3], *prompt[20:]]}, 1)["one"]
    assert found.answer.token_ids == [VALUES[3]]
    assert found.answer.logprobs[0] > -1e-3


def test_a_needle_that_is_not_found_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(length: int, share: float, value: int, seed: int = 0) -> list[int]:
        ids = needle_prompt(length, share, value, seed)
        return [FILLERS[0] if share == 0.75 and token_id == value else token_id for token_id in ids]

    monkeypatch.setattr(cases, "needle_prompt", lost)
    assert [said.partition(":")[0] for said in needle(SMALL)] == ["at 75%", "four at once"]


def test_a_cache_that_finds_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Device.engine

    def uncached(self: Device, folder: Path, **settings: Any) -> Engine:
        return plain(self, folder, enable_prefix_caching=False, **settings)

    monkeypatch.setattr(Device, "engine", uncached)
    assert needle(SMALL) == ["first half cached: 0 tokens were found, expected 300"]


def test_neighbours_that_change_the_answer_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "TOLERANCES", {"float32": -1.0})
    said = neighbours(SMALL)
    assert [one.partition(" differ by")[0] for one in said] == [
        "3 others, with logprobs: logprobs",
        "3 others, without logprobs: logprobs",
    ]


def test_runs_that_differ_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of its own in every run stands for a race."""
    number = iter(range(100))
    plain = cases.run

    def changing(engine: Engine, prompts: Any, num_output: int, **sampling: Any) -> Any:
        return plain(
            engine, prompts | {"new": [3 + next(number)]} if len(prompts) > 1 else prompts, num_output, **sampling
        )

    monkeypatch.setattr(cases, "run", changing)
    assert [said for said in neighbours(SMALL) if "other bits" in said]


def test_bad_logits_that_end_nothing_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "BAD_WEIGHT", 0.5)
    said = bad_logits(SMALL)
    assert "bad: error None" in said
    assert "0 bad rows, 0 failed steps" in said


def test_prompt_logprobs_that_differ_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "TOLERANCES", {"float32": -1.0})
    assert [said.partition(":")[0] for said in prompt_logprobs(SMALL)] == ["warm", "in chunks"]


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["--case", "PFX-08"]) == 0
    assert capsys.readouterr().out.startswith("API-09 PFX-08 prompt logprobs (cpu, float32, ")
    monkeypatch.setitem(CASES, "API-09 PFX-08 prompt logprobs", lambda device: ["this", "that"])
    assert main(["--case", "PFX-08"]) == 1
    assert capsys.readouterr().out.endswith("FAILED: this; that\n")


def test_no_gpu_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """These tests see no GPU (conftest)."""
    assert main(["--device", "cuda", "--case", "PFX-08"]) == 2
    assert "no NVIDIA driver" in capsys.readouterr().err
