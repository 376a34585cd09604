"""Golden checkpoints of every family in every number format, made from a seed.

Sizes are such that an [out, in] weight has several tiles of 128 × 128, the last ones cut short, and several groups.
Every linear layer is quantized but the routers and the head, as in published files; what stays is stored in bfloat16.
Scales are rounded to their stored type before the weight is, as a quantizer does it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.golden_families import FAMILY_GOLDENS, family_tensors
from conformance.golden_models import GOLDEN_SEED, Config, as_stored, llama_config, random_ids, write_stored
from conformance.golden_smooth import smooth, with_outliers
from ref.numerics import round_to
from ref.quant.awq import awq_pack
from ref.quant.compressed_tensors import ct_pack
from ref.quant.fp8 import fp8_quantize, fp8_quantize_static
from ref.quant.fp8_block import fp8_block_quantize
from ref.quant.gptq import gptq_pack
from ref.quant.groups import GroupedInt, group_index, grouped_quantize, grouped_round
from ref.quant.int8 import int8_quantize, int8_quantize_static

Array = NDArray[Any]
Module = dict[str, Array]  # the tensors of a linear layer, by the last part of their names

PROMPT_LENGTH = 13
NUM_FORMAT_GREEDY = 16
KEPT_TOKENS = 2  # of what layers put out, the last ones of the prompt: they have seen all the others
KEPT_LAYER_OUTPUTS = ("attn_out", "mlp_out", "k_cached", "v_cached", "latent_cached", "expert_ids")
GROUP = 32
INPUT_SCALE = 2.0**-6  # of static activations; 448 of it are 7, which a few of them exceed

_SIZES: Config = {
    "vocab_size": 64,
    "hidden_size": 160,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "v_head_dim": 40,
    "num_nextn_predict_layers": 0,
}
_LLAMA = llama_config(max_position_embeddings=64)
FORMAT_FAMILIES: dict[str, Config] = {
    name: base | {key: size for key, size in _SIZES.items() if key in base} | {"torch_dtype": "bfloat16"}
    for name, base in {
        "llama": _LLAMA,
        **{name: FAMILY_GOLDENS[name] for name in ("qwen2", "mixtral", "qwen2_moe", "deepseek_v2", "deepseek_v3")},
    }.items()
}
LINEAR = ("_proj.weight", "_proj_with_mqa.weight", "w1.weight", "w2.weight", "w3.weight")


@dataclass(frozen=True, slots=True)
class Format:
    """A quantization_config, how a weight becomes a module's tensors, and the kind of its 8-bit activations.

    seed: one with which no activation of any family lies so near the middle of two steps that the float32 of the
        oracle and the float64 of ref round it to different sides. All numbers after it would be other ones then, by
        as much as quantization itself changes them.
    """

    config: Config | None
    quantize: Callable[[Array], Module] | None
    activations: str | None = None  # "int8" or "fp8"; None: always floating point
    smooth: bool = False
    seed: int = GOLDEN_SEED


def grouped(
    pack: Callable[[GroupedInt], Module],
    weight: Array,
    *,
    bits: int = 4,
    group_size: int = GROUP,
    symmetric: bool = False,
    act_order: bool = False,
    storage: str = "float16",
) -> Module:
    """Grouped integers; with act_order the groups are made of inputs in an order that the weight's size decides."""
    n = weight.shape[1]
    order = np.argsort(np.random.PCG64(n).random_raw(n), kind="stable") if act_order else np.arange(n)
    found = grouped_quantize(weight[:, order], bits, group_size, symmetric=symmetric)
    g_idx = np.empty(n, np.int64)
    g_idx[order] = group_index(n, group_size)
    scales = as_stored(found.scales, storage)
    packed = pack(grouped_round(weight, bits, round_to(found.scales, storage), found.zeros, g_idx))
    return packed | ({"weight_scale": scales} if "weight_scale" in packed else {})


def int8(weight: Array) -> Module:
    scale = round_to(int8_quantize(weight)[1][:, None], "bfloat16")
    return {"weight": int8_quantize_static(weight, scale), "weight_scale": as_stored(scale, "bfloat16")}


def fp8(weight: Array, axis: int | None = -1) -> Module:
    """A scale a row, or one for all (axis None)."""
    scale = round_to(fp8_quantize(weight, axis)[1].reshape(-1, 1), "bfloat16")
    stored = as_stored(scale if axis == -1 else scale[0], "bfloat16")
    return {"weight": fp8_quantize_static(weight, scale), "weight_scale": stored}


