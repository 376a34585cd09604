"""Damaged quantized folders: the same is refused whether a layer stays as it is stored, or is decoded."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance.golden_formats import format_model
from engine.errors import CheckpointError
from tests.engine.checkpoint.test_quantized import changed_tensors, load

MODULE = "model.layers.0.mlp.down_proj"
SCALES = {
    "gptq": "scales",
    "gptq_act_order": "scales",
    "awq": "scales",
    "ct_int4": "weight_scale",
    "ct_int8": "weight_scale",
    "ct_fp8_channel": "weight_scale",
    "ct_fp8_tensor": "weight_scale",
    "fp8_block": "weight_scale_inv",
}


def place_of(folder: Path, name: str) -> tuple[int, int]:
    """Of a tensor's bytes in its file."""
    data = (folder / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    begin, end = json.loads(data[8:start])[name]["data_offsets"]
    return start + begin, start + end


def with_zeros(folder: Path, name: str) -> None:
    begin, end = place_of(folder, name)
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[begin:end] = bytes(end - begin)
    (folder / "model.safetensors").write_bytes(data)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", SCALES)
def test_qnt_09_a_scale_of_zero_for_numbers_that_are_not(name: str, packed: bool, tmp_path: Path) -> None:
    folder = format_model(tmp_path, "llama", name)
    with_zeros(folder, f"{MODULE}.{SCALES[name]}")
    with pytest.raises(CheckpointError, match=r"down_proj.* has a (scale of )?0 for numbers that are not 0"):
        load(folder, packed)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["ct_int8", "ct_fp8_channel", "fp8_block"])
def test_a_scale_of_zero_for_zeros(name: str, packed: bool, tmp_path: Path) -> None:
    folder = format_model(tmp_path, "llama", name)
    for suffix in (SCALES[name], "weight"):
        with_zeros(folder, f"{MODULE}.{suffix}")
    load(folder, packed)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda tensors: tensors.update({f"{MODULE}.g_idx": tensors[f"{MODULE}.g_idx"].astype(np.int16)}), "I16"),
        (lambda tensors: tensors.update({f"{MODULE}.g_idx": tensors[f"{MODULE}.g_idx"][None]}), "list"),
        (lambda tensors: tensors.update({f"{MODULE}.bias": np.zeros(160, np.int16)}), "I16"),
    ],
)
def test_tensors_of_a_wrong_kind(
    change: Callable[[dict[str, Any]], Any], says: str, packed: bool, tmp_path: Path
) -> None:
    folder = format_model(tmp_path, "llama", "gptq")
    changed_tensors(folder, change)
    with pytest.raises(CheckpointError, match=rf"model\.layers\.0\.mlp\.down_proj.*{says}"):
        load(folder, packed)
