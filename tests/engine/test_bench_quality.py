"""The benchmark of quality: its sums by hand, and models of which the answer is known."""

import argparse
import contextlib
import json
import math
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from engine.bench.__main__ import main
from engine.bench.divergence import Divergence, Sums, log_softmax
from engine.bench.quality import BOUNDS, Report, Row, exp, format_of, measure, own_text, table
from engine.checkpoint.source import resolve
from engine.errors import ConfigError
from ref.config import parse_config
from ref.model.registry import forward
from ref.quant.scheme import read_weights
from tests.engine.checkpoint.files import llama_gguf_tensors, write_gguf
from tests.engine.quantize.small import make, small_model
from tests.engine.tiny_tokenizers import byte_level_tokenizer, write_tokenizer

VOCAB = 320


def arguments(model: Path, *against: Path, **changed: Any) -> argparse.Namespace:
    given = {"text": None, "tokens": 60, "window": 20, "device": "cpu", "dtype": "auto", "activations": "engine"}
    values = {"model": str(model), "against": [str(path) for path in against], "steps": 0, "json": None}
    return argparse.Namespace(**given | values | changed)


def model_with_text(folder: Path) -> Path:
    write_tokenizer(small_model(folder, vocab_size=VOCAB), byte_level_tokenizer())
    return folder


def test_sums_by_hand() -> None:
    """Two windows of two tokens, of a vocabulary of two: each window foretells one token."""
    windows = np.array([[0, 1], [1, 0]], np.int32)
    before = np.log(np.array([[0.25, 0.75], [0.5, 0.5], [0.5, 0.5], [0.5, 0.5]], np.float32))
    after = np.log(np.array([[0.75, 0.25], [0.5, 0.5], [0.25, 0.75], [0.5, 0.5]], np.float32))
    with Divergence(windows, 2) as divergence:
        first = divergence.judge(iter([before[:2], before[2:]]))
        second = divergence.judge(iter([after[:2], after[2:] + 5]))  # logits may be shifted
    assert first.num_tokens == second.num_tokens == 2
    assert first.nll == pytest.approx(-math.log(0.75) - math.log(0.5), rel=1e-6)
    assert (first.kl, first.same) == (0.0, 2)
    assert second.nll == pytest.approx(-math.log(0.25) - math.log(0.25), rel=1e-6)
    kl = 0.25 * math.log(0.25 / 0.75) + 0.75 * math.log(0.75 / 0.25)
    kl += 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert second.kl == pytest.approx(kl, rel=1e-5)
    assert second.same == 0


def test_log_softmax_of_large_logits() -> None:
    np.testing.assert_allclose(
        log_softmax(np.array([[1e4, 1e4 - 1]], np.float32)), [[-0.3132617, -1.3132617]], rtol=1e-6
    )


def test_a_model_against_itself(tmp_path: Path) -> None:
    model = model_with_text(tmp_path / "model")
    report = measure(arguments(model, model, steps=2))
    first, second = report.rows
    assert report.num_tokens == 57
    assert first.perplexity == second.perplexity
    assert second.ratio == 1.0
    assert second.kl == 0.0
    assert second.top1 == 1.0
    assert second.ms is not None


@pytest.mark.parametrize("activations", ["engine", "format"])
def test_a_quantized_model_as_ref_has_it(activations: str, tmp_path: Path) -> None:
    """Perplexity and KL of what ref answers: for decoded weights and for 8-bit activations."""
    model = model_with_text(tmp_path / "model")
    folder = make(model, tmp_path / "out", "int8")
    text = tmp_path / "text.txt"
    text.write_text("a day in the harbour, said the keeper, is a day of rain and rope")
    row = measure(arguments(model, folder, text=text, tokens=40, activations=activations)).rows[1]
    ids = byte_level_tokenizer().encode(text.read_text()).ids
    wanted = Sums()
    for first in range(0, 40, 20):
        window = ids[first : first + 20]
        p, q = (logprobs(path, window, activations if path == folder else "engine") for path in (model, folder))
        wanted += Sums(19, -q[np.arange(19), window[1:]].sum(), (np.exp(p) * (p - q)).sum(), 0)
    assert row.perplexity == pytest.approx(math.exp(wanted.nll / wanted.num_tokens), rel=1e-3)
    assert row.kl == pytest.approx(wanted.kl / wanted.num_tokens, rel=0.05)
    assert row.kl > 1e-6


def logprobs(folder: Path, ids: list[int], activations: str) -> Any:
    config = parse_config(json.loads((folder / "config.json").read_text()))
    how = "format" if activations == "format" else "float"
    return log_softmax(forward(config, read_weights(folder, np.float64, activations=how), ids))[:-1]