def fp8_static(weight: Array) -> Module:
    return fp8(weight, None) | {"input_scale": np.full(1, INPUT_SCALE, np.float32)}


def fp8_block(weight: Array) -> Module:
    codes, scale = fp8_block_quantize(weight)
    return {"weight": codes, "weight_scale_inv": scale}


def _gptq(**changed: Any) -> Config:
    config = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": False}
    return config | {"checkpoint_format": "gptq"} | changed


def _ct(name: str, weights: Config, inputs: Config | None = None) -> Config:
    kind = {"type": "float" if name == "float-quantized" else "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, **kind, **weights},
        "input_activations": inputs and {"num_bits": 8, **kind, **inputs},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", r"re:.*\.gate$", "re:.*shared_expert_gate$"],
    }


_TOKEN: Config = {"strategy": "token", "dynamic": True}
_INT8 = _ct("int-quantized", {"strategy": "channel"}, _TOKEN)
_INT4: Config = {"num_bits": 4, "strategy": "group", "group_size": GROUP}
_BLOCK: Config = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}

FORMATS: dict[str, Format] = {
    "bf16": Format(None, None),
    "fp8_block": Format(_BLOCK, fp8_block, "fp8"),
    "ct_fp8_tensor": Format(_ct("float-quantized", {"strategy": "tensor"}, _TOKEN), partial(fp8, axis=None), "fp8"),
    "ct_fp8_channel": Format(_ct("float-quantized", {"strategy": "channel"}, _TOKEN), fp8, "fp8"),
    "ct_fp8_static": Format(
        _ct("float-quantized", {"strategy": "tensor"}, {"strategy": "tensor", "dynamic": False}), fp8_static, "fp8"
    ),
    "awq": Format(
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
        partial(grouped, awq_pack),
    ),
    "gptq": Format(_gptq(), partial(grouped, gptq_pack)),
    "gptq_v2": Format(
        _gptq(checkpoint_format="gptq_v2"), partial(grouped, partial(gptq_pack, checkpoint_format="gptq_v2"))
    ),
    "gptq_act_order": Format(_gptq(desc_act=True), partial(grouped, gptq_pack, act_order=True)),
    "gptq_8bit": Format(
        _gptq(bits=8, group_size=-1, sym=True), partial(grouped, gptq_pack, bits=8, group_size=-1, symmetric=True)
    ),
    "ct_int8": Format(_INT8, int8, "int8", seed=3),
    "ct_int8_smooth": Format(_INT8, int8, "int8", smooth=True),
    "ct_int4": Format(
        _ct("pack-quantized", {**_INT4, "symmetric": False}),
        partial(grouped, partial(ct_pack, symmetric=False), storage="bfloat16"),
    ),
    "ct_int4_symmetric": Format(
        _ct("pack-quantized", _INT4),
        partial(grouped, partial(ct_pack, symmetric=True), symmetric=True, storage="bfloat16"),
    ),
}


def format_prompt() -> list[int]:
    return random_ids(_SIZES["vocab_size"], [PROMPT_LENGTH])[0]


def format_model(folder: str | Path, family: str, name: str) -> Path:
    """The checkpoint behind conformance/golden/formats/<family>-<name>.npz; returns the folder."""
    return format_folder(folder, FORMAT_FAMILIES[family], name)


def format_folder(folder: str | Path, config: Config, name: str) -> Path:
    """A model with this config whose weights are of a format, all from a seed; returns the folder."""
    folder, form = Path(folder), FORMATS[name]
    stored = _stored_tensors(json.dumps(config), name)
    if form.config is not None:
        config = config | {"quantization_config": form.config}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    write_stored(folder / "model.safetensors", stored)
    return folder


@lru_cache(maxsize=2)  # a case asks for the same several times
def _stored_tensors(config: str, name: str) -> dict[str, Array]:
    """config: as JSON."""
    form = FORMATS[name]
    tensors = family_tensors(json.loads(config), form.seed)
    if form.smooth:
        tensors = smooth(with_outliers(tensors))
    stored: dict[str, Array] = {}
    for key, tensor in tensors.items():
        if form.quantize is None or not key.endswith(LINEAR):
            stored[key] = as_stored(tensor, "bfloat16")
            continue
        module = key.removesuffix(".weight")
        stored |= {f"{module}.{suffix}": value for suffix, value in form.quantize(tensor).items()}
    return stored
