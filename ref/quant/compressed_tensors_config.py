"""quantization_config of compressed-tensors: which module is what.

config_groups maps any name to {targets, weights, input_activations, format}. A target is a module's name, "re:" and
a regular expression for its name, or "Linear" for every linear layer. `ignore` lists modules, in the same forms, that
stay in floating point. A target that names a module goes before "Linear".

Everything that would change the numbers and is not known here is refused by name: nothing is guessed.

Source: the package compressed-tensors, QuantizationConfig and QuantizationScheme.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FORMATS = {"pack-quantized": "int", "int-quantized": "int", "float-quantized": "float"}  # and the type of weights
STRATEGIES = {
    "pack-quantized": ("group", "channel", "tensor"),
    "int-quantized": ("channel", "tensor"),
    "float-quantized": ("channel", "tensor", "block"),
}
# kept at these values, or absent, in every file that is read
EMPTY = ("sparsity_config", "transform_config", "kv_cache_scheme")


@dataclass(frozen=True, slots=True)
class CtScheme:
    """How the modules of one config group are stored and multiplied."""

    format: str
    type: str  # "int" or "float"
    bits: int
    strategy: str
    symmetric: bool = True
    group_size: int = -1
    block: tuple[int, int] = (128, 128)
    act_order: bool = False  # the file has a weight_g_idx
    activations: str | None = None  # None = floating point, "token", "group" (per token and 128), "static"


@dataclass(frozen=True, slots=True)
class CtConfig:
    """All groups, each with its targets, and what is left alone."""

    groups: tuple[tuple[tuple[str, ...], CtScheme], ...]
    ignore: tuple[str, ...] = ()


def parse_ct_config(config: Mapping[str, Any]) -> CtConfig:
    """quantization_config with quant_method "compressed-tensors".

    Raises:
        ValueError: names the key that cannot be honoured.
    """
    for key in EMPTY:
        value = config.get(key)
        if value and value != {"format": "dense"}:
            raise ValueError(f"quantization_config: {key} is not supported, found {value!r}")
    if config.get("quantization_status", "compressed") != "compressed":
        raise ValueError(
            f"quantization_config: quantization_status must be compressed, found {config['quantization_status']!r}"
        )
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ValueError(f"quantization_config: config_groups must map names to groups, found {groups!r}")
    parsed = []
    for name, group in groups.items():
        try:
            targets = tuple(group["targets"])
            for target in targets:
                _check_pattern(target)
                if target != "Linear" and not target.startswith("re:") and "." not in target and target[:1].isupper():
                    raise ValueError(f"target {target!r} is not supported; known are Linear, names and re: patterns")
            parsed.append((targets, _parse_group(group, group.get("format") or config.get("format"))))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"quantization_config: config_groups.{name}: {error}") from None
    ignore = config.get("ignore") or ()
    if not isinstance(ignore, list | tuple):
        raise ValueError(f"quantization_config: ignore must be a list of modules, found {ignore!r}")
    for entry in ignore:
        _check_pattern(entry)
    return CtConfig(tuple(parsed), tuple(ignore))


def _parse_group(group: Mapping[str, Any], name: str | None) -> CtScheme:
    if name not in FORMATS:
        raise ValueError(f"format {name!r} is not supported; known are {', '.join(FORMATS)}")
    if not isinstance(found := group["weights"], Mapping):
        raise ValueError(f"weights must be an object, found {found!r}")
    weights: Any = group["weights"]
    if group.get("output_activations"):
        raise ValueError("output_activations are not supported")
    kind, bits, strategy = weights.get("type", "int"), weights.get("num_bits"), weights.get("strategy")
    known_bits = (4, 8) if name == "pack-quantized" else (8,)
    if kind != FORMATS[name] or bits not in known_bits or type(bits) is not int:
        raise ValueError(
            f"weights of type {kind!r} with num_bits {bits!r} are not supported in format {name}; known are "
            f"{FORMATS[name]} of {' or '.join(map(str, known_bits))} bits"
        )
    if strategy not in STRATEGIES[name]:
        known = ", ".join(STRATEGIES[name])
        raise ValueError(f"weights.strategy {strategy!r} is not supported in format {name}; known are {known}")
    symmetric = weights.get("symmetric", True)
    if not symmetric and name != "pack-quantized":
        raise ValueError(f"weights.symmetric is false, which is not supported in format {name}")
    act_order = weights.get("actorder")
    if act_order not in (None, False, "weight", "static", True, "group"):
        raise ValueError(f"weights.actorder {act_order!r} is not supported")
    group_size = weights.get("group_size") if strategy == "group" else -1
    if isinstance(group_size, bool) or not isinstance(group_size, int) or (group_size < 1 and group_size != -1):
        raise ValueError(f"weights.group_size must be a positive integer, found {group_size!r}")
    block = weights.get("block_structure") or (128, 128)
    if not isinstance(block, list | tuple) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        raise ValueError(f"weights.block_structure must be two positive integers, found {block!r}")
    return CtScheme(
        format=name,
        type=kind,
        bits=bits,
        strategy=strategy,
        symmetric=bool(symmetric),
        group_size=group_size,
        block=(block[0], block[1]),
        act_order=act_order in (True, "group") and name == "pack-quantized",
        activations=_parse_activations(group.get("input_activations"), kind, name),
    )


def _parse_activations(activations: Mapping[str, Any] | None, kind: str, name: str) -> str | None:
    """ "token", "group" or "static"; None where activations stay floating point."""
    if activations is None:
        return None
    if not isinstance(activations, Mapping):
        raise ValueError(f"input_activations must be an object or null, found {activations!r}")
    dynamic, strategy = activations.get("dynamic", False), activations.get("strategy")
    found = (activations.get("type", "int"), activations.get("num_bits"), bool(activations.get("symmetric", True)))
    if name == "pack-quantized" or found != (kind, 8, True):
        raise ValueError(
            f"input_activations {dict(activations)!r} are not supported in format {name}; "
            + ("it has none" if name == "pack-quantized" else f"known are {kind} of 8 bits, symmetric")
        )
    if dynamic is True and strategy == "token":
        return "token"
    if dynamic is True and strategy == "group" and activations.get("group_size") == 128 and kind == "float":
        return "group"
    if dynamic is False and strategy == "tensor":
        return "static"
    raise ValueError(
        f"input_activations with strategy {strategy!r} and dynamic {dynamic!r} are not supported; known are "
        "'token' and, for float in groups of 128, 'group', both dynamic, and 'tensor', not dynamic"
    )


def _check_pattern(target: str) -> None:
    """Raises ValueError for what can name no module: no string, or "re:" and no regular expression."""
    if not isinstance(target, str):
        raise ValueError(f"a module must be named by a string, found {target!r}")
    try:
        re.compile(target.removeprefix("re:") if target.startswith("re:") else "")
    except re.error as error:
        raise ValueError(f"quantization_config: {target!r} is no regular expression: {error}") from None


def matches(target: str, module: str) -> bool:
    """Whether a target or an entry of ignore names this module: by its full name, or by "re:" and a pattern."""
    if target.startswith("re:"):
        return re.match(target[3:], module) is not None
    return target == module


def ct_scheme(config: CtConfig, module: str) -> CtScheme | None:
    """What config says of a linear module; None = it stays in floating point."""
    if any(matches(entry, module) for entry in config.ignore):
        return None
    for targets, scheme in config.groups:
        if any(matches(target, module) for target in targets):
            return scheme
    return next((scheme for targets, scheme in config.groups if "Linear" in targets), None)
