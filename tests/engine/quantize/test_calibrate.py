"""What a text does: GPTQ's errors are smaller where it matters, SmoothQuant changes nothing but the ranges."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from conformance.engine_run import make_runner, run_chunks
from conformance.golden_families import FAMILY_GOLDENS, family_tensors
from conformance.golden_models import GOLDENS, llama_config, llama_tensors, write_checkpoint
from engine.cpu.team import Team
from engine.errors import ConfigError
from engine.ops import cpu_ops
from engine.quantize.as_format import FormatModel
from engine.quantize.calibrate import build_layers, cut_windows, walk
from engine.quantize.source_model import open_model
from ref.checkpoint import read_checkpoint, widen
from ref.config import parse_config
from ref.model.registry import forward
from ref.quant.scheme import dequantize_module, read_weights
from ref.quant.scheme_config import read_quantization_config
from tests.engine.quantize.small import OUTLIERS, make, model_with_outliers, small_model, windows

Array = NDArray[Any]
FLOAT32 = 2.0**-24
DENSE: dict[str, Any] = {
    name: FAMILY_GOLDENS[name]
    for name in ("qwen2", "qwen2_window", "qwen3", "command_r", "command_r_plus", "minicpm", "qwen1", "cpm1")
} | {name: llama_config(**GOLDENS[name]) for name in ("llama3", "dynamic", "mistral", "bias")}


def ref_logits(folder: Path, ids: list[int], activations: str = "float") -> Array:
    config = parse_config(json.loads((folder / "config.json").read_text()))
    return forward(config, read_weights(folder, np.float64, activations=activations), ids)


def format_logits(folder: Path, text: NDArray[np.int32], activations: str = "format") -> Array:
    return np.concatenate(list(FormatModel(str(folder), activations).logits(text, 7)))


@pytest.mark.parametrize("family", DENSE)
def test_layers_one_by_one_are_the_engine(family: str, tmp_path: Path) -> None:
    """Every dense family, several windows at once: the logits of the engine."""
    config = DENSE[family]
    tensors = family_tensors(config, 1) if family in FAMILY_GOLDENS else llama_tensors(config, 1)
    folder = write_checkpoint(tmp_path / "model", config, tensors)
    text = np.random.default_rng(0).integers(4, config["vocab_size"], (3, 12)).astype(np.int32)
    prompts = [row.tolist() for row in text]
    wanted = np.concatenate(run_chunks(make_runner(folder, cpu_ops(), prompts), prompts, [12] * 3))
    assert np.abs(format_logits(folder, text) - wanted).max() < 1e-4 * max(1.0, float(np.abs(wanted).max()))


def few_words(count: int, seed: int = 0) -> NDArray[np.int32]:
    """Windows of eight tokens of the vocabulary."""
    return windows(count, 16, seed) % 8 + 4


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
def test_gptq_is_nearer_than_round_to_nearest(symmetric: bool, act_order: bool, tmp_path: Path) -> None:
    """On the text that it saw, and on another of the same few words: their activations lie in a few directions."""
    model, seen = small_model(tmp_path / "model"), few_words(48)
    common = {"symmetric": symmetric}
    folders = [
        make(model, tmp_path / "gptq", "int4-gptq", common | {"act_order": act_order}, windows=seen),
        make(model, tmp_path / "rtn", "int4-rtn", common),
    ]
    for text in (seen[:8], few_words(8, seed=5)):
        before = format_logits(model, text)
        gptq, rtn = (np.square(format_logits(folder, text) - before).mean() for folder in folders)
        assert gptq < 0.8 * rtn


def test_gptq_in_both_kinds_of_files_is_the_same(tmp_path: Path) -> None:
    """From float16 weights, so that scales are rounded to the same type."""
    model = small_model(tmp_path / "model", "float16")
    folders = [make(model, tmp_path / method, method) for method in ("int4-gptq", "int4-gptq-ct")]
    first, second = (
        dequantize_module(read_checkpoint(folder, None), config, "model.layers.1.mlp.down_proj")
        for folder in folders
        if (config := read_quantization_config(folder)) is not None
    )
    np.testing.assert_array_equal(first, second)


def test_smoothing_changes_nothing_but_ranges(tmp_path: Path) -> None:
    """The norm's columns times the weights' are what they were; the outliers are smaller, and all readers share s."""
    model = model_with_outliers(tmp_path / "model")
    folder = make(model, tmp_path / "out", "smoothquant")
    before, after = read_checkpoint(model, np.float64), read_checkpoint(folder, None)
    config = read_quantization_config(folder)
    assert config is not None
    for layer in range(2):
        for norm, readers in (
            ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
        ):
            name = f"model.layers.{layer}.{norm}.weight"
            factors = before[name] / widen(after[name], np.float64)
            assert np.median(factors[OUTLIERS]) > 3 * np.median(factors)
            for reader in readers:
                module = f"model.layers.{layer}.{reader}"
                wanted = before[f"{module}.weight"] * factors
                found = dequantize_module(after, config, module)
                step = np.abs(wanted).max(axis=1, keepdims=True) / 127
                assert (np.abs(found - wanted) <= 0.76 * step).all()


def test_smoothquant_is_nearer_than_int8_where_there_are_outliers(tmp_path: Path) -> None:
    model, text = model_with_outliers(tmp_path / "model"), windows(8, 16, seed=5)
    before = format_logits(model, text)
    smooth, plain = (
        np.square(format_logits(make(model, tmp_path / method, method), text) - before).mean()
        for method in ("smoothquant", "int8")
    )
    assert smooth < 0.5 * plain


def test_what_is_ignored_is_smoothed_too(tmp_path: Path) -> None:
    """k_proj and all of layer 1 stay in bfloat16, yet read a norm that was divided: their weights are multiplied."""
    model, text = model_with_outliers(tmp_path / "model"), windows(4, 16, seed=5)
    ignore = (r"re:.*k_proj", r"re:.*layers\.1\.")
    folder = make(model, tmp_path / "out", "smoothquant", ignore=ignore)
    before, found = format_logits(model, text), format_logits(folder, text)
    assert np.square(found - before).mean() < 0.05 * np.square(before).mean()
    stored = [read_checkpoint(path, None)["model.layers.1.self_attn.v_proj.weight"] for path in (model, folder)]
    assert stored[0].tobytes() != stored[1].tobytes()


@pytest.mark.parametrize("method", ["int8", "smoothquant", "fp8", "fp8-tensor", "fp8-static", "fp8-block", "int4-rtn"])
def test_as_format_is_ref(method: str, tmp_path: Path) -> None:
    """With 8-bit activations. A number near the middle of two steps may fall to either side in float32 and float64, so
    most logits are near and none is far."""
    folder, text = make(small_model(tmp_path / "model"), tmp_path / "out", method), windows(2, 16, seed=5)
    wanted = np.concatenate([ref_logits(folder, row.tolist(), "format") for row in text])
    plain = np.concatenate([ref_logits(folder, row.tolist()) for row in text])
    error = np.abs(format_logits(folder, text) - wanted)
    assert np.median(error) < 1e-5 * np.abs(wanted).max()
    if method != "int4-rtn":  # activations stay as they are
        assert np.sqrt(np.square(error).mean()) < 0.2 * np.sqrt(np.square(plain - wanted).mean())


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_w4a8_is_another_thing_than_w4a16(kind: str, tmp_path: Path) -> None:
    folder, text = make(small_model(tmp_path / "model"), tmp_path / "out", "int4-rtn"), windows(2, 16, seed=5)
    plain, found = format_logits(folder, text), format_logits(folder, text, kind)
    error = np.sqrt(np.square(found - plain).mean() / np.square(plain).mean())
    assert 1e-3 < error < 0.3


def test_static_scales_are_the_largest_inputs(tmp_path: Path) -> None:
    model, text = small_model(tmp_path / "model"), windows()
    folder = make(model, tmp_path / "out", "fp8-static", windows=text)
    found: dict[str, float] = {}
    opened, team = open_model(str(model)), Team(1)

    def multiply(spec: Any, x: Any) -> Any:
        found[spec.dest] = float(np.abs(x).max())
        return np.concatenate([team.matmul(x, opened.weight(spec, name).T) for name, _, _ in spec.modules()], axis=1)

    layers, _ = build_layers(opened, multiply)
    for _ in walk(opened, layers, text):
        pass
    stored = read_checkpoint(folder, None)
    for dest, name in (("layers.0.qkv_proj", "self_attn.v_proj"), ("layers.0.down_proj", "mlp.down_proj")):
        assert stored[f"model.layers.0.{name}.input_scale"].item() == pytest.approx(found[dest] / 448, rel=1e-6)


def test_windows_of_a_text() -> None:
    np.testing.assert_array_equal(cut_windows(list(range(10)), 9, 4, "text"), [[0, 1, 2, 3], [4, 5, 6, 7]])
    with pytest.raises(ConfigError, match="text: has 3 tokens; at least 4 are wanted"):
        cut_windows([1, 2, 3], 9, 4, "text")
