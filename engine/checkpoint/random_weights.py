"""Weights that are made, not read: --load-format dummy, and dummy-small."""

from __future__ import annotations

import math
import zlib
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.checkpoint.store import Store
from engine.coded8 import FP8, blank8
from engine.packed4 import PACKED, PACKED_GATED, SYMMETRIC_ZERO, blank4
from engine.weights import EMBEDDING, Coded, LinearSpec, LinearWeight, Packed, WeightMap, Weights, order_of

Array = Any

DUMMY_STD = 0.02
SMALL_STD = 1e-3 / math.sqrt(3)  # of numbers spread evenly from −0.001 to 0.001
POOL = (1 << 20) + 3  # different scales of small weights
# standard deviation of integers of 4 bits and of 8, and of the e4m3 numbers below 2, of which none is NaN
STD_OF_4_BITS, STD_OF_INT8, STD_OF_FP8 = 4.61, 73.9, 0.598
BELOW_2 = 0xBFBFBFBF  # bits of four codes


def fill_randomly(weights: Weights, weight_map: WeightMap, seed: int, store: Store, is_small: bool = False) -> Weights:
    """Normal weights of standard deviation DUMMY_STD, norms of 1, biases of 0; each by its own dest name and seed.

    Layers that stay integers or codes: all of these alike often, with a scale that gives them DUMMY_STD. The mean of
    integers is no zero; signs that alternate from group to group, and from row to row, keep it from growing through the
    layers.

    is_small: all of standard deviation SMALL_STD, norms, biases and the scales of groups too, as the dummy weights of
    other engines are. Then much of what a layer reads is 0 in float16, and a GPU at the limit of its power is quicker:
    times of others that were taken so are compared with ours of this kind.
    """
    for dest, array in weights.arrays.items():
        _fill(array, dest, seed, store, is_small)
    linears, arrays = dict(weights.linears), dict(weights.arrays)
    specs = {spec.dest: spec for spec in weight_map.linears}
    for dest, linear in weights.linears.items():
        if linear.bias is not None:
            _fill(linear.bias, f"{dest}.bias", seed, store, is_small)
        spec = specs.get(dest)
        if spec is not None and spec.packed is not None:
            linears[dest] = _packed(spec, spec.packed, linear, seed, store, is_small)
            if spec.packed.order == "normed":
                arrays[order_of(spec.norm)] = store.put(_order(spec, seed).astype(np.uint16))
        elif spec is not None and spec.coded is not None:
            linears[dest] = _coded(spec.coded, linear, (seed, _number(dest)), store)
        elif linear.tensors["weight"] is not weights.arrays.get(EMBEDDING):
            _fill(linear.tensors["weight"], dest, seed, store, is_small)
    return replace(weights, linears=linears, arrays=arrays)


def _packed(
    spec: LinearSpec, packed: Packed, linear: LinearWeight, seed: int, store: Store, is_small: bool
) -> LinearWeight:
    blank = blank4(spec.out_features, spec.in_features, packed.group_size, packed.zeros)
    groups, _, rows, _, _ = np.indices((*blank["scales"].shape[:3], 1, 1), sparse=True)
    signs = 1 - 2 * ((groups + rows) % 2)
    shape = blank["scales"].shape
    blank["scales"] = np.full(shape, DUMMY_STD / STD_OF_4_BITS * signs, np.float16)
    if is_small:
        pool = np.random.default_rng((seed, _number(spec.dest))).standard_normal(POOL, np.float32) * SMALL_STD
        blank["scales"] = np.resize(pool.astype(np.float16), shape)
    if "zeros" in blank:
        blank["zeros"] = np.full(blank["zeros"].shape, SYMMETRIC_ZERO, np.uint8)
    words = store.random_words(blank.pop("weight").shape, (seed, _number(spec.dest)))
    if packed.order == "gathered":
        blank["order"] = _order(spec, seed).astype(np.int32)
    tensors = {"weight": words} | {name: store.put(array) for name, array in blank.items()}
    format = PACKED_GATED if spec.gated else PACKED
    return LinearWeight(format, spec.out_features, spec.in_features, tensors, linear.bias)


def _order(spec: LinearSpec, seed: int) -> NDArray[np.int64]:
    return np.random.default_rng((seed, _number(spec.dest))).permutation(spec.in_features)


def _coded(coded: Coded, linear: LinearWeight, seed: tuple[int, int], store: Store) -> LinearWeight:
    codes, shape = linear.tensors["weight"], (linear.out_features, linear.in_features)
    blank = blank8(coded.kind, coded.scale, coded.static, *shape)
    words = store.random_words((math.prod(shape) // 4,), seed)
    if coded.kind == FP8:
        words &= np.uint32(BELOW_2)
    codes[...] = words.view(codes.dtype).reshape(shape)
    scale = blank["scale"]
    signs = 1 - 2 * (np.arange(len(scale)) % 2).reshape(-1, *[1] * (scale.ndim - 1))
    scale[...] = DUMMY_STD / (STD_OF_FP8 if coded.kind == FP8 else STD_OF_INT8) * signs
    if coded.static:
        blank["input_scale"][...] = 1 / 16
    tensors = {name: store.put(array) for name, array in blank.items() if name != "weight"}
    return replace(linear, format=coded.kind, tensors={"weight": codes} | tensors)


def _fill(array: Array, dest: str, seed: int, store: Store, is_small: bool) -> None:
    if not is_small and (array.ndim == 1 or dest.endswith("norm")):  # Command-R+ has a row of a norm for each head
        array[...] = 0 if dest.endswith("bias") else 1
        return
    store.fill_normally(array, (seed, _number(dest)), SMALL_STD if is_small else DUMMY_STD)


def _number(dest: str) -> int:
    return zlib.crc32(dest.encode())
