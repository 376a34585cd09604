"""Which machine an engine is built for, and how large its steps are when nothing is said."""

from pathlib import Path
from typing import Any

import pytest

from conformance.golden_models import rand_model
from engine.backends import choose
from engine.backends.backend import Place
from engine.backends.choose import make_backend
from engine.build import build_engine
from engine.checkpoint.loader import load_model_config
from engine.checkpoint.source import resolve
from engine.config import EngineConfig, ModelConfig, StepLimits
from engine.errors import ConfigError, KernelError

DEFAULTS = StepLimits(max_num_seqs=64, max_num_batched_tokens=512)


@pytest.fixture
def model_config(tmp_path: Path) -> ModelConfig:
    return load_model_config(resolve(str(rand_model(tmp_path / "model", num_hidden_layers=1))))


def test_a_gpu_that_is_not_there_is_refused(model_config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "has_nvidia_driver", lambda: False)
    with pytest.raises(ConfigError, match=r"--device cuda: no NVIDIA driver .*use --device cpu"):
        make_backend(EngineConfig(device="cuda"), model_config)


def test_packages_that_are_not_there_are_named(model_config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "has_nvidia_driver", lambda: True)
    monkeypatch.setattr(choose.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'glint-llm\[cuda13\]'"):
        make_backend(EngineConfig(device="cuda"), model_config)
    assert "cpu" in make_backend(EngineConfig(), model_config).description  # auto: it still runs


@pytest.mark.parametrize("error", [ImportError("libnvrtc is not there"), KernelError("this GPU is too old")])
def test_a_gpu_that_does_not_start(
    error: Exception, model_config: ModelConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """auto: a warning, and the CPU; cuda: refused with what was found."""
    named = choose._named_backend

    def starts_only_a_cpu(name: str, config: EngineConfig, model: ModelConfig, place: Place) -> Any:
        if name == "cuda":
            raise error
        return named(name, config, model, place)

    monkeypatch.setattr(choose, "has_nvidia_driver", lambda: True)
    monkeypatch.setattr(choose, "_no_gpu", lambda model: "")
    monkeypatch.setattr(choose, "_named_backend", starts_only_a_cpu)
    assert "cpu" in make_backend(EngineConfig(), model_config).description
    assert str(error) in caplog.text
    with pytest.raises(ConfigError, match=f"--device cuda: {error}; use --device cpu"):
        make_backend(EngineConfig(device="cuda"), model_config)


def test_w4a8_on_a_cpu_is_said_to_be_left_out(model_config: ModelConfig, caplog: pytest.LogCaptureFixture) -> None:
    make_backend(EngineConfig(device="cpu", w4a8="int8"), model_config)
    assert "--w4a8 int8 is left out: it is for GPUs" in caplog.text


def test_a_cpu_computes_in_float32(tmp_path: Path) -> None:
    folder = rand_model(tmp_path / "model", num_hidden_layers=1)
    with pytest.raises(ConfigError, match="--dtype bfloat16: a CPU computes in float32"):
        build_engine(EngineConfig(model=str(folder), device="cpu", dtype="bfloat16"), progress=False)


@pytest.mark.parametrize(
    ("given", "limits"),
    [
        ({}, (64, 512)),
        ({"max_num_seqs": 600}, (600, 600)),
        ({"max_num_batched_tokens": 16}, (16, 16)),
        ({"max_num_seqs": 3, "max_num_batched_tokens": 9}, (3, 9)),
    ],
)
def test_limits_that_are_not_given(given: dict[str, int], limits: tuple[int, int]) -> None:
    assert EngineConfig(**given).step_limits(DEFAULTS) == StepLimits(*limits)
