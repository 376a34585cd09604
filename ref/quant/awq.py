"""AWQ checkpoints ("gemm" layout): grouped 4-bit integers, packed along the outputs in an order of their own.

    qweight  [in, out / 8]            int32
    qzeros   [num_groups, out / 8]    int32; the zero itself, without the offset of GPTQ v1
    scales   [num_groups, out]        float16

Of eight neighbouring outputs, output j stands at bits 4 · ORDER[j] with ORDER 0, 4, 1, 5, 2, 6, 3, 7; read from the
lowest bits, a word holds outputs 0, 2, 4, 6, 1, 3, 5, 7. So a kernel that masks a word with 0x000F000F gets the
neighbours 0 and 1 in its two halves. Zeros are packed in the same order as weights.

Source: Lin et al. 2023, "AWQ"; the file layout is that of AutoAWQ's GEMM version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ref.quant.groups import GroupedInt, group_index, pack_words, unpack_words

Array = NDArray[Any]

BITS = 4
ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True, slots=True)
class AwqConfig:
    """What an AWQ quantization_config says of the files."""

    group_size: int


def parse_awq_config(config: Mapping[str, Any]) -> AwqConfig:
    """quantization_config with quant_method "awq".

    Raises:
        ValueError: names the key that is missing or cannot be honoured.
    """
    bits = config.get("bits", config.get("w_bit"))
    if bits != BITS:
        raise ValueError(f"quantization_config: bits is {bits!r}; AWQ has 4")
    version = str(config.get("version", "gemm")).lower()
    if version != "gemm":
        raise ValueError(f"quantization_config: AWQ version {version!r} is not supported; only 'gemm' is")
    if not config.get("zero_point", True):
        raise ValueError("quantization_config: zero_point is false; AWQ without zeros is not supported")
    group_size = config.get("group_size", config.get("q_group_size"))
    if isinstance(group_size, bool) or not isinstance(group_size, int) or (group_size < 1 and group_size != -1):
        raise ValueError(f"quantization_config: group_size must be -1 or a positive integer, found {group_size!r}")
    return AwqConfig(group_size)


def awq_pack(weight: GroupedInt) -> dict[str, Array]:
    """The three tensors of a module: qweight, qzeros, scales (float16).

    Raises:
        ValueError: bits are not 4, out is no multiple of 8, or the groups are not neighbours.
    """
    regular = group_index(weight.q.shape[1], weight.q.shape[1] // weight.scales.shape[1])
    if weight.bits != BITS or not np.array_equal(weight.g_idx, regular):
        raise ValueError("AWQ holds 4 bits in groups of neighbouring inputs; this weight is not of that kind")
    return {
        "qweight": pack_words(weight.q.T, BITS, axis=1, order=ORDER),
        "qzeros": pack_words(weight.zeros.T, BITS, axis=1, order=ORDER),
        "scales": weight.scales.T.astype(np.float16),
    }


def awq_unpack(tensors: Mapping[str, Array], config: AwqConfig) -> GroupedInt:
    """The integers, scales and zeros of a module.

    Args:
        tensors: qweight, qzeros and scales, as stored.
    Raises:
        ValueError: a tensor is missing or has another shape than config says.
    """
    for name in ("qweight", "qzeros", "scales"):
        if name not in tensors:
            raise ValueError(f"an AWQ module needs qweight, qzeros and scales; {name} is missing")
    in_features, num_words = tensors["qweight"].shape
    g_idx = group_index(in_features, config.group_size)
    num_groups = int(g_idx[-1]) + 1
    for name, shape in (("qzeros", (num_groups, num_words)), ("scales", (num_groups, num_words * 8))):
        if tensors[name].shape != shape:
            raise ValueError(
                f"{name} has shape {list(tensors[name].shape)}; group_size {config.group_size} of a weight "
                f"[{num_words * 8}, {in_features}] asks for {list(shape)}"
            )
    q = unpack_words(tensors["qweight"], BITS, axis=1, order=ORDER).T
    zeros = unpack_words(tensors["qzeros"], BITS, axis=1, order=ORDER).T
    return GroupedInt(BITS, q, tensors["scales"].T, zeros, g_idx)
