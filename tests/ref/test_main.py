"""python -m ref: the file it writes, the trace it prints, and one clear line for each mistake."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance.golden_models import config_v5, llama_config, rand_model
from ref import __main__ as command
from ref.checkpoint import read_checkpoint
from ref.config import read_config
from ref.model.llama import llama

SMALL: dict[str, Any] = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return rand_model(tmp_path / "model", **SMALL)


def test_logits_are_written(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "logits.npz"
    arguments = ["--model", str(folder), "--ids", "1,2,3", "--out", str(out), "--activations", "format"]
    done = subprocess.run([sys.executable, "-m", "ref", *arguments], capture_output=True, text=True, check=True)
    assert "3 tokens; the likeliest next: " in done.stdout
    with np.load(out) as file:
        assert file.files == ["logits"]
        logits = file["logits"]
    assert logits.dtype == np.float32
    expected = llama(read_config(folder), read_checkpoint(folder, np.float64), [1, 2, 3])
    np.testing.assert_array_equal(logits, expected.astype(np.float32))


def test_the_file_has_the_very_name_that_was_given(folder: Path, tmp_path: Path) -> None:
    assert command.main(["--model", str(folder), "--ids", "1", "--out", str(tmp_path / "logits")]) == 0
    assert (tmp_path / "logits").exists()


def test_another_config_may_be_given(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text(json.dumps(config_v5(llama_config(**SMALL, rms_norm_eps=0.5))))
    for arguments, name in (([], "own"), (["--config", str(other)], "other")):
        out = str(tmp_path / f"{name}.npz")
        assert command.main(["--model", str(folder), "--ids", "1,2", "--out", out, *arguments]) == 0
    with np.load(tmp_path / "own.npz") as own, np.load(tmp_path / "other.npz") as changed:
        assert np.abs(own["logits"] - changed["logits"]).max() > 1e-3


def test_trace_prints_a_line_a_step(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--model", str(folder), "--ids", "1,2,3", "--trace", "--dtype", "float32"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["name", "shape", "min", "max", "ms"]
    fields = next(line.split() for line in lines if line.startswith("layers.1.self_attn.q_rope"))
    assert fields[1] == "3×4×4"
    low, high, milliseconds = map(float, fields[2:])
    assert low < high
    assert milliseconds >= 0


def test_a_reader_that_leaves_ends_it_with_no_word(folder: Path) -> None:
    command = [sys.executable, "-m", "ref", "--model", str(folder), "--ids", "1,2,3", "--trace"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as done:
        assert done.stdout is not None
        assert done.stderr is not None
        done.stdout.close()
        assert done.stderr.read() == b""
    assert done.returncode == -signal.SIGPIPE


def test_layers_are_written(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "layers.npz"
    assert command.main(["--model", str(folder), "--ids", "1,2,3", "--layers", str(out)]) == 0
    with np.load(out) as file:
        arrays = dict(file)
    outputs = ("k_cached", "v_cached", "attn_out", "mlp_out", "residual")
    assert set(arrays) == {"logits", *(f"layers.{layer}.{name}" for layer in (0, 1) for name in outputs)}
    assert {array.dtype for array in arrays.values()} == {np.dtype(np.float32)}
    assert arrays["layers.1.k_cached"].shape == (3, 2, 4)
    assert arrays["layers.0.residual"].shape == (3, 16)


def test_a_prompt_is_tokenized(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vocab = {"a": 0, "b": 1, "c": 2, "[UNK]": 3}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert command.main(["--model", str(folder), "--prompt", "a c b z"]) == 0
    assert capsys.readouterr().out.startswith("4 tokens; ")
    assert command.main(["--model", str(folder), "--prompt", ""]) == 2
    assert "--prompt gives no token" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ids", "1,x"], "--ids must be integers separated by commas"),
        (["--ids", ""], "--ids must be integers separated by commas"),
        (["--ids", "1,32"], "--ids has 32; ids of this model are 0 to 31"),
        (["--ids=-1"], "--ids has -1"),
        (["--prompt", "hi"], "tokenizer.json, which does not exist; or give --ids"),
        (["--ids", "1", "--config", "absent.json"], "absent.json"),
        (["--ids", "1", "--model", "absent"], "--model must be a folder"),
        (["--ids", "1", "--model", "."], "*.safetensors; . has no config.json"),
        (["--ids", "99999999999999999999"], "--ids has 99999999999999999999"),
        (["--ids", "1", "--out", "absent/logits.npz"], "absent/logits.npz"),
    ],
)
def test_a_mistake_is_named(
    folder: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["--model", str(folder), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("python -m ref: error: ")
    assert message in error
    assert error.count("\n") == 1


def test_without_the_tokenizers_package_a_prompt_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "tokenizers", None)
    assert command.main(["--model", str(folder), "--prompt", "a"]) == 2
    assert "--prompt needs the package tokenizers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["BertModel"]}, "architecture 'BertModel' is not supported; ref knows LlamaForCausalLM, "),
        ({"hidden_act": "swoosh"}, "hidden_act is 'swoosh'; supported here: 'silu'"),
        ({"rope_scaling": {"type": "twisted"}}, "rope type 'twisted' is not supported; ref knows default, linear, "),
        ({"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1]}}, "rope type 'mrope' is not supported"),
        ({"quantization_config": {"quant_method": "quip"}}, "quant_method 'quip' is not supported; known are gptq, "),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 3, "group_size": 4}},
            "bits is 3; integer weights of 4 or 8 bits are",
        ),
        ({"quantization_config": {"quant_method": "awq", "bits": 8, "group_size": 4}}, "bits is 8; AWQ has 4"),
        ({"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}}, "fmt 'e5m2' is not supported; only 'e4m3'"),
    ],
)
@pytest.mark.parametrize("activations", ["float", "format"])
def test_what_ref_does_not_know_is_refused_before_a_weight_is_read(
    folder: Path, change: dict[str, Any], message: str, activations: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "model.safetensors").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    assert command.main(["--model", str(folder), "--ids", "1", "--activations", activations]) == 2
    assert message in capsys.readouterr().err


def test_compare_engine(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--model", str(folder), "--ids", "1,2,3,4", "--compare", "engine"]) == 0
    assert capfd.readouterr().out.splitlines()[-1] == "equal at all 13 places"
