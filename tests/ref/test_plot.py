"""ref.plot: each committed plot is what its command draws, and what is drawn is right."""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

from conformance.golden_models import rand_model
from ref.attention import attention_dense
from ref.plot import main
from ref.plot_data import FORMATS, attention_weights, gaussian, quantization_errors, rope_scores, wavelengths
from ref.svg import Panel, document, square, text

ROOT = Path(__file__).parents[2]
PLOTS = ("rope", "attention", "quantization", "roofline")
MAX_BYTES = 40_000
NUMBER = re.compile(r"-?\d+\.\d+")


def as_zeros(number: re.Match[str]) -> str:
    return "0." + "0" * len(number[0].partition(".")[2])


def assert_same_picture(drawn: str, stored: str) -> None:
    """The same text but for numbers, which may differ by one in the last decimal that is written."""
    assert NUMBER.sub(as_zeros, drawn) == NUMBER.sub(as_zeros, stored)
    ours, theirs = NUMBER.findall(drawn), NUMBER.findall(stored)
    for one, other in zip(ours, theirs, strict=True):
        assert abs(float(one) - float(other)) <= 1.01 * 10.0 ** -len(other.partition(".")[2]), (one, other)


@pytest.mark.parametrize("name", PLOTS)
def test_committed_plot(name: str, tmp_path: Path) -> None:
    stored = ROOT / "ref/course" / f"{name}.svg"
    assert main([name, "--out", str(tmp_path / "drawn.svg")]) == 0
    assert_same_picture((tmp_path / "drawn.svg").read_text("utf-8"), stored.read_text("utf-8"))
    assert stored.stat().st_size <= MAX_BYTES
    assert ET.parse(stored).getroot().tag.endswith("svg")


def test_every_committed_plot_has_a_command() -> None:
    assert {path.stem for path in (ROOT / "ref/course").glob("*.svg")} == set(PLOTS)


def test_comparison_can_fail() -> None:
    assert_same_picture('x="10.1"', 'x="10.2"')
    for other in ('x="10.3"', 'y="10.1"', 'x="10.11"', 'x="10.1" y="1.0"'):
        with pytest.raises(AssertionError):
            assert_same_picture('x="10.1"', other)


def test_scores_by_hand() -> None:
    """Distance 0 is the whole length; of a head of 2 only cos(distance) is left."""
    distances = np.array([0, 1, 7])
    np.testing.assert_allclose(rope_scores(1e4, distances, head_dim=2), np.cos(distances))
    assert rope_scores(5e5, distances)[0] == 1


def test_wavelengths_by_hand() -> None:
    """The fastest pair turns once in 2π tokens; linear makes every turn 8 times as long; llama3 leaves fast pairs."""
    default, linear, llama3 = (wavelengths(kind) for kind in ("default", "linear", "llama3"))
    assert default[0] == pytest.approx(2 * np.pi)
    np.testing.assert_allclose(linear, 8 * default)
    assert llama3[0] == default[0]
    assert llama3[-1] == pytest.approx(8 * default[-1])


@pytest.mark.parametrize("window", [None, 1, 3])
def test_weights_are_those_of_attention(window: int | None) -> None:
    """Times the values they give what attention_dense gives, with grouped heads too."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((6, heads, 8)) for heads in (4, 2, 2))
    weights = attention_weights(q, k, window)
    out = np.einsum("hij,jhd->ihd", weights, np.repeat(v, 2, axis=1))
    np.testing.assert_allclose(out, attention_dense(q, k, v, 8**-0.5, window), atol=1e-12)


def test_normal_numbers() -> None:
    """100 000 of them: mean within 4 / √n, variance within 4 √(2/n); a tenth of a percent beyond 3.29 σ."""
    x = gaussian(100, 1000)
    assert abs(x.mean()) < 4 / 316
    assert abs(x.var() - 1) < 4 * (2 / 1e5) ** 0.5
    assert np.count_nonzero(np.abs(x) > 3.29) == pytest.approx(100, abs=40)


def test_errors_are_of_the_size_that_the_format_allows() -> None:
    """Uniform rounding by a step s errs by s/√12: int8 a row with s = 2 · 3.2 σ / 254; bfloat16 and e4m3 by bits."""
    errors = quantization_errors()
    assert errors.keys() == FORMATS.keys()
    assert errors["int8, a row"][0] == pytest.approx(3.24 / 127 / 12**0.5, rel=0.1)
    assert 2.0**-9 / 12**0.5 < errors["bfloat16"][0] < 2.0**-8 / 3**0.5
    assert 2.0**-4 / 12**0.5 < errors["fp8, a tensor"][0] < 2.0**-3 / 12**0.5
    plain, outliers = errors["int4, a row"]
    assert outliers > 3 * plain
    assert errors["int4, 32, zeros"][1] < 1.2 * errors["int4, 32, zeros"][0]


def test_panel_by_hand() -> None:
    panel = Panel(10, 20, 100, 50, (1, 100), (0, 2), log_x=True)
    assert (panel.x(1), panel.x(10), panel.x(100)) == (10, 60, 110)
    assert (panel.y(0), panel.y(1), panel.y(2)) == (70, 45, 20)
    assert "&lt;" in document(1, 1, [text(0, 0, "<")])
    assert 'fill-opacity="0.25"' in square(0, 0, 1, 0.25)


def test_another_model(tmp_path: Path) -> None:
    """Two layers of four heads; one layer alone has half the maps; three tokens make six cells a head."""
    model = str(rand_model(tmp_path / "tiny"))
    for layer, num_maps in (([], 8), (["--layer", "1"], 4)):
        out = tmp_path / "a.svg"
        assert main(["attention", "--model", model, "--ids", "5,6,7", "--out", str(out), *layer]) == 0
        assert out.read_text("utf-8").count("fill-opacity") == 6 * num_maps


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ids", "a"], "--ids must be integers"),
        ([], "--ids must be integers"),
        (["--ids", "1", "--layer", "2"], "--layer is 2; the model has layers 0 to 1"),
        (["--ids", "5000"], "--ids has 5000; ids of this model are 0 to 999"),
        (["--ids", "99999999999999999999"], "--ids has 99999999999999999999"),
        (["--ids", "1", "--model", "absent"], "--model must be a folder with config.json and *.safetensors; absent is"),
    ],
)
def test_bad_input(arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(rand_model(tmp_path / "tiny"))
    assert main(["attention", "--model", model, "--out", str(tmp_path / "a.svg"), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "a.svg").exists()


def test_other_architectures_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(rand_model(tmp_path / "tiny", architectures=["Qwen2ForCausalLM"], model_type="qwen2"))
    assert main(["attention", "--model", model, "--ids", "1", "--out", str(tmp_path / "a.svg")]) == 2
    assert "Qwen2ForCausalLM; this plot knows Llama and Mistral" in capsys.readouterr().err


def test_runs_as_a_module(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ref.plot", "roofline", "--out", str(tmp_path / "a.svg")]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stderr == ""
