"""engine.bench offline --model-shape: what it says of a figure, and that its runs are whole."""

import json
from pathlib import Path

import pytest

from conformance.golden_models import rand_model
from engine.bench import shapes
from engine.bench.__main__ import main
from engine.bench.shapes import Figure
from engine.checkpoint.loader import load_model_config
from engine.checkpoint.source import resolve
from tests.engine.engines import tiny_engine


@pytest.mark.parametrize(
    ("name", "value", "verdict"),
    [
        ("decode 1", 4.4, "met"),
        ("decode 1", 4.5, "ahead of the peer"),
        ("decode 1", 4.98, "BEHIND"),
        ("throughput", 10200.0, "met"),
        ("throughput", 9728.0, "ahead of the peer"),
        ("throughput", 9727.0, "BEHIND"),
    ],
)
def test_verdicts(name: str, value: float, verdict: str) -> None:
    assert Figure(name, value, *shapes.H200["llama-3.1-8b"][name]).verdict == verdict


def test_another_gpu_has_no_peer() -> None:
    assert Figure("decode 1", 99.0, None, None, None).verdict == ""


def test_the_shapes_are_configs_that_are_served(tmp_path: Path) -> None:
    for name, values in shapes.SHAPES.items():
        (tmp_path / "config.json").write_text(json.dumps(values))
        config = load_model_config(resolve(str(tmp_path)))
        assert config.n_layers == values["num_hidden_layers"], name
        assert shapes.H200.keys() == shapes.SHAPES.keys()


def test_runs_are_whole(tmp_path: Path) -> None:
    engine = tiny_engine(rand_model(tmp_path / "model"))
    assert shapes._seconds(engine, 3, 5, 4, seed=0) > 0
    assert engine.stats().generated_tokens == 12


def test_table_and_json() -> None:
    figures = [Figure("decode 1", 4.48, 3.47, 4.4, 4.98), Figure("throughput", 10331.0, 12280.0, 10200.0, 9727.0)]
    about = {"shape": "llama-3.1-8b", "device": "a GPU"}
    lines = shapes.table(about, figures).splitlines()
    assert lines[0] == "llama-3.1-8b, random weights; a GPU"
    assert lines[2].split() == ["decode", "1", "4.48", "3.47", "4.4", "4.98", "ahead", "of", "the", "peer"]
    assert [one["verdict"] for one in json.loads(shapes.as_json(about, figures))["figures"]] == [
        "ahead of the peer",
        "met",
    ]


def test_without_a_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.build.has_nvidia_driver", lambda: False)
    assert main(["offline", "--model-shape", "llama-3.1-8b"]) == 1
    assert "no NVIDIA driver" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["offline", "--model-shape", "gpt-9"])
    assert "'gpt-9' (choose from" in capsys.readouterr().err
