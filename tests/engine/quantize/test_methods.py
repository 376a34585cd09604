"""Every method: what is written is read alike by the engine and by ref, and stands for the weights before."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from conformance.engine_run import make_runner, run_chunks
from engine.ops import cpu_ops
from engine.quantize.encode import fp8_codes, layout, quantize_weight
from engine.quantize.methods import METHODS, choose_group_size, scale_dtype
from ref.checkpoint import read_checkpoint, widen
from ref.config import parse_config
from ref.model.registry import forward
from ref.quant.fp8 import FP8_MIDPOINTS, FP8_TABLE, fp8_encode
from ref.quant.fp8_block import fp8_block_quantize
from ref.quant.groups import grouped_dequantize, grouped_quantize
from ref.quant.scheme import dequantize_module, read_weights
from ref.quant.scheme_config import read_quantization_config
from tests.engine.quantize.small import make, settings_for, small_model, windows

FLOAT32 = 2.0**-24
VARIANTS: list[tuple[str, str, dict[str, Any]]] = [
    *(("bfloat16", method, {}) for method in METHODS),
    *((dtype, method, {}) for dtype in ("float16", "float32") for method in ("smoothquant", "fp8-tensor", "int4-rtn")),
    ("float32", "int4-gptq", {"symmetric": False}),
    ("bfloat16", "int4-rtn", {"symmetric": False}),
    ("bfloat16", "int4-rtn", {"group_size": -1}),
    ("bfloat16", "int4-gptq", {"act_order": True}),
    ("bfloat16", "awq-rtn", {"group_size": -1}),
]


def ids() -> list[int]:
    return windows(1, 13, seed=3)[0].tolist()


@pytest.mark.parametrize(("dtype", "method", "settings"), VARIANTS)
def test_engine_and_ref_read_it_alike(dtype: str, method: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """Both decode to the same numbers; what is left is the order of float32 sums."""
    folder = make(small_model(tmp_path / "model", dtype), tmp_path / "out", method, settings)
    config = parse_config(json.loads((folder / "config.json").read_text()))
    wanted = forward(config, read_weights(folder, np.float64), ids())
    rounded = forward(config, read_weights(folder, np.float32), ids())
    found = run_chunks(make_runner(folder, cpu_ops(), [ids()]), [ids()], [5])[0]
    assert np.abs(found - wanted).max() < 4 * np.abs(rounded - wanted).max() + 64 * FLOAT32 * np.abs(wanted).max()


@pytest.mark.parametrize("method", METHODS)
def test_other_readers_find_what_is_planned(method: str, tmp_path: Path) -> None:
    """The package safetensors reads the file, aligned, each tensor as ref does."""
    folder = make(small_model(tmp_path / "model"), tmp_path / "out", method)
    file = folder / "model.safetensors"
    if "F8" not in str(file.read_bytes()[:4000]):  # NumPy has no type for these
        theirs = load_file(file)
        ours = read_checkpoint(folder, None)
        assert theirs.keys() == ours.keys()
        for name, tensor in theirs.items():
            assert tensor.tobytes() == ours[name].tobytes()
            assert tensor.flags.aligned, name


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("method", ["bf16", "int8", "fp8", "fp8-tensor", "fp8-block", "int4-rtn", "awq-rtn"])
def test_weights_are_near_those_before(method: str, dtype: str, tmp_path: Path) -> None:
    model = small_model(tmp_path / "model", dtype)
    folder = make(model, tmp_path / "out", method)
    before, config = read_checkpoint(model, np.float64), read_quantization_config(folder)
    stored = read_checkpoint(folder, None)
    for module in ("model.layers.1.self_attn.q_proj", "model.layers.0.mlp.down_proj"):
        weight = before[f"{module}.weight"]
        if config is None:
            assert (np.abs(widen(stored[f"{module}.weight"]) - weight) <= 2.0**-8 * np.abs(weight)).all()
            continue
        error = np.abs(dequantize_module(stored, config, module) - weight)
        packing = METHODS[method].packing
        if packing.startswith("fp8"):  # half of the last of 3 bits, or of the smallest number
            largest = np.abs(weight).max()
            assert (error <= np.abs(weight) / 16 * 1.01 + largest / 448 * 2.0**-9).all()
        elif packing == "int8":  # half a step, and what a scale that bfloat16 rounds down by 2⁻⁹ cuts off 127 steps
            assert (error <= (0.5 + 127 * 2.0**-9 + 0.01) * np.abs(weight).max(axis=1, keepdims=True) / 127).all()
        elif packing == "ct4":  # the scale that was looked for is better than the one with which the largest fits
            plain = grouped_quantize(weight, 4, 32, symmetric=True)
            assert np.square(error).sum() < 0.95 * np.square(grouped_dequantize(plain) - weight).sum()
        else:
            parts = weight.reshape(len(weight), -1, 32)
            step = (np.maximum(parts.max(-1), 0) - np.minimum(parts.min(-1), 0)) / 15
            assert (error.reshape(parts.shape) <= 0.51 * step[..., None]).all()


def test_what_is_not_linear_stays_byte_by_byte(tmp_path: Path) -> None:
    model = small_model(tmp_path / "model", tie_word_embeddings=False, attention_bias=True)
    before, after = (read_checkpoint(path, None) for path in (model, make(model, tmp_path / "out", "int8")))
    kept = [name for name in before if not name.endswith("_proj.weight")]
    assert {"lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"} < set(kept)
    assert any(name.endswith("q_proj.bias") for name in kept)
    assert all(before[name].tobytes() == after[name].tobytes() for name in kept)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(24, 64), (136, 96), (8, 32)])
def test_layout_foretells_the_tensors(method: str, shape: tuple[int, int]) -> None:
    weight = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    for changed in ({}, {"group_size": -1}) if METHODS[method].has_groups else ({},):
        settings = settings_for(method, **changed)
        scales = scale_dtype(METHODS[method], "BF16")
        found = quantize_weight(settings, scales, weight, None, 3.0)
        planned = layout(settings, scales, *shape)
        assert {name: array.shape for name, array in found.items()} == {n: one.shape for n, one in planned.items()}


@pytest.mark.parametrize("method", [name for name in METHODS if name != "bf16"])
def test_qnt_09_rows_of_zeros(method: str) -> None:
    """QNT-09: no scale is 0, and none is too small for its type; zeros stay zeros, and other rows what they are."""
    weight = np.random.default_rng(0).standard_normal((16, 64)).astype(np.float32)
    weight[3], weight[5], weight[7] = 0, 1e-12, -1e-40
    scales = scale_dtype(METHODS[method], "BF16")
    with np.errstate(all="raise", under="ignore"):
        found = quantize_weight(settings_for(method), scales, weight, None, 0.0)
    for name, array in found.items():
        if "scale" in name:
            bits = {"BF16": np.uint16}.get(scales, array.dtype)
            assert (array.view(bits) != 0).all() if array.dtype == np.uint16 else (array > 0).all(), name


def test_fp8_codes_are_those_of_ref() -> None:
    """At every tie, at every number, and between; beyond ±448 the largest."""
    rng = np.random.default_rng(0)
    spread = rng.standard_normal(20_000) * 10.0 ** rng.uniform(-6, 3, 20_000)
    ties = np.concatenate([FP8_MIDPOINTS, FP8_TABLE[:127], [0.0, 2.0**-10, 448.1, 480, 1e30]])
    x = np.concatenate([spread, ties, -ties, np.nextafter(ties, 1e9), np.nextafter(ties, -1)]).astype(np.float32)
    np.testing.assert_array_equal(fp8_codes(x), fp8_encode(x))


def test_fp8_blocks_are_those_of_ref() -> None:
    """Ragged on both sides."""
    weight = np.random.default_rng(0).standard_normal((300, 200)).astype(np.float32)
    codes, scale = fp8_block_quantize(weight)
    found = quantize_weight(settings_for("fp8-block"), "F32", weight)
    np.testing.assert_array_equal(found["weight"], codes)
    np.testing.assert_array_equal(found["weight_scale_inv"], scale)


def test_rows_in_parts_are_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = np.random.default_rng(0).standard_normal((300, 64)).astype(np.float32)
    for method in ("int8", "fp8", "fp8-tensor", "fp8-block", "int4-rtn", "awq-rtn"):
        monkeypatch.setattr("engine.quantize.encode.AT_ONCE", 1 << 30)
        rows = weight[: 296 if METHODS[method].packing == "awq" else 300]
        whole = quantize_weight(settings_for(method), "F32", rows)
        monkeypatch.setattr("engine.quantize.encode.AT_ONCE", 64 * 128)
        parts = quantize_weight(settings_for(method), "F32", rows)
        for name, array in whole.items():
            np.testing.assert_array_equal(parts[name], array)


@pytest.mark.parametrize(("sizes", "group"), [({576, 1536}, 64), ({4096, 14336}, 128), ({32, 96}, 32), ({100, 64}, -1)])
def test_group_size_where_none_is_asked_for(sizes: set[int], group: int) -> None:
    assert choose_group_size(sizes) == group


def test_config_says_what_is_left_alone(tmp_path: Path) -> None:
    model = small_model(tmp_path / "model")
    ignore = ("model.layers.0.mlp.down_proj", r"re:.*layers\.1\.self_attn")
    for method in ("int8", "fp8-block", "int4-gptq", "awq-rtn"):
        folder = make(model, tmp_path / method, method, ignore=ignore)
        words = json.loads((folder / "config.json").read_text())["quantization_config"]
        left = words.get("ignore") or words["modules_to_not_convert"]
        names = [f"model.layers.1.self_attn.{name}_proj" for name in "qkvo"]
        assert set(left) == {"lm_head", "model.layers.0.mlp.down_proj", *names}
        stored = read_checkpoint(folder, None)
        assert all(f"{name}.weight" in stored for name in left)
        config = parse_config(json.loads((folder / "config.json").read_text()))
        wanted = forward(config, read_weights(folder, np.float64), ids())
        found = run_chunks(make_runner(folder, cpu_ops(), [ids()]), [ids()], [5])[0]
        assert np.abs(found - wanted).max() < 1e-4 * np.abs(wanted).max()
