"""ref.quant.scheme: from the words of a config to weights, and whole folders."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance.golden_models import write_stored
from ref.checkpoint import read_checkpoint
from ref.quant.awq import awq_pack
from ref.quant.fp8 import fp8_quantize
from ref.quant.fp8_block import fp8_block_dequantize, fp8_block_quantize
from ref.quant.gptq import gptq_pack
from ref.quant.groups import grouped_dequantize, grouped_quantize
from ref.quant.scheme import dequantize_checkpoint, dequantize_module, read_weights
from ref.quant.scheme_config import module_scheme, parse_quantization_config, read_quantization_config

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32}
DEEPSEEK = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def write_folder(folder: Path, tensors: dict[str, np.ndarray], **configs: Any) -> Path:
    """A checkpoint with config.json, or the file of another name; uint8 is written as codes of e4m3."""
    folder.mkdir(exist_ok=True)
    write_stored(folder / "model.safetensors", tensors)
    for name, content in configs.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def named(module: str, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {f"{module}.{suffix}": tensor for suffix, tensor in tensors.items()}


@pytest.fixture
def weight() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((16, 192)).astype(np.float32)


def test_gptq_and_awq_and_float_modules(weight: np.ndarray, tmp_path: Path) -> None:
    packed = grouped_quantize(weight, 4, 32, symmetric=False)
    norm, bias = np.ones(16, np.float32), np.arange(16, dtype=np.float16)
    for config, tensors in ((GPTQ, gptq_pack(packed)), (AWQ, awq_pack(packed))):
        stored = {**named("a.q", tensors), "a.q.bias": bias, "norm.weight": norm, "lm_head.weight": weight}
        folder = write_folder(tmp_path / config["quant_method"], stored, config={"quantization_config": config})
        found = read_weights(folder, np.float64)
        assert sorted(found) == ["a.q.bias", "a.q.weight", "lm_head.weight", "norm.weight"]
        np.testing.assert_allclose(found["a.q.weight"], grouped_dequantize(packed), rtol=2**-11)
        np.testing.assert_array_equal(found["lm_head.weight"], weight)
        np.testing.assert_array_equal(found["a.q.bias"], bias)
        assert {tensor.dtype for tensor in found.values()} == {np.dtype(np.float64)}


def test_deepseek_tiles(weight: np.ndarray, tmp_path: Path) -> None:
    """weight_scale_inv multiplies, in spite of its name."""
    codes, scale = fp8_block_quantize(weight)
    stored = {"a.weight": codes, "a.weight_scale_inv": scale, "a.layernorm.weight": np.ones(3, np.float32)}
    found = read_weights(write_folder(tmp_path, stored, config={"quantization_config": DEEPSEEK}), np.float64)
    np.testing.assert_array_equal(found["a.weight"], fp8_block_dequantize(codes, scale.astype(np.float64)))
    np.testing.assert_allclose(found["a.weight"], weight, atol=np.abs(weight).max() / 16)
    assert sorted(found) == ["a.layernorm.weight", "a.weight"]


def test_fp8_per_tensor(weight: np.ndarray) -> None:
    codes, scale = fp8_quantize(weight, axis=None)
    config = parse_quantization_config({"quant_method": "fp8", "activation_scheme": "static"})
    tensors = {"a.weight": codes, "a.weight_scale": scale, "a.input_scale": np.array(0.5, np.float32)}
    np.testing.assert_allclose(dequantize_module(tensors, config, "a"), weight, atol=np.abs(weight).max() / 16)
    for wrong in (0, -1, np.nan):  # QNT-09
        with pytest.raises(ValueError, match="module a: input_scale must be finite and positive"):
            dequantize_module(tensors | {"a.input_scale": np.array(wrong)}, config, "a")
    with pytest.raises(ValueError, match=r"module a: .*input_scale is missing"):
        dequantize_module({"a.weight": codes, "a.weight_scale": scale}, config, "a")


def test_compressed_tensors(weight: np.ndarray) -> None:
    codes, scale = fp8_quantize(weight)
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    config = parse_quantization_config(
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
            "ignore": ["lm_head"],
        }
    )
    tensors = named("a", {"weight": codes, "weight_scale": scale[:, None]})
    np.testing.assert_allclose(dequantize_module(tensors, config, "a"), weight, atol=np.abs(weight).max() / 16)
    assert module_scheme(config, "lm_head") is None
    with pytest.raises(ValueError, match="module lm_head: the config leaves it in floating point, but it is stored as"):
        dequantize_module(named("lm_head", {"weight": codes, "weight_scale": scale}), config, "lm_head")


@pytest.mark.parametrize("group_size", [-1, 64])
def test_qnt_08_group_minus_one_and_the_other_config_files(weight: np.ndarray, tmp_path: Path, group_size: int) -> None:
    """QNT-08: group −1; the config in a file of its own; a float layer stays float."""
    packed = grouped_quantize(weight, 4, group_size, symmetric=True)
    old = {"bits": 4, "group_size": group_size, "desc_act": False, "sym": True}
    gptq = write_folder(tmp_path / "g", named("a", gptq_pack(packed)), config={}, quantize_config=old)
    awq_config = {"w_bit": 4, "q_group_size": group_size, "zero_point": True, "version": "GEMM"}
    awq = write_folder(tmp_path / "a", named("a", awq_pack(packed)), config={}, quant_config=awq_config)
    for folder in (gptq, awq):
        np.testing.assert_allclose(read_weights(folder)["a.weight"], grouped_dequantize(packed), rtol=2**-10)
    float_folder = write_folder(tmp_path / "f", {"a.weight": weight}, config={"quantization_config": None})
    assert read_quantization_config(float_folder) is None
    np.testing.assert_array_equal(read_weights(float_folder)["a.weight"], weight)


def test_qnt_08_modules_to_not_convert() -> None:
    """QNT-08: an entry names a module or a part of its dotted path, never a part of a word."""
    config = parse_quantization_config({**AWQ, "modules_to_not_convert": ["lm_head", "mlp.gate", "model.layers.1"]})
    left = ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.up_proj"]
    taken = ["model.layers.0.mlp.gate_proj", "model.layers.11.mlp.up_proj"]
    assert [module_scheme(config, name) is None for name in left + taken] == [True] * 3 + [False] * 2


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' is not supported; known are gptq, awq, fp8"),
        ({"bits": 4}, "quant_method None"),
        ({**GPTQ, "bits": 2}, "bits is 2"),
        ({**DEEPSEEK, "fmt": "e5m2"}, "fmt 'e5m2'"),
        ({**DEEPSEEK, "scale_fmt": "ue8m0"}, "scale_fmt 'ue8m0'"),
        ({**DEEPSEEK, "activation_scheme": "static"}, "weight_block_size"),
        ({**DEEPSEEK, "activation_scheme": "often"}, "activation_scheme 'often'"),
        ({**DEEPSEEK, "weight_block_size": [128]}, "weight_block_size"),
        ({**DEEPSEEK, "weight_block_size": [0, 128]}, "weight_block_size"),
        ({**DEEPSEEK, "weight_block_size": "128"}, "weight_block_size"),
        ({**AWQ, "modules_to_not_convert": "lm_head"}, "modules_to_not_convert must be a list of modules, found 'lm_h"),
    ],
)
def test_what_is_not_known_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_quantization_config(config)


@pytest.mark.parametrize(
    ("suffix", "change", "message"),
    [
        ("scales", lambda x: np.where(x == x.flat[0], np.nan, x), "scales must be finite, found nan"),
        ("scales", lambda x: np.where(x == x.flat[0], np.inf, x), "scales must be finite, found inf"),
        ("scales", lambda x: x.astype(np.int32), "scales must be floating point, found int32"),
        ("qweight", lambda x: x.astype(np.float32), "qweight must be a matrix of int32, found float32"),
        ("qweight", lambda x: x.reshape(-1), "qweight must be a matrix of int32, found int32"),
        ("qzeros", lambda x: x.astype(np.int64), "qzeros must be a matrix of int32, found int64"),
        ("g_idx", lambda x: x.astype(np.float32), "g_idx must be a list of integers, found float32"),
        ("g_idx", lambda x: x + 1, "g_idx must hold 192 numbers from 0 to 5"),
    ],
)
def test_qnt_09_damaged_tensors_are_refused_by_name(
    weight: np.ndarray, suffix: str, change: Callable[[np.ndarray], np.ndarray], message: str
) -> None:
    tensors = gptq_pack(grouped_quantize(weight, 4, 32, symmetric=False))
    tensors[suffix] = change(tensors[suffix])
    with pytest.raises(ValueError, match=f"module a: {message}"):
        dequantize_module(named("a", tensors), parse_quantization_config(GPTQ), "a")


@pytest.mark.parametrize("scale", ["weight_scale", "weight_scale_inv"])
def test_a_scale_beside_a_weight_in_floating_point_is_refused(weight: np.ndarray, scale: str) -> None:
    """Taken as it is, the weight would be that many times too large, or too small."""
    tensors = named("a", {"weight": weight, scale: np.ones((1, 2), np.float32)})
    with pytest.raises(ValueError, match=f"module a: its weight is in floating point, but {scale} is there too"):
        dequantize_module(tensors, parse_quantization_config(DEEPSEEK), "a")


def test_codes_that_are_no_matrix_are_refused(weight: np.ndarray) -> None:
    codes, scale = fp8_block_quantize(weight)
    tensors = named("a", {"weight": codes.reshape(-1), "weight_scale_inv": scale})
    with pytest.raises(ValueError, match=r"module a: weight must be a matrix, found shape \[3072\]"):
        dequantize_module(tensors, parse_quantization_config(DEEPSEEK), "a")


def test_integers_that_nobody_uses_are_refused(weight: np.ndarray) -> None:
    config = parse_quantization_config(GPTQ)
    with pytest.raises(ValueError, match=r"tensor a\.table is int32, and no quantized module uses it"):
        dequantize_checkpoint({"a.table": np.ones(3, np.int32)}, config)
    with pytest.raises(ValueError, match="module a: a GPTQ module needs qweight, qzeros and scales; qzeros is missing"):
        dequantize_checkpoint({"a.qweight": np.ones((4, 8), np.int32)}, config)
    with pytest.raises(ValueError, match="module a: a GPTQ module needs qweight"):
        dequantize_checkpoint({"a.weight": np.ones((4, 8), np.uint8)}, config)


def test_a_float_reader_does_not_take_codes_for_numbers(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, {"a.weight": np.ones((2, 2), np.uint8)}, config={})
    with pytest.raises(ValueError, match=r"tensor a\.weight is F8_E4M3; ref reads F64, F32, F16, BF16"):
        read_checkpoint(folder)
    assert read_checkpoint(folder, None)["a.weight"].dtype == np.uint8
