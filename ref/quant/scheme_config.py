"""quantization_config of a checkpoint: which method, and what it says of a module.

quant_method "gptq", "awq", "fp8" (DeepSeek's tiles, or one scale a tensor) and "compressed-tensors" are known; any
other word is refused with the list. The head stays in floating point, but where a GPTQ config says lm_head, or where
compressed-tensors does not ignore it. Source: the keys that transformers, AutoGPTQ, AutoAWQ and llm-compressor write.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ref.quant.awq import AwqConfig, parse_awq_config
from ref.quant.compressed_tensors_config import CtConfig, CtScheme, ct_scheme, parse_ct_config
from ref.quant.gptq import GptqConfig, parse_gptq_config, parse_gptq_overrides

Scheme = GptqConfig | AwqConfig | CtScheme

HEAD = "lm_head"
METHODS = ("gptq", "awq", "fp8", "compressed-tensors")


@dataclass(frozen=True, slots=True)
class QuantConfig:
    """A quantization_config that is understood; not_converted names modules that stay in floating point, overrides what
    holds for some in place of method."""

    method: GptqConfig | AwqConfig | CtConfig | CtScheme  # CtScheme: quant_method fp8, the same for all modules
    not_converted: tuple[str, ...] = ()
    overrides: tuple[tuple[str, GptqConfig | None], ...] = ()  # (pattern, …), see parse_gptq_overrides


def parse_quantization_config(config: Mapping[str, Any]) -> QuantConfig:
    """quantization_config of a config.json, or the content of quantize_config.json.

    Raises:
        ValueError: names the method or key that is not supported, and those that are.
    """
    if not isinstance(config, Mapping):
        raise ValueError(f"quantization_config must be an object, found {config!r}")
    name = config.get("quant_method") or ("gptq" if "desc_act" in config else None)  # old GPTQ files do not say
    listed = config.get("modules_to_not_convert") or config.get("ignored_layers") or ()
    if not isinstance(listed, list | tuple):
        raise ValueError(f"quantization_config: modules_to_not_convert must be a list of modules, found {listed!r}")
    skipped = (*listed, *(() if name == "gptq" and config.get("lm_head") is True else (HEAD,)))
    if name == "gptq":
        return QuantConfig(parse_gptq_config(config), skipped, parse_gptq_overrides(config))
    if name == "awq":
        return QuantConfig(parse_awq_config(config), skipped)
    if name == "fp8":
        return QuantConfig(_parse_fp8_config(config), skipped)
    if name == "compressed-tensors":
        return QuantConfig(parse_ct_config(config))
    raise ValueError(f"quantization_config: quant_method {name!r} is not supported; known are {', '.join(METHODS)}")


def _parse_fp8_config(config: Mapping[str, Any]) -> CtScheme:
    if config.get("fmt", "e4m3") != "e4m3":
        raise ValueError(f"quantization_config: fmt {config['fmt']!r} is not supported; only 'e4m3' is")
    if config.get("scale_fmt") not in (None, "float"):
        raise ValueError(f"quantization_config: scale_fmt {config['scale_fmt']!r} is not supported; only 'float' is")
    activations = config.get("activation_scheme", "dynamic")
    if activations not in ("dynamic", "static"):
        raise ValueError(f"quantization_config: activation_scheme {activations!r} is neither 'dynamic' nor 'static'")
    block = config.get("weight_block_size")
    if block is None:
        how = "static" if activations == "static" else "token"
        return CtScheme("float-quantized", "float", 8, "channel", activations=how)
    sizes = block if isinstance(block, list | tuple) and all(type(size) is int and size > 0 for size in block) else ()
    if len(sizes) != 2 or activations == "static":
        raise ValueError(
            f"quantization_config: weight_block_size {block!r} with {activations} activations is not known"
        )
    return CtScheme("float-quantized", "float", 8, "block", block=(sizes[0], sizes[1]), activations="group")


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


def module_scheme(config: QuantConfig | None, module: str) -> Scheme | None:
    """What the config says of a linear module; None = it stays in floating point.

    Entries of modules_to_not_convert name a module or a part of its dotted path: "lm_head", "mlp.gate", "layers.3".
    """
    if config is None or any(f".{entry}." in f".{module}." for entry in config.not_converted):
        return None
    for pattern, scheme in config.overrides:
        if re.match(pattern, module):
            return scheme
    return ct_scheme(config.method, module) if isinstance(config.method, CtConfig) else config.method
