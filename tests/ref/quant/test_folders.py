"""python -m ref on quantized folders: the logits of the decoded weights, in every format, and clear refusals."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance.golden_models import llama_config, llama_tensors
from ref import __main__ as command
from ref.config import parse_config
from ref.model.llama import llama
from ref.quant.awq import awq_pack
from ref.quant.compressed_tensors import ct_pack
from ref.quant.fp8 import fp8_decode, fp8_quantize
from ref.quant.fp8_block import fp8_block_dequantize, fp8_block_quantize
from ref.quant.gptq import gptq_pack
from ref.quant.groups import grouped_dequantize, grouped_quantize, grouped_round
from ref.quant.int8 import int8_quantize
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


def test_what_cannot_be_read_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = quantized_folder(tmp_path / "model", "gptq")
    config = json.loads((folder / "config.json").read_text())
    for change, message in (({"bits": 3}, "bits is 3"), ({"quant_method": "quip"}, "known are gptq, awq, fp8")):
        changed = config | {"quantization_config": config["quantization_config"] | change}
        (folder / "config.json").write_text(json.dumps(changed))
        assert command.main(["--model", str(folder), "--ids", "1"]) == 2
        assert message in capsys.readouterr().err
