"""What the cases of conformance do not ask of the kernels: each a function of an op table that says what is wrong."""

from __future__ import annotations

import math
import mmap
import tempfile
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from engine.ops import OpTable

Array = NDArray[Any]

BF16 = np.dtype(ml_dtypes.bfloat16)


def unbacked(shape: tuple[int, ...]) -> Array:
    """Zeros of which only what is touched takes memory."""
    with tempfile.TemporaryFile() as file:
        file.truncate(math.prod(shape) * BF16.itemsize)
        return np.frombuffer(mmap.mmap(file.fileno(), 0), BF16).reshape(shape)


def ids_outside_the_table(ops: OpTable) -> list[str]:
    """They give NaN and read nothing; their neighbours are right."""
    table = np.arange(24).reshape(3, 8).astype(BF16)
    y = ops.embedding(np.array([2, 3, -1, 0, 2**31 - 1], np.int32), table)
    expected = np.full((5, 8), np.nan)
    expected[0], expected[3] = table[2], table[0]
    return [] if np.array_equal(y.astype(np.float64), expected, equal_nan=True) else [f"found {y}"]


def positions_outside_the_table(ops: OpTable) -> list[str]:
    """Where either the id or the position is, the whole row is NaN and nothing is read."""
    table, position_table = np.arange(24).reshape(3, 8).astype(BF16), np.arange(0, 64, 4).reshape(2, 8).astype(BF16)
    token_ids, positions = (
        np.array([2, 3, -1, 0, 1, 2, 0], np.int32),
        np.array([1, 0, 0, 2, -1, 2**31 - 1, 0], np.int32),
    )
    y = ops.position_embedding(token_ids, positions, table, position_table)
    expected = np.full((7, 8), np.nan)
    expected[0], expected[6] = table[2].astype(float) + position_table[1].astype(float), table[0] + position_table[0]
    return [] if np.array_equal(y.astype(np.float64), expected, equal_nan=True) else [f"found {y}"]


def a_row_past_31_bits(ops: OpTable) -> list[str]:
    """A row of the table more than 2³¹ elements from the first."""
    table = unbacked((3, 2**30 + 8))[:, :8]
    table[2] = np.arange(8)
    y = ops.embedding(np.array([2, 2], np.int32), table)
    return [] if (y == table[2]).all() else [f"found {y}"]


def blocks_outside_the_caches(ops: OpTable) -> list[str]:
    """Where either block is, nothing is copied, and nothing is written before or behind the target."""
    k_from, v_from = (np.arange(first, first + 48).reshape(3, 2, 1, 8).astype(BF16) for first in (1, 101))
    k_whole, v_whole = np.zeros((4, 2, 1, 8), BF16), np.zeros((4, 2, 1, 8), BF16)
    src, dst = np.array([2, 3, -1, 0, 1], np.int32), np.array([1, 0, 0, 2, -1], np.int32)
    ops.kv_cache_swap(k_from, v_from, k_whole[1:3], v_whole[1:3], src, dst)
    found = [np.flatnonzero(whole.any(axis=(1, 2, 3))).tolist() for whole in (k_whole, v_whole)]
    right = found == [[2], [2]] and (k_whole[2] == k_from[2]).all() and (v_whole[2] == v_from[2]).all()
    return [] if right else [f"written were blocks {found}"]


def a_slot_past_31_bits(ops: OpTable) -> list[str]:
    """A slot more than 2³¹ elements from the first."""
    slot = 2**26 + 5
    k_cache, v_cache = unbacked((2**24 + 2, 4, 2, 16)), unbacked((2**24 + 2, 4, 2, 16))
    q = np.arange(32).reshape(1, 2, 16).astype(BF16)
    cos_sin = np.repeat(np.array([[1, 0]], np.float32), 8, axis=1)
    ops.rope_kv_write(q, q, q, cos_sin, np.array([slot], np.int32), k_cache, v_cache)
    found = [cache[slot // 4, slot % 4] for cache in (k_cache, v_cache)]
    return [] if all((rows == q[0]).all() for rows in found) else [f"found {found}"]


def the_norm_reads_the_rounded_sum(ops: OpTable) -> list[str]:
    """256 + 1/2 is 256 in bfloat16, so all of the row is equal and its norm is 0; unrounded it would be ±1."""
    x, residual = np.resize(np.array([0.5, -0.25], BF16), (1, 40)), np.full((1, 40), 256, BF16)
    y, new_residual = ops.add_layernorm(x, residual, np.ones(40, BF16), None, 1e-5)
    return [f"{name} is {v}" for name, v, right in (("y", y, 0), ("sum", new_residual, 256)) if not (v == right).all()]


def each_head_has_its_bias(ops: OpTable) -> list[str]:
    """A head of equal numbers norms to 0, so its bias is left."""
    bias = np.arange(24).reshape(3, 8).astype(BF16)
    y = ops.layernorm(np.ones((2, 3, 8), BF16), np.ones((3, 8), BF16), bias, 1e-5)
    return [] if (y == bias).all() else [f"found {y}"]


def a_head_is_normed_whole(ops: OpTable) -> list[str]:
    """Also where only a part of it turns: equal numbers, unturned, norm to 1."""
    q, k, weight = (np.full(shape, 3, BF16) for shape in ((1, 2, 16), (1, 1, 16), (16,)))
    weight[...] = 1
    k_cache, v_cache = (np.full((1, 1, 1, 16), np.nan, BF16) for _ in range(2))
    cos_sin = np.repeat(np.array([[1, 0]], np.float32), 4, axis=1)
    slots = np.zeros(1, np.int32)
    y = ops.qk_norm_rope_kv_write(q, k, k, weight, weight, 0.0, cos_sin, slots, k_cache, v_cache)
    return [
        f"{name} is {v}" for name, v, right in (("q", y, 1), ("k", k_cache, 1), ("v", v_cache, 3)) if (v != right).any()
    ]


EDGES: dict[str, tuple[Callable[[OpTable], list[str]], ...]] = {  # by stem
    "embedding": (ids_outside_the_table, positions_outside_the_table, a_row_past_31_bits),
    "kv_cache_copy": (blocks_outside_the_caches,),
    "layernorm": (the_norm_reads_the_rounded_sum, each_head_has_its_bias),
    "rope": (a_slot_past_31_bits, a_head_is_normed_whole),
}
