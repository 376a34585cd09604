"""python -m ref on quantized folders: the logits of the decoded weights, in every format, and clear refusals."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from conformance.golden_models import llama_config, llama_tensors
from ref import __main__ as command
from ref.config import parse_config, read_config
from ref.generate import generate
from ref.model.llama import llama
from ref.model.registry import forward
from ref.numerics import relative_error
from ref.quant.awq import awq_pack
from ref.quant.compressed_tensors import ct_pack
from ref.quant.fp8 import fp8_decode, fp8_quantize
from ref.quant.fp8_block import fp8_block_dequantize, fp8_block_quantize
from ref.quant.gptq import gptq_pack
from ref.quant.groups import grouped_dequantize, grouped_quantize, grouped_round
from ref.quant.int8 import int8_quantize
from ref.quant.scheme import KEEP_BYTES, read_weights
from tests.ref.quant.test_scheme import write_folder

SMALL: dict[str, Any] = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
Module = tuple[dict[str, np.ndarray], np.ndarray]  # tensors as stored, and what they mean


def grouped(weight: np.ndarray, kind: str, symmetric: bool) -> Module:
    found = grouped_quantize(weight, 4, 32, symmetric=symmetric)
    found = grouped_round(weight, 4, found.scales.astype(np.float16), found.zeros, found.g_idx)
    pack = {"gptq": gptq_pack, "awq": awq_pack, "ct": lambda found: ct_pack(found, symmetric=symmetric)}[kind]
    return pack(found), grouped_dequantize(found)


def per_row(weight: np.ndarray, kind: str) -> Module:
    codes, scale = int8_quantize(weight) if kind == "int8" else fp8_quantize(weight)
    numbers = codes if kind == "int8" else fp8_decode(codes, np.float64)
    return {"weight": codes, "weight_scale": scale[:, None]}, numbers * scale[:, None].astype(np.float64)


def tiles(weight: np.ndarray) -> Module:
    codes, scale = fp8_block_quantize(weight)
    return {"weight": codes, "weight_scale_inv": scale}, fp8_block_dequantize(codes, scale.astype(np.float64))


def ct(form: str, activations: bool = True, **weights: Any) -> dict[str, Any]:
    kind = "float" if form == "float-quantized" else "int"
    inputs = {"num_bits": 8, "type": kind, "strategy": "token", "dynamic": True} if activations else None
    group = {"targets": ["Linear"], "weights": {"type": kind, **weights}, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"g": group}, "ignore": ["lm_head"]}


FORMATS: dict[str, tuple[dict[str, Any], Any]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 32}, lambda w: grouped(w, "gptq", False)),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32}, lambda w: grouped(w, "awq", False)),
    "ct_int4": (
        ct("pack-quantized", False, num_bits=4, strategy="group", group_size=32, symmetric=False),
        lambda w: grouped(w, "ct", False),
    ),
    "ct_int8": (ct("int-quantized", num_bits=8, strategy="channel"), lambda w: per_row(w, "int8")),
    "ct_fp8": (ct("float-quantized", num_bits=8, strategy="channel"), lambda w: per_row(w, "fp8")),
    "deepseek": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, tiles),
}


def quantized_folder(folder: Path, name: str) -> tuple[Path, dict[str, np.ndarray]]:
    """A small Llama in one of FORMATS, and its decoded weights; embedding and head stay in floating point."""
    config, quantize = FORMATS[name]
    stored, decoded = {}, {}
    for key, tensor in llama_tensors(llama_config(**SMALL), seed=5).items():
        decoded[key] = tensor.astype(np.float64)
        stored[key] = tensor.astype(np.float32)
        if "_proj.weight" in key:
            del stored[key]
            tensors, decoded[key] = quantize(tensor.astype(np.float32))
            stored |= {f"{key.removesuffix('.weight')}.{suffix}": value for suffix, value in tensors.items()}
    return write_folder(folder, stored, config=llama_config(**SMALL) | {"quantization_config": config}), decoded


@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_the_decoded_weights(name: str, tmp_path: Path) -> None:
    folder, decoded = quantized_folder(tmp_path / "model", name)
    out = tmp_path / "logits.npz"
    assert command.main(["--model", str(folder), "--ids", "1,2,3", "--out", str(out)]) == 0
    expected = llama(parse_config(llama_config(**SMALL)), decoded, [1, 2, 3])
    with np.load(out) as file:
        np.testing.assert_array_equal(file["logits"], expected.astype(np.float32))


def as_quantized(x: np.ndarray, name: str) -> np.ndarray:
    """The activations that the format's kernel multiplies: 8 bits a number and a scale a token, or a token and 128."""
    if name not in ("ct_int8", "ct_fp8", "deepseek"):
        return x
    size = 128 if name == "deepseek" else x.shape[1]
    parts = []
    for start in range(0, x.shape[1], size):
        part = x[:, start : start + size]
        step = np.abs(part).max(axis=1, keepdims=True) / (127 if name == "ct_int8" else 448)
        codes = np.rint(part / step) if name == "ct_int8" else (part / step).astype(ml_dtypes.float8_e4m3fn)
        parts.append(codes.astype(np.float64) * step)
    return np.concatenate(parts, axis=1)


