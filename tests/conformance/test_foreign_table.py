"""python -m conformance.peers.table: what it keeps of runs, with a command in place of the real one."""

from __future__ import annotations

import importlib
import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

peers_table = importlib.import_module("conformance.peers.table")


def fake_run(command: list[str], **options: Any) -> Any:
    """One case that passes, one that fails, one that was left out of the report."""
    name = command[command.index("--op") + 1]
    cases = [
        {"stem": name, "case": "even", "status": "ok", "error": 0.0, "tolerance": 0.1},
        {"stem": name, "case": "odd", "status": "FAIL", "error": 0.5, "tolerance": 0.1},
    ]
    about = {"gpu": "Some GPU", "driver": "1", "cuda": "2", "cupy": "3", "date": "2026-01-02"}
    Path(command[command.index("--json") + 1]).write_text(json.dumps({**about, "cases": cases}), "utf-8")
    return SimpleNamespace(stdout="", stderr="")


def test_every_run_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(subprocess, "run", fake_run)
    file = tmp_path / "foreign.json"
    assert peers_table.main(["--json", str(file)]) == 0
    report = json.loads(file.read_text("utf-8"))
    assert (report["gpu"], report["target"]) == ("Some GPU", "foreign")
    assert [(run["op"], run["passed"]) for run in report["runs"]] == [(op, 1) for op, _ in peers_table.FOREIGN]
    first = report["runs"][0]
    assert first["impl"] == "conformance.peers.torch_ops:embedding"
    assert first["failed"] == [{"stem": "embedding", "case": "odd", "status": "FAIL", "error": 0.5, "tolerance": 0.1}]
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["conformance.peers.torch_ops:embedding: 1 passed, 1 failed", "    odd 0.5 0.1"]


def test_a_file_that_cannot_be_written_is_said_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(subprocess, "run", None)  # nothing may run
    with pytest.raises(SystemExit, match="2"):
        peers_table.main(["--json", str(tmp_path)])
    assert f"--json {tmp_path}: it cannot be written: Is a directory" in capsys.readouterr().err


def test_without_a_gpu_torch_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(subprocess, "run", fake_run)
    assert peers_table.main(["--target", "host"]) == 0
    assert "triton" not in capsys.readouterr().out


def test_what_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(
        subprocess, "run", lambda command, **options: SimpleNamespace(stdout="", stderr="there is no module torch\n")
    )
    assert peers_table.main([]) == 2
    assert "there is no module torch" in capsys.readouterr().err
