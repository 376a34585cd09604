"""The command: what it makes of a folder and of a GGUF file, and what it says of arguments that do not go together."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.checkpoint.loader import load_model_config
from engine.checkpoint.source import resolve
from engine.llm import LLM, SamplingParams
from engine.quantize.__main__ import main
from tests.engine.checkpoint.files import GGUF_VOCAB, llama_gguf_tensors, write_gguf
from tests.engine.quantize.small import small_model
from tests.engine.tiny_tokenizers import byte_level_tokenizer, write_tokenizer

VOCAB = 320  # as many as the tokenizer has, and some more


def folder_with_text(folder: Path) -> Path:
    write_tokenizer(small_model(folder, vocab_size=VOCAB), byte_level_tokenizer())
    (folder / "generation_config.json").write_text('{"temperature": 0.5}')
    (folder / "pytorch_model.bin").write_bytes(b"not ours")
    return folder


@pytest.fixture(autouse=True)
def logging_as_it_is(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("engine.quantize.__main__.set_up_logging", lambda role, level: None)
    caplog.set_level("INFO")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the cat said hello to the world. " * 30, encoding="utf-8")
    return path


@pytest.mark.parametrize("method", ["int8", "smoothquant", "int4-gptq"])
def test_a_folder_that_is_served(method: str, tmp_path: Path, text: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, out = folder_with_text(tmp_path / "model"), tmp_path / "out"
    options = ["--calibration", str(text), "--calibration-tokens", "128", "--window", "32"] if method != "int8" else []
    command = ["--model", str(model), "--out", str(out), "--method", method, *options]
    assert main(command) == 0
    names = {path.name for path in out.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} < names
    assert "generation_config.json" in names
    assert not names & {"pytorch_model.bin", "quantize.journal"}
    llm = LLM(str(out), device="cpu", num_gpu_blocks_override=8)
    (output,) = llm.generate(["hello world"], SamplingParams(temperature=0, max_tokens=3))
    assert len(output.token_ids) == 3
    assert main(command) == 0
    assert "nothing was written" in caplog.text


def test_a_gguf_file_becomes_a_folder(tmp_path: Path) -> None:
    tokens = ["t", "0", "t0", *(f"t{index}" for index in range(3, GGUF_VOCAB))]
    words = {"ggml.model": "gpt2", "ggml.tokens": tokens, "ggml.merges": ["t 0"], "ggml.eos_token_id": 2}
    tensors = llama_gguf_tensors(np.random.default_rng(0))
    path = write_gguf(tmp_path / "model.gguf", tensors, tokenizer=words)
    assert main(["--model", str(path), "--out", str(tmp_path / "out"), "--method", "bf16"]) == 0
    before, after = (load_model_config(resolve(str(source))) for source in (path, tmp_path / "out"))
    assert before.rope == after.rope
    assert before.tie_word_embeddings == after.tie_word_embeddings
    assert (before.n_layers, before.hidden_size, before.norm_eps) == (after.n_layers, after.hidden_size, after.norm_eps)
    ids = [[3, 7, 9, 11]]
    found = [
        LLM(str(source), device="cpu", num_gpu_blocks_override=8).generate(
            ids, SamplingParams(temperature=0, max_tokens=1, logprobs=20)
        )[0]
        for source in (path, tmp_path / "out")
    ]
    first, second = (output.completions[0].logprobs for output in found)
    assert first is not None
    assert second is not None
    assert first[0].logprob == pytest.approx(second[0].logprob, abs=0.05)  # bfloat16


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--method", "int8", "--group-size", "64"], "--group-size: --method int8 has no groups"),
        (["--method", "int4-rtn", "--group-size", "0"], "--group-size 0: must be a number of columns, or -1"),
        (["--method", "fp8", "--asymmetric"], "--asymmetric: --method fp8 has no zero points"),
        (["--method", "bf16", "--ignore", "lm_head"], "--ignore: --method bf16 quantizes nothing"),
        (["--method", "int8", "--alpha", "0.7"], "--alpha: --method int8 does not smooth"),
        (["--method", "awq-rtn", "--damp", "0.1"], "--damp: --method awq-rtn is without GPTQ"),
        (["--method", "int8", "--ignore", "re:["], "--ignore re:[: is no regular expression"),
        (["--method", "int4-rtn", "--act-order"], "only GPTQ's own files say which inputs make a group"),
        (["--method", "smoothquant", "--alpha", "1.5"], "--alpha 1.5: must be from 0 to 1"),
        (["--method", "int4-gptq", "--damp", "0"], "--damp 0.0: must be above 0 and below 1"),
        (["--method", "int4-gptq", "--window", "0"], "--window 0: must be at least 1"),
        (["--method", "int4-gptq"], "--method int4-gptq: needs --calibration FILE"),
        (
            ["--method", "int4-gptq", "--calibration", "nowhere.txt"],
            "--calibration nowhere.txt: cannot be read as UTF-8",
        ),
        (["--method", "int4-gptq", "--window", "60", "--calibration", "TEXT"], "at least 60 are wanted"),
    ],
)
def test_what_does_not_go_together(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, short = folder_with_text(tmp_path / "model"), tmp_path / "short.txt"
    short.write_text("hello")
    arguments = [str(short) if word == "TEXT" else word for word in arguments]
    assert main(["--model", str(model), "--out", str(tmp_path / "out"), *arguments]) == 1
    assert says in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_without_a_tokenizer(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = small_model(tmp_path / "model")
    command = ["--model", str(model), "--out", str(tmp_path / "out"), "--method", "int4-gptq"]
    assert main([*command, "--calibration", str(text)]) == 1
    assert "has no tokenizer.json to read it with" in capsys.readouterr().err


def test_help_names_every_method(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in ("bf16", "smoothquant", "fp8-block", "int4-gptq", "awq-rtn"))


def words(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def test_ignore_can_be_repeated(tmp_path: Path) -> None:
    model, out = folder_with_text(tmp_path / "model"), tmp_path / "out"
    command = ["--model", str(model), "--out", str(out), "--method", "int8", "--ignore", r"re:.*layers\.0\..*o_proj"]
    assert main([*command, "--ignore", "model.layers.1.mlp.up_proj"]) == 0
    assert words(out)["ignore"] == ["lm_head", "model.layers.0.self_attn.o_proj", "model.layers.1.mlp.up_proj"]