@pytest.mark.parametrize("keep_bytes", [0, KEEP_BYTES])
@pytest.mark.parametrize("name", FORMATS)
def test_format_multiplies_what_the_kernel_would(name: str, keep_bytes: int, tmp_path: Path) -> None:
    """Each layer's own input, rounded here, times the decoded weight. Only the order of sums is another."""
    folder, decoded = quantized_folder(tmp_path / "model", name)
    weights = read_weights(folder, np.float64, activations="format", keep_bytes=keep_bytes)
    seen: dict[str, np.ndarray] = {}
    forward(read_config(folder), weights, [1, 2, 3], trace=seen.__setitem__)
    inputs = {
        "self_attn.q_proj": "input_layernorm",
        "self_attn.o_proj": "self_attn.attention",
        "mlp.up_proj": "post_attention_layernorm",
        "mlp.down_proj": "mlp.gate_up_act",
    }
    for module, before in inputs.items():
        x = seen[f"layers.0.{before}"].reshape(3, -1)
        expected = as_quantized(x, name) @ decoded[f"model.layers.0.{module}.weight"].T
        np.testing.assert_allclose(seen[f"layers.0.{module}"], expected, rtol=0, atol=1e-9)
    assert relative_error(as_quantized(x, name), x) == pytest.approx(0, abs=0.04)
    logits = seen["norm"] @ decoded["lm_head.weight"].T  # not quantized here
    np.testing.assert_allclose(seen["logits"], logits, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", FORMATS)
def test_the_command_runs_a_format(name: str, tmp_path: Path) -> None:
    folder, _ = quantized_folder(tmp_path / "model", name)
    found = {}
    for how in ("float", "format"):
        out = tmp_path / f"{how}.npz"
        arguments = ["--ids", "1,2,3", "--trace", "--layers", str(out), "--activations", how]
        assert command.main(["--model", str(folder), *arguments]) == 0
        with np.load(out) as file:
            found[how] = dict(file)
    differs = relative_error(found["format"]["logits"], found["float"]["logits"])
    assert differs < 0.2
    assert (differs > 1e-3) == (name in ("ct_int8", "ct_fp8", "deepseek"))


def test_generation_reads_stored_weights(tmp_path: Path) -> None:
    folder, _ = quantized_folder(tmp_path / "model", "ct_int8")
    config = read_config(folder)
    kept, left = (read_weights(folder, activations="format", keep_bytes=n) for n in (KEEP_BYTES, 0))
    assert generate(config, left, [1, 2, 3], 8) == generate(config, kept, [1, 2, 3], 8)


def test_what_cannot_be_read_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = quantized_folder(tmp_path / "model", "gptq")
    config = json.loads((folder / "config.json").read_text())
    for change, message in (({"bits": 3}, "bits is 3"), ({"quant_method": "quip"}, "known are gptq, awq, fp8")):
        changed = config | {"quantization_config": config["quantization_config"] | change}
        (folder / "config.json").write_text(json.dumps(changed))
        assert command.main(["--model", str(folder), "--ids", "1"]) == 2
        assert message in capsys.readouterr().err
