"""The kernels of cuda/ as functions with the names and leading parameters of ref, launched on the CPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.host import Library, Strided
from conformance.host_build import CUDA

Array = NDArray[Any]

TYPES = {"float32": "float", "float16": "fp16", "bfloat16": "bf16"}  # of C++, by dtype
MARGIN = 64  # elements
MAX_THREADS = 64  # of a block: few, so that small sizes have several blocks and rounds
ACTIVATIONS = {"silu": "kSilu", "gelu": "kGelu", "gelu_new": "kGeluTanh", "relu": "kRelu"}
ROUNDS = (1, 2, 3)
LANES = (1, 4, 8, 16)

NAMES = {
    "rmsnorm": [f"{name}<{t}, {n}>" for name in ("rmsnorm", "add_rmsnorm") for t in TYPES.values() for n in ROUNDS],
    "layernorm": [
        f"{name}<{t}, {n}>" for name in ("layernorm", "add_layernorm") for t in TYPES.values() for n in ROUNDS
    ],
    "activation": [
        f"{name}<{t}, {a}>" for name in ("act", "gate_up_act") for t in TYPES.values() for a in ACTIVATIONS.values()
    ],
    "embedding": [f"embedding<{t}>" for t in TYPES.values()],
    "rope": [
        f"{name}<{t}, {interleaved}, {lanes}>"
        for name in ("rope_kv_write", "qk_norm_rope_kv_write")
        for t, interleaved in (("float", "false"), ("bf16", "false"), ("bf16", "true"), ("fp16", "true"))
        for lanes in LANES
    ],
}


@cache
def library(source: Path, names: tuple[str, ...], sanitizer: str = "") -> Library:
    return Library(source, names, sanitizer)


@dataclass(frozen=True)
class Kernels:
    """One stem's kernels, from cuda/ or from a changed copy of it, with how they are to be run."""

    stem: str
    folder: Path = CUDA
    names: tuple[str, ...] = ()  # to be built; () is all of NAMES
    how: dict[str, Any] = field(default_factory=dict)  # schedule, seed
    sanitizer: str = ""

    def launch(self, kernel: str, grid: tuple[int, ...], threads: int, arguments: Sequence[Any]) -> None:
        found = library(self.folder / f"{self.stem}.cu", self.names or tuple(NAMES[self.stem]), self.sanitizer)
        found.launch(kernel, grid, (threads,), arguments, **self.how)

    def rmsnorm(self, x: Array, weight: Array, eps: float) -> Array:
        y = poisoned(x.shape, x)
        if x.size:
            threads, rounds = row_shape(x)
            arguments = [Strided(x), weight, y, np.int32(x.shape[1]), stride(x), np.float32(eps)]
            self.launch(f"rmsnorm<{TYPES[x.dtype.name]}, {rounds}>", (len(x),), threads, arguments)
        return y

    def add_rmsnorm(self, x: Array, residual: Array, weight: Array, eps: float) -> tuple[Array, Array]:
        """new_residual is written over residual."""
        y = poisoned(x.shape, x)
        if x.size:
            threads, rounds = row_shape(x)
            arguments = [Strided(x), Strided(residual), weight, y, Strided(residual), np.int32(x.shape[1])]
            arguments += [stride(x), stride(residual), stride(residual), np.float32(eps)]
            self.launch(f"add_rmsnorm<{TYPES[x.dtype.name]}, {rounds}>", (len(x),), threads, arguments)
        return y, residual

    def layernorm(self, x: Array, weight: Array, bias: Array | None, eps: float) -> Array:
        """x [num_rows, size]; weight, bias [size] or [num_weights, size]."""
        y = poisoned(x.shape, x)
        if x.size:
            threads, rounds = row_shape(x)
            num_weights = np.int32(weight.size // x.shape[1])
            arguments = [Strided(x), weight, bias, y, num_weights, np.int32(x.shape[1]), stride(x), np.float32(eps)]
            self.launch(f"layernorm<{TYPES[x.dtype.name]}, {rounds}>", (len(x),), threads, arguments)
        return y

    def add_layernorm(
        self, x: Array, residual: Array, weight: Array, bias: Array | None, eps: float
    ) -> tuple[Array, Array]:
        """new_residual is a new array."""
        y, new_residual = poisoned(x.shape, x), poisoned(x.shape, x)
        if x.size:
            threads, rounds = row_shape(x)
            arguments = [Strided(x), Strided(residual), weight, bias, y, new_residual, np.int32(x.shape[1])]
            arguments += [stride(x), stride(residual), stride(new_residual), np.float32(eps)]
            self.launch(f"add_layernorm<{TYPES[x.dtype.name]}, {rounds}>", (len(x),), threads, arguments)
        return y, new_residual

    def act(self, x: Array, activation: str) -> Array:
        return self._activation("act", x, x.shape[1], activation)

    def gate_up_act(self, gate_up: Array, activation: str = "silu") -> Array:
        return self._activation("gate_up_act", gate_up, gate_up.shape[1] // 2, activation)

    def _activation(self, kernel: str, x: Array, size: int, activation: str) -> Array:
        y = poisoned((len(x), size), x)
        if y.size:
            name = f"{kernel}<{TYPES[x.dtype.name]}, {ACTIVATIONS[activation]}>"
            grid = (len(x), -(-size // (MAX_THREADS * width(x))))
            self.launch(name, grid, MAX_THREADS, [Strided(x), y, np.int32(size), stride(x)])
        return y

    def embedding(self, token_ids: NDArray[np.int32], table: Array) -> Array:
        y = poisoned((len(token_ids), table.shape[1]), table)
        if y.size:
            grid = (len(token_ids), -(-table.shape[1] // (MAX_THREADS * width(table))))
            arguments = [token_ids, Strided(table), y, *map(np.int32, table.shape), stride(table)]
            self.launch(f"embedding<{TYPES[table.dtype.name]}>", grid, MAX_THREADS, arguments)
        return y

    def rope_kv_write(
        self,
        q: Array,
        k: Array,
        v: Array,
        cos_sin: Array,
        slot_mapping: Array,
        k_cache: Array,
        v_cache: Array,
        *,
        interleaved: bool = False,
    ) -> Array:
        arrays = (q, k, v, None, None, cos_sin, slot_mapping, k_cache, v_cache)
        return self._rope("rope_kv_write", arrays, 0.0, interleaved)

    def qk_norm_rope_kv_write(
        self,
        q: Array,
        k: Array,
        v: Array,
        q_weight: Array,
        k_weight: Array,
        eps: float,
        cos_sin: Array,
        slot_mapping: Array,
        k_cache: Array,
        v_cache: Array,
        *,
        interleaved: bool = False,
    ) -> Array:
        arrays = (q, k, v, q_weight, k_weight, cos_sin, slot_mapping, k_cache, v_cache)
        return self._rope("qk_norm_rope_kv_write", arrays, eps, interleaved)

    def _rope(self, kernel: str, arrays: tuple[Any, ...], eps: float, interleaved: bool) -> Array:
        q, k, v, q_weight, k_weight, cos_sin, slot_mapping, k_cache, v_cache = arrays
        q_out = poisoned(q.shape, q)
        (num_tokens, n_heads, head_dim), n_kv_heads, rotary_dim = q.shape, k.shape[1], cos_sin.shape[1]
        if not num_tokens:
            return q_out
        num_lanes = -(-(rotary_dim // 2) // width(q)) + -(-(head_dim - rotary_dim) // (2 * width(q)))
        lanes = next(lanes for lanes in LANES if lanes >= num_lanes)
        grid = (num_tokens, -(-(n_heads + 2 * n_kv_heads) * lanes // MAX_THREADS))
        weights = [] if q_weight is None else [q_weight, k_weight]
        arguments = [Strided(q), Strided(k), Strided(v), *weights, cos_sin, slot_mapping, k_cache, v_cache, q_out]
        arguments += map(np.int32, (n_heads, n_kv_heads, head_dim, rotary_dim))
        arguments += [stride(x, axis) for x in (q, k, v, q_out) for axis in (0, 1)]
        if weights:
            arguments += [np.int64(head_dim * (weight.ndim - 1)) for weight in weights]
            arguments.append(np.float32(eps))
        name = f"{kernel}<{TYPES[q.dtype.name]}, {str(interleaved).lower()}, {lanes}>"
        self.launch(name, grid, MAX_THREADS, arguments)
        return q_out


def width(x: Array) -> int:
    """Elements in 16 bytes."""
    return 16 // x.itemsize


def row_shape(x: Array) -> tuple[int, int]:
    """(threads, rounds) of a block that owns a row."""
    pieces = -(-x.shape[1] // width(x))
    threads = min(MAX_THREADS, -(-pieces // 32) * 32)
    return threads, -(-pieces // threads)


def stride(x: Array, axis: int = 0) -> np.int64:
    """In elements."""
    return np.int64(x.strides[axis] // x.itemsize)


def poisoned(shape: tuple[int, ...], like: Array) -> Array:
    """NaN everywhere, so that an element which is never written is seen, and MARGIN more of it on both sides."""
    whole = np.full(math.prod(shape) + 2 * MARGIN, np.nan, like.dtype)
    return whole[MARGIN : len(whole) - MARGIN].reshape(shape)


def margin_is_written(array: Array) -> bool:
    """Of an array made by poisoned."""
    whole = array.base
    assert whole is not None
    return not np.isnan(np.concatenate([whole[:MARGIN], whole[-MARGIN:]]).astype(np.float32)).all()
