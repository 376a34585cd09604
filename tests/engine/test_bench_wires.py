"""The benchmark of wires over two MPI ranks, on a model of which the answer is known."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.bench import wires
from engine.bench.__main__ import main
from engine.bench.wires import Report, Row, table
from tests.engine.quantize.small import small_model
from tests.engine.tiny_tokenizers import byte_level_tokenizer, write_tokenizer
from tests.mpi import mpirun


def model_with_text(folder: Path, **config: Any) -> Path:
    write_tokenizer(small_model(folder, vocab_size=320, **config), byte_level_tokenizer())
    return folder


def test_over_two_ranks(tmp_path: Path) -> None:
    """The first wire agrees with itself; bfloat16 is near it, int8 less so."""
    model, report = model_with_text(tmp_path / "model"), tmp_path / "report.json"
    arguments = ["wires", "--model", str(model), "--tokens", "60", "--window", "21", "--device", "cpu"]
    printed = mpirun(2, "-m", "engine.bench", *arguments, "--json", str(report)).splitlines()
    assert [line.split()[0] for line in printed[2:]] == list(wires.WIRES), "rank 0 alone speaks"
    found = json.loads(report.read_text())
    assert (found["num_tokens"], found["window"]) == (60, 21)
    kl = {row["wire"]: row["kl"] for row in found["rows"]}
    assert kl["auto"] == 0
    assert 0 < kl["bfloat16"] < kl["int8"] < 1e-2
    assert found["rows"][0]["top1"] == 1


def test_the_table() -> None:
    rows = (Row("auto", 20.0, 0.0, 1.0), Row("int8", 20.5, 4.2e-4, 0.985))
    printed = table(Report("m", "cpu", 2, None, "a text", 2000, 501, rows)).splitlines()
    assert printed[2:] == [
        "auto            20.0000          0  100.00%",
        "int8            20.5000    0.00042   98.50%",
    ]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--window", "1"], "--window must be at least 2"),
        (["--wires", "auto", "copper"], "--allreduce copper: is for GPUs; ranks of a CPU have auto, float32"),
    ],
)
def test_what_cannot_be_is_said(
    wrong: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = model_with_text(tmp_path)
    assert main(["wires", "--model", str(model), "--tokens", "20", "--window", "11", "--device", "cpu", *wrong]) == 1
    assert said in capsys.readouterr().err


def test_an_int8_wire_that_is_too_coarse_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One rank sends nothing, so that all wires are exact."""
    model = model_with_text(tmp_path)
    arguments = ["wires", "--model", str(model), "--tokens", "20", "--window", "11", "--device", "cpu"]
    assert main([*arguments, "--wires", "auto", "int8"]) == 0
    assert capsys.readouterr().out.count("100.00%") == 2
    monkeypatch.setattr(wires, "LEAST_TOP1", 1.01)
    assert main([*arguments, "--wires", "auto", "int8"]) == 1
