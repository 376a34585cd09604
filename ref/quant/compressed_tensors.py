"""compressed-tensors checkpoints: what a module's config asks for, and its tensors to numbers.

    pack-quantized    weight_packed [out, ⌈in · bits / 32⌉] int32, value + 2^(bits − 1), the first in the lowest bits;
                      weight_scale [out, num_groups], [out, 1] or [1]; weight_zero_point [⌈out · bits / 32⌉,
                      num_groups], packed along out, + 2^(bits − 1) too; weight_shape; weight_g_idx [in] with act-order
    int-quantized     weight [out, in] int8, weight_scale [out, 1] or [1]
    float-quantized   weight [out, in] e4m3, weight_scale [1], [out, 1] or [⌈out / 128⌉, ⌈in / 128⌉]

The offset is the same in values and zero points, so it cancels in value − zero.

Source: the compressed-tensors package's file format, as written by llm-compressor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ref.quant.coded import CodedWeight
from ref.quant.compressed_tensors_config import CtScheme
from ref.quant.fp8 import check_scale
from ref.quant.fp8_block import check_block_scale
from ref.quant.groups import GroupedInt, group_index, pack_words, unpack_words

Array = NDArray[Any]


def ct_pack(weight: GroupedInt, *, symmetric: bool) -> dict[str, Array]:
    """pack-quantized tensors of a module; scales keep their dtype.

    Raises ValueError: see pack_words.
    Numerics: exact. in and out are padded to whole words.
    """
    tensors = {
        "weight_packed": pack_words(_padded(weight.q, weight.bits, 1), weight.bits, axis=1),
        "weight_scale": weight.scales,
        "weight_shape": np.array(weight.q.shape, np.int64),
    }
    if not symmetric:
        tensors["weight_zero_point"] = pack_words(_padded(weight.zeros, weight.bits, 0), weight.bits, axis=0)
    if not np.array_equal(weight.g_idx, np.sort(weight.g_idx)):
        tensors["weight_g_idx"] = weight.g_idx.astype(np.int32)
    return tensors


def _padded(values: Array, bits: int, axis: int) -> Array:
    """Zeros at the end of axis, up to a whole number of words."""
    missing = -values.shape[axis] % (32 // bits)
    return np.pad(values, [(0, missing if i == axis else 0) for i in range(values.ndim)])


def ct_unpack(tensors: Mapping[str, Array], scheme: CtScheme) -> GroupedInt:
    """The integers, scales and zeros of a pack-quantized module.

    Args:
        tensors: weight_packed, weight_scale and so on, as stored.
    Raises:
        ValueError: a tensor is missing or has another shape than config says; weight_g_idx names a group that is not
            there.
    """
    needed = ["weight_packed", "weight_scale", "weight_shape"] + ["weight_zero_point"] * (not scheme.symmetric)
    needed += ["weight_g_idx"] * (scheme.act_order)
    for name in needed:
        if name not in tensors:
            raise ValueError(f"a pack-quantized module of this config needs {', '.join(needed)}; {name} is missing")
    out_features, in_features = map(int, tensors["weight_shape"])
    per_word = 32 // scheme.bits
    regular = group_index(in_features, scheme.group_size)
    num_groups = int(regular[-1]) + 1
    scales = tensors["weight_scale"]
    if scheme.strategy == "tensor" and scales.size == 1:
        scales = np.full((out_features, 1), scales.item(), scales.dtype)
    _expect(scales, "weight_scale", (out_features, num_groups))
    _expect(tensors["weight_packed"], "weight_packed", (out_features, -(-in_features // per_word)))
    q = unpack_words(tensors["weight_packed"], scheme.bits, axis=1)[:, :in_features]
    zeros = np.full((out_features, num_groups), 2 ** (scheme.bits - 1), np.uint8)
    if not scheme.symmetric:
        stored = tensors["weight_zero_point"]
        _expect(stored, "weight_zero_point", (-(-out_features // per_word), num_groups))
        zeros = unpack_words(stored, scheme.bits, axis=0)[:out_features]
    elif (
        "weight_zero_point" in tensors
        and not (unpack_words(tensors["weight_zero_point"], scheme.bits, axis=0)[:out_features] == zeros).all()
    ):
        raise ValueError(
            f"the config says symmetric, but weight_zero_point is stored and holds other zeros than {zeros[0, 0]}"
        )
    g_idx = np.asarray(tensors["weight_g_idx"], np.int64) if scheme.act_order else regular
    if not scheme.act_order and "weight_g_idx" in tensors and not np.array_equal(tensors["weight_g_idx"], regular):
        raise ValueError("weight_g_idx is stored in another order than neighbours, but the config has no actorder")
    if g_idx.shape != (in_features,) or g_idx.min() < 0 or g_idx.max() >= num_groups:
        raise ValueError(f"weight_g_idx must hold {in_features} numbers from 0 to {num_groups - 1}")
    return GroupedInt(scheme.bits, q, scales, zeros, g_idx)


def ct_coded(tensors: Mapping[str, Array], scheme: CtScheme) -> CodedWeight:
    """The codes and scales of an int-quantized or float-quantized module.

    Args:
        tensors: weight, weight_scale and, for static activations, input_scale, as stored.
    Raises:
        ValueError: a tensor is missing, of another shape or stored in another type than config says; a static scale
            is not finite and positive.
    """
    needed = ["weight", "weight_scale"] + ["input_scale"] * (scheme.activations == "static")
    for name in needed:
        if name not in tensors:
            raise ValueError(f"a quantized module of this config needs {', '.join(needed)}; {name} is missing")
    weight, scale = tensors["weight"], tensors["weight_scale"]
    stored = {"float": np.dtype(np.uint8), "int": np.dtype(np.int8)}[scheme.type]  # codes of e4m3 are kept as uint8
    if weight.dtype != stored:
        wanted = {"float": "F8_E4M3", "int": "I8"}[scheme.type]
        raise ValueError(f"the weight must be stored as {wanted}, as the config says; found {weight.dtype}")
    block = None
    if scheme.strategy == "block":
        block = scheme.block
        check_block_scale(scale, (weight.shape[0], weight.shape[1]), block)
    elif scale.size == 1:
        scale = scale.reshape(())
    elif scale.shape in ((weight.shape[0], 1), (weight.shape[0],)):
        scale = scale.reshape(-1)
    else:
        raise ValueError(f"weight_scale has shape {list(scale.shape)}; wanted are [1] or [{weight.shape[0]}, 1]")
    input_scale = check_scale("input_scale", tensors["input_scale"]) if scheme.activations == "static" else None
    return CodedWeight(weight, scale, block, scheme.activations, input_scale)


def _expect(tensor: Array, name: str, shape: tuple[int, int]) -> None:
    if tensor.shape != shape:
        raise ValueError(f"{name} has shape {list(tensor.shape)}; the config and weight_shape ask for {list(shape)}")
