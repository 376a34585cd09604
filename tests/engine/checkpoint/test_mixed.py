"""Checkpoints of which only some modules are quantized, or not all alike: the config's words decide."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance.engine_run import make_runner, run_chunks
from conformance.golden_families import family_tensors
from conformance.golden_formats import FORMAT_FAMILIES, Module, format_prompt, fp8, fp8_block, grouped, int8
from conformance.golden_models import GOLDEN_SEED, as_stored, write_stored
from engine.checkpoint.loader import load_model_config, load_weights
from engine.checkpoint.quantized import keep_packed
from engine.checkpoint.source import resolve
from engine.errors import CheckpointError
from engine.models.registry import ARCHITECTURES
from engine.ops import cpu_ops
from ref.config import parse_config
from ref.model.registry import forward
from ref.quant.awq import awq_pack
from ref.quant.compressed_tensors import ct_pack
from ref.quant.gptq import gptq_pack
from ref.quant.scheme import read_weights

Quantize = Callable[[np.ndarray[Any, Any]], Module]

FLOAT32 = 2.0**-24
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False}
INT4: Quantize = partial(grouped, gptq_pack)
INT4_SYMMETRIC: Quantize = partial(grouped, partial(ct_pack, symmetric=True), symmetric=True)
TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
INT8_GROUP = {
    "targets": ["re:.*self_attn.*"],
    "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
    "input_activations": TOKEN,
    "format": "int-quantized",
}
INT4_GROUP = {
    "targets": ["Linear"],
    "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True},
    "format": "pack-quantized",
}
CT = {"quant_method": "compressed-tensors", "quantization_status": "compressed", "format": "mixed-precision"}


def mixed_model(folder: Path, config: dict[str, Any], formats: dict[str, Quantize | None]) -> Path:
    """formats: regular expression of modules → how; the first that matches. Others are in bfloat16."""
    stored: dict[str, Any] = {}
    base = FORMAT_FAMILIES["llama"]
    for key, tensor in family_tensors(base, GOLDEN_SEED).items():
        module = key.removesuffix(".weight")
        quantize = next((how for pattern, how in formats.items() if re.match(pattern, module)), None)
        if quantize is None:
            stored[key] = as_stored(tensor, "bfloat16")
            continue
        stored |= {f"{module}.{suffix}": value for suffix, value in quantize(tensor).items()}
    (folder / "config.json").write_text(json.dumps(base | {"quantization_config": config}))
    write_stored(folder / "model.safetensors", stored)
    return folder


MIXED: dict[str, tuple[dict[str, Any], dict[str, Quantize | None], dict[str, str]]] = {
    # config, formats, and what some layers become
    "gptq-dynamic": (
        {**GPTQ, "dynamic": {r"-:.*\.0\.mlp": {}, r"+:.*\.1\.self_attn\.v_proj": {"bits": 8, "group_size": -1}}},
        {
            r".*\.0\.mlp": None,
            r".*\.1\.self_attn\.v_proj": partial(grouped, gptq_pack, bits=8, group_size=-1),
            r".*_proj": INT4,
        },
        {
            **{"layers.0.gate_up_proj": "dense", "layers.1.gate_up_proj": "packed4_gated"},
            **{"layers.0.qkv_proj": "packed4", "layers.1.qkv_proj": "dense", "layers.1.o_proj": "packed4"},
        },
    ),
    "gptq-one-group-act-order": (
        {**GPTQ, "group_size": -1, "desc_act": True},
        {r".*_proj": partial(grouped, gptq_pack, group_size=-1, act_order=True)},
        {"layers.0.qkv_proj": "packed4", "layers.1.gate_up_proj": "packed4_gated"},
    ),
    "awq-one-group": (
        {"quant_method": "awq", "bits": 4, "group_size": -1, "zero_point": True},
        {r".*_proj": partial(grouped, awq_pack, group_size=-1)},
        {"layers.0.qkv_proj": "packed4", "layers.1.gate_up_proj": "packed4_gated"},
    ),
    "gptq-8-bit-act-order": (
        {**GPTQ, "bits": 8, "desc_act": True},
        {r".*_proj": partial(grouped, gptq_pack, bits=8, act_order=True)},
        {"layers.0.qkv_proj": "dense"},
    ),
    "gptq-head": (
        {**GPTQ, "lm_head": True},
        {r".*_proj|lm_head": INT4},
        {"lm_head": "packed4", "layers.0.o_proj": "packed4"},
    ),
    "ct-two-groups": (
        {**CT, "config_groups": {"a": INT8_GROUP, "b": INT4_GROUP}, "ignore": ["lm_head", "re:.*1.mlp.down_proj"]},
        {r".*self_attn.*_proj": int8, r".*1\.mlp\.down_proj": None, r".*_proj": INT4_SYMMETRIC},
        {
            **{"layers.0.qkv_proj": "int8", "layers.0.gate_up_proj": "packed4_gated", "lm_head": "dense"},
            **{"layers.0.down_proj": "packed4", "layers.1.down_proj": "dense"},
        },
    ),
    "ct-head": (
        {**CT, "config_groups": {"a": {**INT8_GROUP, "targets": ["Linear"]}}, "ignore": []},
        {r".*_proj|lm_head": int8},
        {"lm_head": "int8", "layers.1.down_proj": "int8"},
    ),
    "fp8-not-converted": (
        {
            **{"quant_method": "fp8", "activation_scheme": "dynamic"},
            "modules_to_not_convert": ["model.layers.0.mlp", "layers.1.self_attn.k_proj"],
        },
        {r".*0\.mlp": None, r".*1\.self_attn\.k_proj": None, r".*_proj": fp8},
        {"layers.0.gate_up_proj": "dense", "layers.1.gate_up_proj": "fp8", "layers.1.qkv_proj": "dense"},
    ),
}


@pytest.mark.parametrize("name", MIXED)
def test_qnt_08_each_module_is_what_the_config_says(name: str, tmp_path: Path) -> None:
    config, formats, wanted = MIXED[name]
    folder, prompt = mixed_model(tmp_path, config, formats), format_prompt()
    source = resolve(str(folder))
    model_config = load_model_config(source)
    weight_map = keep_packed(ARCHITECTURES[model_config.architecture].weight_map(model_config))
    linears = load_weights(source, weight_map, progress=False).linears
    assert {dest: linears[dest].format for dest in wanted} == wanted
    fields = parse_config(json.loads((folder / "config.json").read_text()))
    truth = forward(fields, read_weights(folder, np.float64), prompt)
    rounded = forward(fields, read_weights(folder, np.float32), prompt)
    for packed in (False, True):
        found = run_chunks(make_runner(folder, cpu_ops(), [prompt], packed=packed), [prompt], [5])[0]
        assert np.abs(found - truth).max() < 4 * np.abs(rounded - truth).max() + 64 * FLOAT32 * np.abs(truth).max()


def load(folder: Path, packed: bool = True) -> None:
    source = resolve(str(folder))
    config = load_model_config(source)
    weight_map = ARCHITECTURES[config.architecture].weight_map(config)
    load_weights(source, keep_packed(weight_map) if packed else weight_map, progress=False)


@pytest.mark.parametrize("packed", [False, True])
def test_a_module_that_the_config_leaves_alone_but_is_quantized(packed: bool, tmp_path: Path) -> None:
    folder = mixed_model(tmp_path, GPTQ, {r".*_proj|lm_head": INT4})
    with pytest.raises(CheckpointError, match=r"lm_head\.qweight"):
        load(folder, packed)


@pytest.mark.parametrize("packed", [False, True])
def test_two_scales_are_refused(packed: bool, tmp_path: Path) -> None:
    def both(weight: np.ndarray[Any, Any]) -> Module:
        module = fp8_block(weight)
        return module | {"weight_scale": module["weight_scale_inv"]}

    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    folder = mixed_model(tmp_path, config, {r".*1\.mlp\.down_proj": both, r".*_proj": fp8_block})
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.down_proj: weight_scale and weight_scale_inv are both"):
        load(folder, packed)


SCALE_NAMES = {"gptq": "scales", "int8": "weight_scale", "fp8": "weight_scale"}
CONFIGS: dict[str, tuple[dict[str, Any], Quantize]] = {
    "gptq": (GPTQ, INT4),
    "int8": ({**CT, "config_groups": {"a": {**INT8_GROUP, "targets": ["Linear"]}}, "ignore": ["lm_head"]}, int8),
    "fp8": ({"quant_method": "fp8", "activation_scheme": "dynamic"}, fp8),
}


@pytest.mark.parametrize("value", [np.nan, np.inf, 0.0])
@pytest.mark.parametrize("name", CONFIGS)
def test_scales_that_make_no_sense_are_found_by_name(name: str, value: float, tmp_path: Path) -> None:
    config, quantize = CONFIGS[name]

    def spoilt(weight: np.ndarray[Any, Any]) -> Module:
        module = quantize(weight)
        scale = module[SCALE_NAMES[name]].copy()
        scale.reshape(-1)[7] = value
        return module | {SCALE_NAMES[name]: scale}

    folder = mixed_model(tmp_path, config, {r".*1\.mlp\.up_proj": spoilt, r".*_proj": quantize})
    found = "0 for numbers that are not 0" if value == 0 else "must be finite"
    with pytest.raises(CheckpointError, match=rf"layers\.1\.mlp\.up_proj.*{found}"):
        load(folder)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_scale_of_0_for_zeros_is_taken(name: str, tmp_path: Path) -> None:
    """As ref quantizes a row of zeros (QNT-09)."""
    config, quantize = CONFIGS[name]

    def with_zeros(weight: np.ndarray[Any, Any]) -> Module:
        weight = weight.copy()
        weight[3] = 0
        return quantize(weight)

    load(mixed_model(tmp_path, config, {r".*1\.mlp\.up_proj": with_zeros, r".*_proj": quantize}))
