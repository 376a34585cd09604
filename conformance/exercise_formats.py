"""Exercises on number formats: bfloat16 by its bits, integers with a scale, integers packed into words."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.case import Inputs
from conformance.exercise import Exercise, Mistake, make_cases
from conformance.inputs import normal
from ref.numerics import bf16_bits
from ref.quant.gptq import GptqConfig, gptq_pack, gptq_unpack
from ref.quant.groups import GroupedInt, grouped_dequantize
from ref.quant.int8 import INT8_MAX, int8_dequantize, int8_linear, int8_quantize, int8_quantize_static

Array = NDArray[Any]
Rng = np.random.Generator

MARGIN = 0.4  # of a step: how far what is rounded may be from a whole number, so that no rounding is a near tie
BITS = {"bits": ("row", "element")}
Y = {"y": ("token", "output")}
WEIGHT = {"weight": ("output", "input")}

BF16_WORDS = {  # float32 by their bits
    "exact": (0x00000000, 0x80000000, 0x3F800000, 0xC0490000, 0x7F800000, 0xFF800000),
    "nearest": (0x3F800001, 0x3F807FFF, 0x3F808001, 0x3F80FFFF, 0xBF808001, 0x40490FDB),
    "ties": (0x3F808000, 0x3F818000, 0x3F828000, 0xBF808000, 0xBF818000, 0x00008000),
    "carry": (0x3FFFFFFF, 0x3FFF8000, 0x3F7FFFFF, 0x7F7F7FFF, 0x7F7F8000, 0xFF7FFFFF),
    "subnormal": (0x00000001, 0x00007FFF, 0x00008001, 0x007FFFFF, 0x80018000, 0x807F8000),
    "random": (),
    "nan": (0x7FC00000, 0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FBF8000),
}


def _bf16_inputs(rng: Rng, words: tuple[int, ...]) -> Inputs:
    return {"x": np.array([words], np.uint32).view(np.float32) if words else normal(rng, 5, 33)}


def _half_away(x: Array) -> Array:
    return ((x.view(np.uint32) + 0x8000) >> 16).astype(np.uint16)


def _nan_rounded(x: Array) -> Array:
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


BF16 = Exercise(
    number=2,
    function="bf16_bits",
    task="the bfloat16 nearest to each float32, ties to even, as 16 bits",
    parameters=("x",),
    outputs=BITS,
    read="ref/course/numbers.md, ref/numerics.py",
    cases=make_cases(
        "numerics", BITS, bf16_bits, _bf16_inputs, {name: {"words": BF16_WORDS[name]} for name in BF16_WORDS}
    ),
    mistakes=(
        Mistake("the lower half is cut off", lambda x: (x.view(np.uint32) >> 16).astype(np.uint16)),
        Mistake("a NaN is rounded like a number", _nan_rounded),
        Mistake("ties go up instead of to the even neighbour", _half_away),
    ),
)


def _int8_inputs(rng: Rng, sizes: tuple[float, ...], in_features: int) -> Inputs:
    """Tokens whose elements are whole steps and at most MARGIN of one more."""
    steps = rng.integers(-126, 127, (len(sizes), in_features)) + rng.uniform(-MARGIN, MARGIN, (len(sizes), in_features))
    steps[:, rng.integers(in_features)] = 127
    scales = np.array(sizes)[:, None] * rng.uniform(0.01, 0.02, (len(sizes), 1))
    wq, w_scale = int8_quantize(normal(rng, 5, in_features))
    return {"x": (steps * scales).astype(np.float32), "wq": wq, "w_scale": w_scale}


def _one_scale(x: Array, wq: Array, w_scale: Array) -> Array:
    scale = np.max(np.abs(x)) / x.dtype.type(INT8_MAX)
    return int8_dequantize(int8_quantize_static(x, scale), np.full(len(x), scale)) @ int8_dequantize(wq, w_scale).T


def _truncated(x: Array, wq: Array, w_scale: Array) -> Array:
    _, scale = int8_quantize(x)
    steps = np.trunc(x / np.where(scale == 0, 1, scale)[:, None])
    return (steps * scale[:, None]) @ int8_dequantize(wq, w_scale).T


def _sums_in_int8(x: Array, wq: Array, w_scale: Array) -> Array:
    xq, scale = int8_quantize(x)
    return (xq @ wq.T) * scale[:, None] * w_scale


def _zero_scale(x: Array, wq: Array, w_scale: Array) -> Array:
    return int8_linear(np.where(np.any(x, axis=-1, keepdims=True), x, np.float32(np.nan)), wq, w_scale)


INT8 = Exercise(
    number=8,
    function="int8_linear",
    task="x in int8 with a scale a token, times weights in int8 with a scale a row",
    parameters=("x", "wq", "w_scale"),
    outputs=Y,
    read="ref/course/quantization.md, ref/quant/int8.py",
    cases=make_cases(
        "int8",
        Y,
        int8_linear,
        _int8_inputs,
        {
            "one-token": {"sizes": (1.0,), "in_features": 16},
            "three-tokens": {"sizes": (1.0, 0.3, 2.0), "in_features": 16},
            "outlier-token": {"sizes": (1.0, 1000.0, 1e-3), "in_features": 16},
            "zero-token": {"sizes": (1.0, 0.0), "in_features": 16},
            "long-rows": {"sizes": (1.0, 0.3, 2.0), "in_features": 4096},
        },
    ),
    mistakes=(
        Mistake("x is not quantized", lambda x, wq, w_scale: x @ int8_dequantize(wq, w_scale).T),
        Mistake("all tokens share one scale", _one_scale),
        Mistake("x / scale is cut off instead of rounded", _truncated),
        Mistake("the sums run in int8 and wrap around; convert to int32 before the product", _sums_in_int8),
        Mistake("a token of zeros is divided by its scale, 0", _zero_scale),
    ),
)


def _gptq_inputs(
    rng: Rng, bits: int = 4, num_groups: int = 2, act_order: bool = False, zero: int | None = None
) -> Inputs:
    """A weight [16, 32]."""
    in_features, out_features = 32, 16
    q = rng.integers(0, 2**bits, (out_features, in_features)).astype(np.uint8)
    shape = (out_features, num_groups)
    zeros = rng.integers(1, 2**bits, shape) if zero is None else np.full(shape, zero)
    scales = rng.uniform(0.01, 0.1, shape).astype(np.float16)
    g_idx = np.arange(in_features) // (in_features // num_groups)
    g_idx = rng.permutation(g_idx) if act_order else g_idx
    return {**gptq_pack(GroupedInt(bits, q, scales, zeros.astype(np.uint8), g_idx)), "bits": bits}


def _gptq_reference(qweight: Array, qzeros: Array, scales: Array, g_idx: Array, bits: int) -> Array:
    tensors = {"qweight": qweight, "qzeros": qzeros, "scales": scales, "g_idx": g_idx}
    config = GptqConfig(bits, len(g_idx) // len(scales), desc_act=True)
    return grouped_dequantize(gptq_unpack(tensors, config), scales.dtype)


def _unpacked(words: Array, bits: int, axis: int, reverse: bool = False) -> Array:
    shifts = range(0, 32, bits)
    parts = [words >> shift & (2**bits - 1) for shift in (reversed(shifts) if reverse else shifts)]
    stacked = np.stack(parts, axis=axis + 1)
    return stacked.reshape([-1 if i == axis else n for i, n in enumerate(words.shape)])


def _gptq(
    qweight: Array,
    qzeros: Array,
    scales: Array,
    g_idx: Array,
    bits: int,
    add: int = 1,
    wrap: bool = True,
    reverse: bool = False,
) -> Array:
    zeros = _unpacked(qzeros, bits, 1, reverse) + add
    zeros = zeros % 2**bits if wrap else zeros
    steps = _unpacked(qweight, bits, 0, reverse) - zeros[g_idx]
    return (steps * scales[g_idx].astype(np.float32)).T.astype(np.float32)


def _neighbours(qweight: Array, qzeros: Array, scales: Array, g_idx: Array, bits: int) -> Array:
    return _gptq(qweight, qzeros, scales, np.arange(len(g_idx)) // (len(g_idx) // len(scales)), bits)


GPTQ = Exercise(
    number=9,
    function="gptq_dequantize",
    task="the weight matrix out of the four tensors of a GPTQ file",
    parameters=("qweight", "qzeros", "scales", "g_idx", "bits"),
    outputs=WEIGHT,
    read="ref/course/quantization.md, ref/quant/gptq.py, ref/quant/groups.py",
    cases=make_cases(
        "gptq",
        WEIGHT,
        _gptq_reference,
        _gptq_inputs,
        {
            "one-group": {"num_groups": 1, "zero": 8},
            "groups": {},
            "zero-0": {"zero": 0},
            "act-order": {"act_order": True},
            "8-bit": {"bits": 8},
        },
    ),
    mistakes=(
        Mistake("the stored zero is taken as it is, without + 1", lambda **tensors: _gptq(**tensors, add=0)),
        Mistake(
            "the stored zero + 1 is not taken mod 2^bits: 15 means 0", lambda **tensors: _gptq(**tensors, wrap=False)
        ),
        Mistake("the first value is looked for in the highest bits", lambda **tensors: _gptq(**tensors, reverse=True)),
        Mistake("groups are taken as neighbours and g_idx is not read", _neighbours),
    ),
)
