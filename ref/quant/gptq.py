"""GPTQ checkpoints: how grouped integers are packed in them, and what the config says of it.

    qweight  [in · bits / 32, out]            int32; neighbours along `in` share a word, the first in the lowest bits
    qzeros   [num_groups, out · bits / 32]    int32; neighbours along `out` share a word
    scales   [num_groups, out]                float16
    g_idx    [in]                             int32; the group of each input, in any order with act-order (desc_act)

checkpoint_format "gptq" (v1) stores zero − 1, "gptq_v2" stores zero. In v1 the field is as wide as a zero itself, so
the stored number is (zero − 1) mod 2^bits and the meaning is (stored + 1) mod 2^bits: nibble 15 is zero 0, never 16.
A quantizer's zero lies in 0 … 2^bits − 1, so nothing is lost. Loaders differ here: those that add without a mask read
16, and those that add 0x11111111 to the word as a whole carry into the next zero. Some writers had already spoilt the
neighbours when they packed −1, which no reader can mend.

Source: Frantar et al. 2022, "GPTQ"; the file layout is that of AutoGPTQ, v2 that of GPTQModel.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ref.quant.groups import GroupedInt, check_bits, group_index, pack_words, unpack_words

Array = NDArray[Any]

FORMATS = ("gptq", "gptq_v2")
OVERRIDDEN = {"bits", "group_size", "sym", "desc_act"}  # of `dynamic`
WHILE_QUANTIZING = {
    "damp_percent",
    "damp_auto_increment",
    "mse",
    "static_groups",
    "act_group_aware",
}  # mean nothing here


@dataclass(frozen=True, slots=True)
class GptqConfig:
    """What a GPTQ quantization_config says of the files."""

    bits: int
    group_size: int
    desc_act: bool = False
    checkpoint_format: str = "gptq"
    symmetric: bool = False  # every zero is 2^(bits − 1)


def parse_gptq_config(config: Mapping[str, Any]) -> GptqConfig:
    """quantization_config with quant_method "gptq".

    Raises:
        ValueError: names the key that is missing or cannot be honoured.
    """
    bits = check_bits(config.get("bits"))
    group_size = config.get("group_size")
    if isinstance(group_size, bool) or not isinstance(group_size, int) or (group_size < 1 and group_size != -1):
        raise ValueError(f"quantization_config: group_size must be -1 or a positive integer, found {group_size!r}")
    name = config.get("checkpoint_format") or config.get("format") or "gptq"
    if name not in FORMATS:
        raise ValueError(f"quantization_config: checkpoint_format {name!r} is not supported; known are {FORMATS}")
    if config.get("pack_dtype", "int32") != "int32":
        raise ValueError(f"quantization_config: pack_dtype is {config['pack_dtype']!r}; only 'int32' is supported")
    return GptqConfig(bits, group_size, bool(config.get("desc_act", False)), name, config.get("sym") is True)


def parse_gptq_overrides(config: Mapping[str, Any]) -> tuple[tuple[str, GptqConfig | None], ...]:
    """`dynamic`, in its order: (regular expression, what holds for a module whose name begins with a match).

    None: it stays in floating point. "-:" before an expression leaves modules out, "+:" or nothing changes settings.
    The first match counts.

    Raises:
        ValueError: names the expression that is none, or the setting that cannot be honoured.
    """
    dynamic = config.get("dynamic") or {}
    if not isinstance(dynamic, Mapping):
        raise ValueError(f"quantization_config: dynamic must be an object, found {dynamic!r}")
    overrides: list[tuple[str, GptqConfig | None]] = []
    for name, changes in dynamic.items():
        pattern = name.removeprefix("-:") if name.startswith("-:") else name.removeprefix("+:")
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"quantization_config: dynamic: {name!r} is no regular expression: {error}") from None
        if name.startswith("-:"):
            overrides.append((pattern, None))
            continue
        if not isinstance(changes, Mapping):
            raise ValueError(f"quantization_config: dynamic.{name} must be an object, found {changes!r}")
        if unknown := sorted(changes.keys() - OVERRIDDEN - WHILE_QUANTIZING):
            raise ValueError(
                f"quantization_config: dynamic.{name}: {', '.join(unknown)} cannot be changed for some modules; known "
                f"are {', '.join(sorted(OVERRIDDEN))}"
            )
        try:
            overrides.append((pattern, parse_gptq_config({**config, **changes})))
        except ValueError as error:
            raise ValueError(f"{error} (dynamic.{name})") from None
    return tuple(overrides)


def gptq_pack(weight: GroupedInt, checkpoint_format: str = "gptq") -> dict[str, Array]:
    """The four tensors of a module: qweight, qzeros, scales (float16), g_idx.

    Raises:
        ValueError: in or out is no multiple of 32 / bits.
    """
    offset = 1 if checkpoint_format == "gptq" else 0
    stored_zeros = (weight.zeros.astype(np.int64) - offset) % 2**weight.bits
    return {
        "qweight": pack_words(weight.q.T, weight.bits, axis=0),
        "qzeros": pack_words(stored_zeros.T, weight.bits, axis=1),
        "scales": weight.scales.T.astype(np.float16),
        "g_idx": weight.g_idx.astype(np.int32),
    }


def gptq_unpack(tensors: Mapping[str, Array], config: GptqConfig) -> GroupedInt:
    """The integers, scales and zeros of a module.

    Args:
        tensors: qweight, qzeros, scales and, unless the groups are neighbours, g_idx, as stored.
    Raises:
        ValueError: a tensor is missing or has another shape than config says; g_idx names a group that is not there.
    """
    for name in ("qweight", "qzeros", "scales"):
        if name not in tensors:
            raise ValueError(f"a GPTQ module needs qweight, qzeros and scales; {name} is missing")
    per_word = 32 // config.bits
    in_features, out_features = tensors["qweight"].shape[0] * per_word, tensors["qweight"].shape[1]
    regular = group_index(in_features, config.group_size)
    num_groups = int(regular[-1]) + 1
    expected = {"qzeros": (num_groups, out_features // per_word), "scales": (num_groups, out_features)}
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            raise ValueError(
                f"{name} has shape {list(tensors[name].shape)}; bits {config.bits} and group_size {config.group_size} "
                f"of a weight [{out_features}, {in_features}] ask for {list(shape)}"
            )
    if "g_idx" not in tensors and config.desc_act:
        raise ValueError("desc_act is true but the module has no g_idx: the groups of its inputs are unknown")
    g_idx = np.asarray(tensors.get("g_idx", regular), np.int64)
    if g_idx.shape != (in_features,) or g_idx.min() < 0 or g_idx.max() >= num_groups:
        raise ValueError(
            f"g_idx must hold {in_features} numbers from 0 to {num_groups - 1}; found {g_idx.size}, "
            f"from {g_idx.min(initial=0)} to {g_idx.max(initial=0)}"
        )
    zeros = unpack_words(tensors["qzeros"], config.bits, axis=1).T
    if config.checkpoint_format == "gptq":
        zeros = ((zeros.astype(np.int64) + 1) % 2**config.bits).astype(np.uint8)
    return GroupedInt(
        config.bits, unpack_words(tensors["qweight"], config.bits, axis=0).T, tensors["scales"].T, zeros, g_idx
    )
