"""From a checkpoint's quantization_config to the weight of a module, whatever its format.

quant_method "gptq", "awq", "fp8" (DeepSeek's tiles, or one scale a tensor) and "compressed-tensors" are known; any
other word is refused with the list. A module that is stored in floating point is taken as it is. Tensors come as
`ref.checkpoint.read_checkpoint(folder, None)` gives them: integers as stored, codes of e4m3 as uint8.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ref.checkpoint import read_checkpoint
from ref.quant.awq import AwqConfig, awq_unpack, parse_awq_config
from ref.quant.coded import QuantWeight, dequantize_weight
from ref.quant.compressed_tensors import ct_coded, ct_unpack
from ref.quant.compressed_tensors_config import CtConfig, CtScheme, ct_scheme, parse_ct_config
from ref.quant.gptq import GptqConfig, gptq_unpack, parse_gptq_config

Array = NDArray[Any]
Tensors = Mapping[str, Array]

METHODS = ("gptq", "awq", "fp8", "compressed-tensors")
SUFFIXES = (
    *("weight", "qweight", "qzeros", "scales", "g_idx"),
    *("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
    *("weight_scale_inv", "input_scale"),
)


@dataclass(frozen=True, slots=True)
class QuantConfig:
    """A quantization_config that is understood; not_converted names modules that stay in floating point."""

    method: GptqConfig | AwqConfig | CtConfig | CtScheme  # CtScheme: quant_method fp8, the same for all modules
    not_converted: tuple[str, ...] = ()


def parse_quantization_config(config: Mapping[str, Any]) -> QuantConfig:
    """quantization_config of a config.json, or the content of quantize_config.json.

    Raises:
        ValueError: names the method or key that is not supported, and those that are.
    """
    name = config.get("quant_method") or ("gptq" if "desc_act" in config else None)  # old GPTQ files do not say
    listed = config.get("modules_to_not_convert") or config.get("ignored_layers") or ()
    if name == "gptq":
        return QuantConfig(parse_gptq_config(config), tuple(listed))
    if name == "awq":
        return QuantConfig(parse_awq_config(config), tuple(listed))
    if name == "fp8":
        return QuantConfig(_parse_fp8_config(config), tuple(listed))
    if name == "compressed-tensors":
        return QuantConfig(parse_ct_config(config))
    raise ValueError(f"quantization_config: quant_method {name!r} is not supported; known are {', '.join(METHODS)}")


def _parse_fp8_config(config: Mapping[str, Any]) -> CtScheme:
    if config.get("fmt", "e4m3") != "e4m3":
        raise ValueError(f"quantization_config: fmt {config['fmt']!r} is not supported; only 'e4m3' is")
    if config.get("scale_fmt") not in (None, "float"):
        raise ValueError(f"quantization_config: scale_fmt {config['scale_fmt']!r} is not supported")
    activations = config.get("activation_scheme", "dynamic")
    if activations not in ("dynamic", "static"):
        raise ValueError(f"quantization_config: activation_scheme {activations!r} is neither 'dynamic' nor 'static'")
    block = config.get("weight_block_size")
    if block is None:
        how = "static" if activations == "static" else "token"
        return CtScheme("float-quantized", "float", 8, "channel", activations=how)
    if len(block) != 2 or activations == "static":
        raise ValueError(
            f"quantization_config: weight_block_size {block!r} with {activations} activations is not known"
        )
    return CtScheme("float-quantized", "float", 8, "block", block=(block[0], block[1]), activations="group")


def read_quantization_config(folder: str | Path) -> QuantConfig | None:
    """What config.json says, or else quantize_config.json (GPTQ) or quant_config.json (AWQ); None = not quantized.

    Raises:
        ValueError: see parse_quantization_config; a file that is no JSON object.
    """
    for name, default in (("config.json", None), ("quantize_config.json", "gptq"), ("quant_config.json", "awq")):
        file = Path(folder) / name
        if not file.exists():
            continue
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{file} is no valid JSON: {error}") from None
        if name != "config.json":
            return parse_quantization_config({"quant_method": default} | content)
        if content.get("quantization_config") is not None:
            return parse_quantization_config(content["quantization_config"])
    return None


def unpack_module(tensors: Tensors, config: QuantConfig, module: str) -> QuantWeight:
    """The weight of a linear module as a value: an array if it is stored in floating point, else its integers.

    Args:
        tensors: the whole checkpoint, as stored.
        module: such as "model.layers.0.mlp.down_proj".
    Raises:
        ValueError: names the module, and what is missing, misshapen or contradicts the config.
    """
    held = {suffix: tensors[f"{module}.{suffix}"] for suffix in SUFFIXES if f"{module}.{suffix}" in tensors}
    if "weight" in held and np.issubdtype(held["weight"].dtype, np.floating):
        return held["weight"]
    scheme = module_scheme(config, module)
    try:
        if scheme is None:
            raise ValueError(
                f"the config leaves it in floating point, but it is stored as {', '.join(held) or 'nothing'}"
            )
        if isinstance(scheme, GptqConfig):
            return gptq_unpack(held, scheme)
        if isinstance(scheme, AwqConfig):
            return awq_unpack(held, scheme)
        if scheme.format == "pack-quantized":
            return ct_unpack(held, scheme)
        if "weight_scale_inv" in held:
            held["weight_scale"] = held["weight_scale_inv"]
        return ct_coded(held, scheme)
    except ValueError as error:
        raise ValueError(f"module {module}: {error}") from None


def module_scheme(config: QuantConfig, module: str) -> GptqConfig | AwqConfig | CtScheme | None:
    """What the config says of a linear module; None = it stays in floating point.

    Entries of modules_to_not_convert name a module or a part of its dotted path: "lm_head", "mlp.gate", "layers.3".
    """
    if any(f".{entry}." in f".{module}." for entry in config.not_converted):
        return None
    return ct_scheme(config.method, module) if isinstance(config.method, CtConfig) else config.method


def dequantize_module(tensors: Tensors, config: QuantConfig, module: str, dtype: DTypeLike = np.float64) -> Array:
    """The weight of a linear module in floating point: [out, in] in dtype.

    Raises:
        ValueError: see unpack_module.
    """
    return dequantize_weight(unpack_module(tensors, config, module), dtype)


def dequantize_checkpoint(tensors: Tensors, config: QuantConfig, dtype: DTypeLike = np.float64) -> dict[str, Array]:
    """A whole checkpoint in floating point: each quantized module becomes its `weight`, the rest is converted.

    Raises:
        ValueError: see unpack_module; or names a tensor of integers that no quantized module uses.
    """
    modules: dict[str, set[str]] = {}
    for name in tensors:
        module, _, suffix = name.rpartition(".")
        modules.setdefault(module, set()).add(suffix)
    weights: dict[str, Array] = {}
    for module, suffixes in modules.items():
        used = suffixes & set(SUFFIXES)
        if suffixes & {"weight", "qweight", "weight_packed"}:
            weights[f"{module}.weight"] = dequantize_module(tensors, config, module, dtype)
        for suffix in suffixes - used:
            tensor = tensors[f"{module}.{suffix}"]
            if not np.issubdtype(tensor.dtype, np.floating):
                raise ValueError(f"tensor {module}.{suffix} is {tensor.dtype}, and no quantized module uses it")
            weights[f"{module}.{suffix}"] = tensor.astype(dtype)
    return weights


def read_weights(folder: str | Path, dtype: DTypeLike = np.float32) -> dict[str, Array]:
    """All weights of a folder in floating point, quantized or not: read_checkpoint and dequantize_checkpoint.

    Raises:
        FileNotFoundError, ValueError: see those.
    """
    config = read_quantization_config(folder)
    if config is None:
        return read_checkpoint(folder, dtype)
    return dequantize_checkpoint(read_checkpoint(folder, None), config, dtype)
