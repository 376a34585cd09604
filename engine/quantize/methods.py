"""The methods: what each of them keeps a weight as, and what config.json says of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from engine.errors import ConfigError
from ref.quant.fp8 import BLOCK

BITS = 4
ALPHA, DAMP = 0.5, 0.01  # of Settings
GROUP_SIZES = (128, 64, 32)  # tried in this order where none is asked for
# Of the scale with which a group's largest weight fits: the best is looked for. 15/14 and 15/16: it is just 7, or -8.
# Not where weights with zero points go to the nearest: less error, yet a KL of 0.32 for 0.29 (starter model, groups of
# 64), as the largest weights matter most. Without zero points it fell from 0.46 to 0.39, and GPTQ's from 0.30 to 0.22.
SHARES = (1.0, 15 / 14, 1.03, 15 / 16, 0.9, 0.86, 0.82, 0.78, 0.74, 0.7)


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user chose. group_size: columns that share a scale; 0: the method has no groups."""

    method: str
    group_size: int = 0
    symmetric: bool = True
    act_order: bool = False
    alpha: float = ALPHA
    damp: float = DAMP


@dataclass(frozen=True, slots=True)
class Method:
    """How weights are kept, and what must be known of the activations before.

    calibration: "absmax" of each input of a layer, or "hessian", its second moments; None: nothing.
    """

    packing: Literal["plain", "int8", "fp8", "fp8_tensor", "fp8_block", "gptq", "awq", "ct4"]
    says: str
    calibration: Literal["absmax", "hessian"] | None = None
    smooth: bool = False
    static: bool = False  # the scale of activations is in the checkpoint

    @property
    def has_groups(self) -> bool:
        return self.packing in ("gptq", "awq", "ct4")


METHODS: Mapping[str, Method] = {
    "bf16": Method("plain", "bfloat16, nothing quantized: a folder made of a GGUF file or of float32"),
    "int8": Method("int8", "8-bit integers, a scale a row; activations per token (compressed-tensors)"),
    "smoothquant": Method("int8", "the same after SmoothQuant, which needs a text", "absmax", smooth=True),
    "fp8": Method("fp8", "e4m3, a scale a row; activations per token (compressed-tensors)"),
    "fp8-tensor": Method("fp8_tensor", "e4m3, a scale a tensor; activations per token (compressed-tensors)"),
    "fp8-static": Method("fp8_tensor", "the same, scales of activations found on a text", "absmax", static=True),
    "fp8-block": Method("fp8_block", "e4m3, a scale for 128 × 128, as DeepSeek's; activations per token and 128"),
    "int4-rtn": Method("ct4", "4-bit integers in groups, round to nearest (compressed-tensors)"),
    "int4-gptq": Method("gptq", "4-bit integers in groups by GPTQ, in GPTQ's own files; needs a text", "hessian"),
    "int4-gptq-ct": Method("ct4", "the same in compressed-tensors' files", "hessian"),
    "awq-rtn": Method("awq", "4-bit integers with zero points in AWQ's files, round to nearest"),
}


def scale_dtype(method: Method, model_dtype: str) -> str:
    """The type of scales, in safetensors' words.

    model_dtype: that of the weights before. 4-bit scales of float32 weights are float16, which kernels read.
    """
    if method.packing in ("gptq", "awq"):
        return "F16"
    if method.packing == "fp8_block":
        return "F32"
    if model_dtype == "BF16":
        return "BF16"
    return "F16" if method.packing == "ct4" else "F32"


def check_sizes(settings: Settings, module: str, out_features: int, in_features: int) -> None:
    """Raises ConfigError for a weight that the method cannot cut, with what is possible."""
    method, size = METHODS[settings.method], settings.group_size
    if not method.has_groups:
        return
    if size != -1 and in_features % size:
        fitting = [str(group) for group in GROUP_SIZES if in_features % group == 0]
        raise ConfigError(
            f"{module} has {in_features} inputs, which groups of {size} do not divide; possible with --group-size are "
            f"{', '.join([*fitting, '-1 (one group a row)'])}, or --ignore that module"
        )
    odd = [f"{size} {side}" for size, side in ((out_features, "outputs"), (in_features, "inputs")) if size % 8]
    if odd and method.packing in ("gptq", "awq"):
        raise ConfigError(
            f"{module} has {odd[0]}, no multiple of 8, which {method.packing.upper()}'s files need; --ignore it, or "
            "use a method of compressed-tensors (int4-rtn, int4-gptq-ct)"
        )


def choose_group_size(sizes: set[int]) -> int:
    """The largest of GROUP_SIZES that divides all numbers of inputs; -1, one group a row, where none does."""
    return next((group for group in GROUP_SIZES if all(size % group == 0 for size in sizes)), -1)


def quantization_config(settings: Settings, ignored: list[str]) -> dict[str, Any] | None:
    """What config.json says; None: nothing is quantized. ignored: names of linear modules in floating point."""
    method = METHODS[settings.method]
    match method.packing:
        case "plain":
            return None
        case "gptq":
            return {
                "quant_method": "gptq",
                "bits": BITS,
                "group_size": settings.group_size,
                "sym": settings.symmetric,
                "desc_act": settings.act_order,
                "damp_percent": settings.damp,
                "checkpoint_format": "gptq",
                "lm_head": False,
                "modules_to_not_convert": ignored,
            }
        case "awq":
            return {
                "quant_method": "awq",
                "bits": BITS,
                "group_size": settings.group_size,
                "zero_point": True,
                "version": "gemm",
                "modules_to_not_convert": ignored,
            }
        case "fp8_block":
            return {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": [BLOCK, BLOCK],
                "modules_to_not_convert": ignored,
            }
        case _:
            return _ct_config(settings, ignored)


def _ct_config(settings: Settings, ignored: list[str]) -> dict[str, Any]:
    method = METHODS[settings.method]
    if method.packing == "ct4":
        strategy = "channel" if settings.group_size == -1 else "group"
        weights: dict[str, Any] = {
            "num_bits": BITS,
            "type": "int",
            "symmetric": settings.symmetric,
            "strategy": strategy,
        }
        weights["group_size"] = None if settings.group_size == -1 else settings.group_size
        name, inputs = "pack-quantized", None
    else:
        kind = "int" if method.packing == "int8" else "float"
        name = f"{kind}-quantized"
        common = {"num_bits": 8, "type": kind, "symmetric": True}
        weights = common | {"strategy": "tensor" if method.packing == "fp8_tensor" else "channel"}
        inputs = common | {"strategy": "tensor" if method.static else "token", "dynamic": not method.static}
    group = {
        "targets": ["Linear"],
        "weights": weights | {"dynamic": False},
        "input_activations": inputs,
        "output_activations": None,
        "format": name,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignored,
        "kv_cache_scheme": None,
    }
