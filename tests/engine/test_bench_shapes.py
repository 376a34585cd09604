"""engine.bench offline --model-shape: what it says of a figure, and that its runs are whole."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from conformance.golden_models import rand_model
from engine.bench import shapes
from engine.bench.__main__ import main
from engine.bench.model_shapes import QUANTS, SHAPES
from engine.bench.shapes import Figure
from engine.checkpoint.loader import load_model_config
from engine.checkpoint.source import resolve
from engine.config import EngineConfig
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
        ("cold start", 60.0, "met"),
        ("cold start", 61.0, "missed"),
    ],
)
def test_verdicts(name: str, value: float, verdict: str) -> None:
    assert Figure(name, value, *shapes.H200["llama-3.1-8b"][name]).verdict == verdict


def test_another_gpu_has_no_peer() -> None:
    assert Figure("decode 1", 99.0, None, None, None).verdict == ""
    assert Figure("decode 1", 99.0, None, None, None).share is None


def test_shares() -> None:
    """Of a time and of a rate: half as quick as the limit either way."""
    assert Figure("decode 1", 8.0, 4.0, None, None).share == 0.5
    assert Figure("throughput", 6000.0, 12000.0, None, None).share == 0.5


def test_prefill_flops() -> None:
    """By hand: 218 103 808 weights a layer in 32 layers, each in 2 operations a token; 2 · n² · 4096 of causal
    attention a layer; the head, 4096 × 128256, once."""
    weights = 4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336
    assert weights == 218103808
    assert shapes.prefill_flops("llama-3.1-8b", 2) == 32 * (2 * 2 * weights + 2 * 4 * 4096) + 2 * 4096 * 128256
    assert round(shapes.prefill_flops("llama-3.1-8b", 8192) / 1e12, 1) == 131.9


def test_the_shapes_are_configs_that_are_served(tmp_path: Path) -> None:
    for name, values in SHAPES.items():
        (tmp_path / "config.json").write_text(json.dumps(values))
        config = load_model_config(resolve(str(tmp_path)))
        assert config.n_layers == values["num_hidden_layers"], name
    for key in shapes.H200:
        whole, _, ranks = key.partition(" TP ")
        shape, *quant = whole.split(" ")
        assert shape in SHAPES
        assert not quant or quant[0] in QUANTS
        assert quant[1:] in ([], ["w4a8=int8"], ["w4a8=fp8"])
        assert ranks in ("", "2", "2, no P2P")


def test_figures_of_ranks_go_by_how_they_are_linked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    assert shapes.Split().text == ""
    assert shapes.Split(2).text == "TP 2"
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert shapes.Split(2, 2).text == "TP 2 × PP 2, no P2P"
    assert f"llama-3.1-70b {shapes.Split(2).text}" in shapes.H200


def test_a_figure_is_measured_under_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """decode is the difference of two medians over 128, and of four runs the first is not counted."""
    runs: list[tuple[int, int, int]] = []

    def seconds(engine: None, num_requests: int, num_prompt: int, num_output: int, seed: int) -> float:
        runs.append((num_requests, num_prompt, num_output))
        return (9.0, 0.3, 0.1, 0.2)[seed] * num_output

    monkeypatch.setattr(shapes, "_seconds", seconds)
    assert shapes.MEASURES["decode 8"](None) == pytest.approx(1e3 * 0.2)  # type: ignore[arg-type]
    assert runs == [(8, 1024, 129)] * 4 + [(8, 1024, 1)] * 4
    assert shapes.MEASURES["prefill 512"](None) == pytest.approx(1e3 * 0.2)  # type: ignore[arg-type]
    assert shapes.MEASURES["throughput"](None) == pytest.approx(256 / 0.2 / 256 * 256)  # type: ignore[arg-type]
    goals = {name for known in shapes.H200.values() for name in known}
    assert {*shapes.MEASURES, shapes.START, shapes.COLD} == goals


def test_runs_are_whole(tmp_path: Path) -> None:
    engine = tiny_engine(rand_model(tmp_path / "model"))
    assert shapes._seconds(engine, 3, 5, 4, seed=0) > 0
    assert engine.stats().generated_tokens == 12


def test_table_and_json() -> None:
    figures = [Figure("decode 1", 4.48, 3.47, 4.4, 4.98), Figure("throughput", 10331.0, 12280.0, 10200.0, 9727.0)]
    about = {"shape": "llama-3.1-8b", "device": "a GPU"}
    lines = shapes.table(about, figures).splitlines()
    assert lines[0] == "llama-3.1-8b, random weights; a GPU"
    assert lines[2].split() == ["decode", "1", "4.48", "3.47", "77%", "4.4", "4.98", "ahead", "of", "the", "peer"]
    assert [one["verdict"] for one in json.loads(shapes.as_json(about, figures))["figures"]] == [
        "ahead of the peer",
        "met",
    ]


@pytest.mark.parametrize(("is_small", "said"), [(True, "small random weights"), (False, "random weights")])
def test_small_weights_are_said(is_small: bool, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[EngineConfig] = []

    def build(config: EngineConfig, progress: bool) -> SimpleNamespace:
        made.append(config)
        return SimpleNamespace(engine=None, device="a GPU")

    monkeypatch.setattr(shapes, "build_engine", build)
    about, figures = shapes.measure("qwen2-72b", only=("start",), quant="gptq-int4", is_small=is_small)
    assert made[0].load_format == ("dummy-small" if is_small else "dummy")
    assert shapes.table(about, figures).startswith(f"qwen2-72b gptq-int4, {said}; a GPU")


def test_each_figure_is_said_once_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def decode(engine: object) -> float:
        assert said == ["start: 2", "prefill 512: 3.5"]
        return 4.0

    monkeypatch.setattr(shapes, "build_engine", lambda config, progress: SimpleNamespace(engine=None, device="a GPU"))
    monkeypatch.setattr("time.perf_counter", iter((10.0, 12.0)).__next__)
    monkeypatch.setattr(shapes, "MEASURES", {"prefill 512": lambda engine: 3.5, "decode 1": decode})
    figures = shapes.measure("qwen2-72b", only=("prefill", "decode 1"), say=said.append)[1]
    assert [one.value for one in figures] == [2.0, 3.5, 4.0]


def test_without_a_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.backends.choose.has_nvidia_driver", lambda: False)
    assert main(["offline", "--model-shape", "llama-3.1-8b"]) == 1
    assert "no NVIDIA driver" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["offline", "--model-shape", "gpt-9"])
    assert "'gpt-9' (choose from" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batches", "0"], "'0' is no list of numbers from 1 on"),
        (["--batches", "1,x"], "'1,x' is no list of numbers from 1 on"),
        (["--steps", "0"], "argument --steps: 0 is below 1"),
        (["--json", "/dev/null/file"], "/dev/null/file cannot be written: Not a directory"),
    ],
)
def test_what_cannot_be_measured_is_refused_at_once(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not behind the figures: those of a file that cannot be written would be lost."""
    with pytest.raises(SystemExit, match="2"):
        main(["offline", *arguments])
    assert message in capsys.readouterr().err
