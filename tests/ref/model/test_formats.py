"""Families with experts and latent attention in every number format: the logits are those of the decoded weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance.golden_families import FAMILY_GOLDENS, family_tensors
from ref import __main__ as command
from ref.config import parse_config
from ref.model.registry import forward
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
def test_logits_are_those_of_the_decoded_weights(family: str, form: str, tmp_path: Path) -> None:
    config, decoded = quantized_folder(tmp_path / "model", family, form)
    out = tmp_path / "logits.npz"
    assert command.main(["--model", str(tmp_path / "model"), "--ids", "5,6,7", "--out", str(out)]) == 0
    expected = forward(parse_config(config), decoded, [5, 6, 7]).astype(np.float32)
    with np.load(out) as file:
        np.testing.assert_array_equal(file["logits"], expected)
