"""Families in every number format: the logits are those of the decoded weights, or of every layer's format."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance.golden_families import FAMILY_GOLDENS, family_tensors
from ref import __main__ as command
from ref.config import parse_config, read_config
from ref.model import run as run_module
from ref.model.registry import forward, weight_shapes
from ref.numerics import relative_error
from ref.quant import stored
from ref.quant.coded import CodedWeight
from ref.quant.scheme import read_weights
from ref.quant.stored import StoredWeight
from tests.ref.quant.test_folders import FORMATS
from tests.ref.quant.test_scheme import write_folder

# groups of 32 inputs and words of 8 outputs must fit
SIZES: dict[str, int] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_hidden_layers": 2,
}
FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3")
LINEAR = ("_proj.weight", "_proj_with_mqa.weight", "w1.weight", "w2.weight", "w3.weight")  # routers stay as they are


def quantized_folder(folder: Path, family: str, form: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The config without its quantization_config, and the decoded weights."""
    quantization_config, quantize = FORMATS[form]
    config = {**FAMILY_GOLDENS[family], **{key: n for key, n in SIZES.items() if key in FAMILY_GOLDENS[family]}}
    stored, decoded = {}, {}
    for name, tensor in family_tensors(config, seed=5).items():
        if not name.endswith(LINEAR) or "eh_proj" in name:
            stored[name], decoded[name] = tensor, tensor.astype(np.float64)
            continue
        tensors, decoded[name] = quantize(tensor)
        stored |= {f"{name.removesuffix('.weight')}.{suffix}": value for suffix, value in tensors.items()}
    write_folder(folder, stored, config=config | {"quantization_config": quantization_config})
    return config, decoded


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_decoded_weights(
    family: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoded once or when used, there in slices; and as the format, both ways too."""
    config, decoded = quantized_folder(tmp_path / "model", family, form)
    out = tmp_path / "logits.npz"
    assert command.main(["--model", str(tmp_path / "model"), "--ids", "5,6,7", "--out", str(out)]) == 0
    expected = forward(parse_config(config), decoded, [5, 6, 7]).astype(np.float32)
    with np.load(out) as file:
        np.testing.assert_array_equal(file["logits"], expected)
    kept = read_weights(tmp_path / "model", np.float64, activations="format")
    wanted = {"float": expected, "format": forward(parse_config(config), kept, [5, 6, 7])}
    monkeypatch.setattr(stored, "ROWS", 96)  # the head has 128
    for activations, logits in wanted.items():
        left = read_weights(tmp_path / "model", np.float64, activations=activations, keep_bytes=0)
        found = forward(parse_config(config), left, [5, 6, 7])
        np.testing.assert_allclose(found, logits, rtol=0, atol=2e-6)  # expected is in float32


def test_an_expert_that_no_token_chose_is_not_decoded(tmp_path: Path) -> None:
    quantized_folder(tmp_path / "model", "qwen3_moe", "gptq")
    used: set[str] = set()

    def watched(name: str, weight: StoredWeight) -> StoredWeight:
        return replace(weight, unpack=lambda: (used.add(name), weight.unpack())[1])

    weights = read_weights(tmp_path / "model", np.float64, keep_bytes=0)
    shown: dict[str, np.ndarray] = {}
    watching = {name: watched(name, weight) for name, weight in weights.items()}
    forward(read_config(tmp_path / "model"), watching, [5], trace=shown.__setitem__)
    routed = {name: ids for name, ids in shown.items() if name.endswith("expert_ids")}
    assert routed
    for name, ids in routed.items():
        chosen, key = set(map(int, ids.ravel())), f"model.{name.removesuffix('expert_ids')}experts."
        experts = {int(name.removeprefix(key).split(".")[0]) for name in used if name.startswith(key)}
        assert experts == chosen
    assert len(used) < len(weights)


QUANTIZABLE = sorted(set(FAMILY_GOLDENS) - {"cpm1"})  # the layers of GPT-2 are no Linear, and its head is the embedding


@pytest.mark.parametrize("family", QUANTIZABLE)
def test_every_linear_layer_of_every_family_goes_through_its_format(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Routers, gates and heads too, if they are quantized; only MLA's kv_b_proj, which is absorbed, is decoded."""
    config = FAMILY_GOLDENS[family]
    shapes = weight_shapes(parse_config(config))
    quantization_config, quantize = FORMATS["ct_int8"]
    stored_tensors, quantized = {}, set[str]()
    for name, tensor in family_tensors(config, seed=5).items():
        module = name.removesuffix(".weight")
        is_linear = name in shapes and tensor.ndim == 2 and "norm" not in name and "embed" not in name
        if not is_linear or module.endswith(("wte", "relative_attention_bias")):
            stored_tensors[name] = tensor
            continue
        quantized.add(name)
        stored_tensors |= {f"{module}.{suffix}": value for suffix, value in quantize(tensor)[0].items()}
    quantization_config = {**quantization_config, "ignore": []}
    write_folder(tmp_path, stored_tensors, config=config | {"quantization_config": quantization_config})
    weights = read_weights(tmp_path, np.float64, activations="format")
    names, multiplied = {id(weight): name for name, weight in weights.items()}, set[str]()

    def watched(x: np.ndarray, weight: Any, *rest: Any, **words: Any) -> np.ndarray:
        multiplied.add(names[id(weight)])
        assert isinstance(weight, CodedWeight) == (names[id(weight)] in quantized)
        return stored.weight_linear(x, weight, *rest, **words)

    ids = np.arange(5, 45)  # enough for every expert
    plain = forward(read_config(tmp_path), read_weights(tmp_path, np.float64), ids)
    monkeypatch.setattr(run_module, "weight_linear", watched)
    logits = forward(read_config(tmp_path), weights, ids)
    absorbed = {name for name in quantized if "kv_b_proj" in name}
    assert quantized - absorbed <= multiplied
    assert not absorbed & multiplied
    assert 1e-4 < relative_error(logits, plain) < 0.5
