"""Damage: of an unfinished or finished output, of a model's numbers, of what a text makes of them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance.golden_models import llama_config, llama_tensors, write_checkpoint
from engine.errors import CheckpointError, ConfigError
from engine.quantize.methods import METHODS
from engine.quantize.writer import JOURNAL
from ref.checkpoint import read_checkpoint
from tests.engine.quantize.small import SIZES, content, make, small_model
from tests.engine.quantize.test_run import Killed, kill_after


@pytest.mark.parametrize("foreign", [b"\xff\xfe", b"notes\n", b"notes"])
def test_a_journal_of_something_else(foreign: bytes, tmp_path: Path) -> None:
    model, out = small_model(tmp_path / "model"), tmp_path / "out"
    out.mkdir()
    (out / JOURNAL).write_bytes(foreign)
    with pytest.raises(ConfigError, match="unfinished run with other settings"):
        make(model, out, "int8")
    assert content(out) == {JOURNAL: foreign}


@pytest.mark.parametrize("damage", ["gone", "shorter"])
def test_a_file_that_was_lost_between_two_runs(damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the journal says is written, and is not, must not become zeros."""
    model, out = small_model(tmp_path / "model"), tmp_path / "out"
    kill_after(monkeypatch, 4, said=True)
    with pytest.raises(Killed):
        make(model, out, "int8")
    monkeypatch.undo()
    part = out / "model.safetensors.part"
    if damage == "gone":
        part.unlink()
    else:
        part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r"model\.safetensors is gone or has been changed"):
        make(model, out, "int8")


def test_a_finished_file_that_was_cut_is_not_called_finished(tmp_path: Path) -> None:
    model, out = small_model(tmp_path / "model"), tmp_path / "out"
    file = make(model, out, "int8") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r"holds config\.json, and is nothing that this command"):
        make(model, out, "int8")


def test_a_name_that_no_folder_can_have(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written: File name too long"):
        make(small_model(tmp_path / "model"), tmp_path / ("x" * 300), "int8")


def with_number(folder: Path, name: str, value: float, **overrides: Any) -> Path:
    """A model with one other number."""
    config = llama_config(torch_dtype="bfloat16", **SIZES | overrides)
    tensors = llama_tensors(config, 7)
    tensors[name][3, 5] = value
    return write_checkpoint(folder, config, tensors)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("method", sorted(set(METHODS) - {"bf16"}))
def test_weights_that_are_no_numbers(method: str, value: float, tmp_path: Path) -> None:
    """NaN would become some number, and no reader could tell."""
    model = with_number(tmp_path / "model", "model.layers.0.self_attn.q_proj.weight", value)
    with pytest.raises(CheckpointError, match=rf"q_proj\.weight holds {value}, which no format"):
        make(model, tmp_path / "out", method)
    assert not (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize("method", ["int4-gptq", "awq-rtn"])
def test_numbers_whose_scales_float16_does_not_hold(method: str, tmp_path: Path) -> None:
    """3e6 needs a scale of more than 65504."""
    model = with_number(tmp_path / "model", "model.layers.0.self_attn.q_proj.weight", 3e6)
    with np.errstate(over="ignore"), pytest.raises(ConfigError, match=r"q_proj has numbers up to 3e\+06, whose scales"):
        make(model, tmp_path / "out", method)


@pytest.mark.parametrize("method", ["int4-gptq", "smoothquant", "fp8-static"])
def test_a_text_with_which_the_model_overflows(method: str, tmp_path: Path) -> None:
    model = with_number(tmp_path / "model", "model.embed_tokens.weight", np.inf)
    found = np.full((1, 16), 3, np.int32)
    with np.errstate(all="ignore"), pytest.raises(ConfigError, match=r"--calibration: with this text .* gets nan"):
        make(model, tmp_path / "out", method, windows=found)


@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_qnt_07_smoothing_stays_within_float16(alpha: float, tmp_path: Path) -> None:
    """A channel that is always 0 has a factor of 1e-5 with alpha 1, by which a norm of 1 would be infinite."""
    config = llama_config(torch_dtype="float16", **SIZES)
    tensors = llama_tensors(config, 7)
    tensors["model.embed_tokens.weight"][:, 5] = 0
    tensors["model.layers.0.input_layernorm.weight"][5] = 1
    tensors["model.layers.0.input_layernorm.weight"][6] = 6e-8  # which 2 makes 0
    out = make(write_checkpoint(tmp_path / "model", config, tensors), tmp_path / "out", "smoothquant", {"alpha": alpha})
    stored = read_checkpoint(out, None)
    before = read_checkpoint(tmp_path / "model", None)
    for name, tensor in stored.items():
        if name.endswith("layernorm.weight"):
            assert np.isfinite(tensor).all(), name
            np.testing.assert_array_equal(tensor == 0, before[name] == 0, name)
