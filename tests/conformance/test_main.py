"""python -m conformance: its lines, its exit status, its JSON."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance import __main__ as command
from conformance.case import Case
from conformance.suite import target_ops

LINE = re.compile(r"\S+ \S+ (\S+ \S+ (ok|FAIL)|- - skip\(.+\))")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str], str]:
    status = command.main(arguments)
    captured = capsys.readouterr()
    return status, captured.out.splitlines(), captured.err


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """rmsnorm is off by a thousandth in its third row, and raises in a case of no rows."""
    ops = target_ops("cpu")

    def wrong(x: Any, weight: Any, eps: float) -> Any:
        out = ops.rmsnorm(x, weight, eps)
        out[2 % len(out)] *= np.float32(1.001)
        return out

    monkeypatch.setattr(command, "target_ops", lambda target: replace(ops, rmsnorm=wrong))


def test_passing(capsys: pytest.CaptureFixture[str]) -> None:
    status, lines, _ = run(capsys, "--target", "cpu", "--op", "rmsnorm")
    assert status == 0
    assert lines[-1] == "14 passed, 0 failed, 0 skipped"
    assert all(LINE.fullmatch(line) for line in lines[:-1])
    assert {line.split()[0] for line in lines[:-1]} == {"rmsnorm"}
    assert all(float(line.split()[2]) <= float(line.split()[3]) for line in lines[:-1])


def test_golden(capsys: pytest.CaptureFixture[str]) -> None:
    status, lines, _ = run(capsys, "--target", "golden", "--op", "llama", "--case", "llama3-logits1")
    assert status == 0
    assert lines[0].startswith("llama llama3-logits1 ")
    assert lines[1:] == ["1 passed, 0 failed, 0 skipped"]


@pytest.mark.usefixtures("broken")
def test_failing(capsys: pytest.CaptureFixture[str]) -> None:
    status, lines, _ = run(capsys, "--target", "cpu", "--op", "rmsnorm")
    assert status == 1
    assert re.fullmatch(r"7 passed, 7 failed, 0 skipped", lines[-1])
    place = next(i for i, line in enumerate(lines) if line.startswith("rmsnorm odd "))
    assert lines[place].endswith(" FAIL")
    assert "at [2, " in lines[place + 1]
    assert lines[place + 2] == "    again: python -m conformance --target cpu --op rmsnorm --case odd"
    assert "    raised ZeroDivisionError: integer modulo by zero" in lines


@pytest.mark.usefixtures("broken")
def test_the_printed_command_runs_the_failing_case_alone(capsys: pytest.CaptureFixture[str]) -> None:
    _, lines, _ = run(capsys, "--target", "cpu", "--op", "rmsnorm", "--seed", "7")
    again = next(line for line in lines if "again: " in line and "many" in line)
    status, lines, _ = run(capsys, *again.split()[4:])
    assert status == 1
    assert "--seed 7" in again
    assert lines[-1] == "0 passed, 1 failed, 0 skipped"


def test_skipping(capsys: pytest.CaptureFixture[str]) -> None:
    status, lines, _ = run(capsys, "--target", "cpu", "--op", "embedding")
    assert status == 0
    assert lines[0] == "embedding none - - skip(the CPU's op table holds ref.embedding itself)"
    assert lines[-1] == "0 passed, 0 failed, 4 skipped"


@pytest.mark.parametrize("target", ["host", "gpu"])
def test_no_kernels_is_no_pass(capsys: pytest.CaptureFixture[str], target: str) -> None:
    status, lines, error = run(capsys, "--target", target)
    assert (status, lines) == (2, [])
    assert "there are no CUDA kernels yet" in error


def test_nothing_to_run_is_no_pass(capsys: pytest.CaptureFixture[str]) -> None:
    status, lines, error = run(capsys, "--target", "cpu", "--op", "atention")
    assert (status, lines) == (2, [])
    assert "--op atention" in error
    assert "attention" in error


@pytest.mark.usefixtures("broken")
def test_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The fields of a results file; no skipped case, no infinity."""
    file = tmp_path / "results.json"
    run(capsys, "--target", "cpu", "--op", "rmsnorm", "--json", str(file))
    report = json.loads(file.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert report.keys() == {"target", "gpu", "driver", "cuda", "cupy", "date", "kernels", "cases"}
    assert re.fullmatch("[0-9a-f]{64}", report["kernels"]["rmsnorm"])
    by_name = {case["case"]: case for case in report["cases"]}
    assert by_name["odd"]["status"] == "FAIL"
    assert by_name["odd"]["error"] > by_name["odd"]["tolerance"] > 0
    assert by_name["no-tokens"]["error"] is None
    assert by_name["add-odd"] == {
        "stem": "rmsnorm",
        "case": "add-odd",
        "status": "ok",
        "error": by_name["add-odd"]["error"],
        "tolerance": by_name["add-odd"]["tolerance"],
    }


def test_json_has_no_skipped_case(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    run(capsys, "--target", "cpu", "--op", "embedding", "--json", str(file))
    assert json.loads(file.read_text())["cases"] == []


@pytest.mark.parametrize("target", ["cpu", "golden"])
def test_every_stem_has_a_source(target: str) -> None:
    cases: list[Case] = command.cases(target)
    assert all(command._source_hash(target, stem) for stem in {case.stem for case in cases})
