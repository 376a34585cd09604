"""python -m conformance.bench as a command, without a GPU: what it refuses, prints and writes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conformance.bench import __main__ as command
from conformance.bench.measure import measure
from conformance.bench.row import Row
from conformance.bench.table import Figure
from conformance.machines import MachineMissing
from engine.errors import KernelError
from engine.kernels.device import Instance
from engine.kernels.notes import Notes
from tests.conformance.test_bench import SMALL, Clock, row_named


def test_no_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def missing() -> None:
        raise MachineMissing("looked for an NVIDIA GPU, and found none")

    monkeypatch.setattr(command, "find_cupy", missing)
    assert command.main([]) == 2
    assert capsys.readouterr().err == "python -m conformance.bench: looked for an NVIDIA GPU, and found none\n"


def test_no_such_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--op", "rmsnorm", "--filter", "tokens=7"]) == 2
    assert "no row has --op rmsnorm" in capsys.readouterr().err
    assert command.main(["--op", "rmsnorm", "--filter", "tokens=64", "--list"]) == 0
    assert capsys.readouterr().out == "rmsnorm tokens=64\n"


@pytest.fixture
def silent_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that launches nothing, so that its answers are zeros."""

    class Gpu(Notes):
        arch = "sm_90"

        def __init__(self, cache: Path, arch: str | None) -> None:
            super().__init__()
            self.arch = arch or self.arch

        def prepare(self, kernels: Sequence[Instance]) -> None:
            pass

    pool = SimpleNamespace(free_all_blocks=lambda: None)
    cupy = SimpleNamespace(get_default_memory_pool=lambda: pool)
    about = {"gpu": "NVIDIA H200", "driver": "580.1", "cuda": "runtime 13000, NVRTC 13.0", "cupy": "14.2.0"}
    modules = SimpleNamespace(import_module=lambda name: SimpleNamespace(Gpu=Gpu))
    monkeypatch.setattr(command, "find_cupy", lambda: cupy)
    monkeypatch.setattr(command, "about_gpu", lambda cupy, compiler: about)
    monkeypatch.setattr(command, "GraphTimer", lambda cupy: nullcontext(Clock()))
    monkeypatch.setattr(command, "importlib", modules)
    monkeypatch.setattr(command, "all_rows", lambda: [row_named("rmsnorm", "tokens=1"), SMALL[2]])


@pytest.mark.usefixtures("silent_gpu")
def test_a_kernel_that_is_refused_is_a_failure_of_its_row_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(row: Row, *args: Any) -> Figure:
        if row.op == "rmsnorm":
            raise KernelError("rmsnorm: invalid argument")
        return measure(row, *args)

    monkeypatch.setattr(command, "measure", refused)
    file = tmp_path / "bench.json"
    assert command.main(["--json", str(file)]) == 1
    assert "    raised KernelError: rmsnorm: invalid argument\n" in capsys.readouterr().out
    first, second = json.loads(file.read_text("utf-8"))["rows"]
    assert (first["us"], first["verdict"], second["us"]) == (None, "WRONG", 1.0)


@pytest.mark.usefixtures("silent_gpu")
def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bench.json"
    assert command.main(["--json", str(file), "--arch", "sm_86"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "NVIDIA H200, driver 580.1, runtime 13000, NVRTC 13.0, kernels for sm_86"
    assert "read 4.00 TB/s, copy 2.00 TB/s, cuBLAS 500 TFLOP/s" in lines[1]
    assert lines[3].split()[:4] == ["rmsnorm", "tokens=1", "1.00", "0.01"]
    assert "WRONG" in lines[3]
    assert lines[-1] == "2 rows: 0 met their goal, 0 short of it, 0 behind the peer, 2 wrong"
    report = json.loads(file.read_text("utf-8"))
    assert (report["gpu"], report["arch"], report["limits"]["read_tb_per_s"]) == ("NVIDIA H200", "sm_86", 4.0)
    assert report["date"]
    assert all(len(digest) == 64 for digest in report["kernels"].values())
    assert report["kernels"].keys() == {"rmsnorm", "linear"}
    assert report["rows"][0] == {
        **{"op": "rmsnorm", "case": "tokens=1", "us": 1.0, "bytes": 24576, "flops": 0, "limit_us": 24576 / 2e6},
        **{"share": 24576 / 2e6, "goal": None, "goal_us": None, "peer": None, "peer_us": None, "others_us": {}},
        **{"verdict": "WRONG", "launched": "rmsnorm<bf16, 1>"},
        **{name: report["rows"][0][name] for name in ("error", "tolerance")},
    }


def test_files_that_cannot_be_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Found before anything is timed, and without a GPU."""
    for name, reason in (("--json", "it cannot be written: No such file or directory"), ("--readme", "no such file")):
        assert command.main([name, str(tmp_path / "none" / "file")]) == 2
        captured = capsys.readouterr()
        assert (captured.out, captured.err.count("\n")) == ("", 1)
        assert reason in captured.err