def test_the_command_fails_where_a_bound_is_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = model_with_text(tmp_path / "model")
    folder = make(model, tmp_path / "out", "int4-rtn")
    command = ["quality", "--model", str(model), "--against", str(folder), "--device", "cpu", "--steps", "0"]
    command += ["--tokens", "40", "--window", "20", "--json", str(tmp_path / "report.json")]
    monkeypatch.setattr("engine.bench.__main__.set_up_logging", lambda role, level: None)
    monkeypatch.setitem(BOUNDS, "int4", 1e9)
    assert main(command) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert [row["format"] for row in report["rows"]] == ["floating point", "int4 g32"]
    assert "PASSED ITS BOUND" not in capsys.readouterr().out
    monkeypatch.setitem(BOUNDS, "int4", 0.0)
    assert main(command) == 1
    assert "PASSED ITS BOUND" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (["--window", "65"], "--window 65: .* has 64 positions"),
        (["--window", "1"], "--window must be at least 2"),
        (["--window", "0"], "--window: 0 is below 1"),
        (["--tokens", "0"], "--tokens: 0 is below 1"),
        (["--steps", "-1"], "--steps: -1 is below 0"),
        (["--json", "nowhere/report.json"], "--json: nowhere/report.json cannot be written: No such file"),
    ],
)
def test_what_cannot_be_measured_is_said_before(
    changed: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("engine.bench.__main__.set_up_logging", lambda role, level: None)
    monkeypatch.setattr("engine.bench.quality._engine", None)  # nothing may be loaded
    model = model_with_text(tmp_path / "model")
    command = ["quality", "--model", str(model), "--against", str(model), "--device", "cpu", "--tokens", "80"]
    with contextlib.suppress(SystemExit):
        assert main([*command, *changed]) == 1
    assert re.search(says, capsys.readouterr().err)


def test_a_model_as_wrong_as_can_be() -> None:
    assert (exp(0.0), exp(709.0), exp(711.0)) == (1.0, math.exp(709.0), math.inf)
    assert math.isnan(exp(math.nan))


@pytest.mark.parametrize(
    "changed", [["--quant", "int8"], ["--w4a8", "fp8"], ["--arch", "sm_86"], ["--cold-start"], ["--only", "prefill"]]
)
def test_what_is_for_shapes_is_not_ignored(
    changed: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("engine.bench.__main__.set_up_logging", lambda role, level: None)
    assert main(["offline", *changed]) == 1
    assert f"{changed[0]}: is for --model-shape; give one of llama" in capsys.readouterr().err


def test_tokenizers_must_be_alike(tmp_path: Path) -> None:
    model, other = model_with_text(tmp_path / "model"), small_model(tmp_path / "other", vocab_size=VOCAB)
    write_tokenizer(other, byte_level_tokenizer())
    config = json.loads((other / "tokenizer.json").read_text())
    config["model"]["merges"] = []
    (other / "tokenizer.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="its tokenizer cuts the text in other tokens"):
        measure(arguments(model, other))
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json to read a text with"):
        measure(arguments(small_model(tmp_path / "third", vocab_size=VOCAB), model))


def test_own_text_is_long_enough() -> None:
    assert len(own_text()) > 60_000


def test_table() -> None:
    rows = (Row("a", "int8", 163.2, None, 20.0, 1.001, 1.02, 0.001, 0.98), Row("b", "x", 1, 2, 30, 1.5, 1.2, 0.3, 0.5))
    shown = table(Report("cpu", "engine", "text", 10, 5, rows)).splitlines()
    assert shown[2].split() == ["a", "int8", "163.2", "-", "20.0000", "1.0010", "1.020", "0.001000", "98.00%"]
    assert shown[3].endswith("PASSED ITS BOUND")


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        (gguf.GGMLQuantizationType.Q4_0, ("int4", " g32, GGUF's Q4_0")),
        (gguf.GGMLQuantizationType.Q8_0, ("int8", " g32, GGUF's Q8_0")),
        (gguf.GGMLQuantizationType.F16, ("floating point", "")),
    ],
)
def test_the_format_of_a_gguf_file(kind: Any, wanted: tuple[str, str], tmp_path: Path) -> None:
    """Norms stay as they are; what most of the weights are is said."""
    tensors = llama_gguf_tensors(np.random.default_rng(0))
    quantize = {name: kind for name, tensor in tensors.items() if tensor.ndim == 2}
    path = write_gguf(tmp_path / "small.gguf", tensors, quantize=quantize)
    assert format_of(resolve(str(path))) == wanted
    assert wanted[0] in BOUNDS


def test_it_says_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("engine.progress.LINE_S", 0.0)
    model = model_with_text(tmp_path / "model")
    measure(arguments(model, model))
    assert "model: 20 of 60 tokens\n" in capsys.readouterr().err
