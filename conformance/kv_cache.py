"""Cases of the write of keys and values without a rotation, for models whose positions are learned, and of the copy of
whole blocks within a cache and to another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.case import HALVES, Case, Inputs, Kept, Outputs
from conformance.inputs import guarded, normal
from conformance.tolerance import EXACT
from engine.ops import OpTable
from ref.kv_cache import kv_cache_copy, kv_cache_swap, kv_cache_write

Array = NDArray[Any]

SHAPES = {  # num_tokens, n_kv_heads, head_dim, block_size
    "no-tokens": (0, 2, 16, 4),
    "one-token": (1, 3, 64, 16),
    "smallest": (3, 1, 1, 1),
    "many": (37, 2, 24, 16),
    "odd": (65, 5, 7, 3),
}
COPIES = {  # num_copies, n_kv_heads, head_dim, block_size
    "none": (0, 2, 64, 16),
    "one": (1, 8, 128, 16),
    "smallest": (2, 1, 1, 1),
    "odd": (5, 3, 7, 3),
    "many": (40, 2, 24, 16),
    "wider-than-a-block": (3, 8, 96, 33),
    "wide-odd": (2, 7, 45, 33),
}


def cases() -> list[Case]:
    copies = [_copy_case(f"{op}-{name}", op, *shape) for op in ("copy", "swap") for name, shape in COPIES.items()]
    return [make_case(name, *shape) for name, shape in SHAPES.items()] + copies


def make_case(name: str, num_tokens: int, n_kv_heads: int, head_dim: int, block_size: int) -> Case:
    axes = {"num_tokens": num_tokens, "n_kv_heads": n_kv_heads, "head_dim": head_dim, "block_size": block_size}
    return Case(
        stem="kv_cache",
        name=name,
        axes=axes,
        make_inputs=partial(_inputs, **axes),
        reference=_reference,
        candidate=_candidate,
        tolerance=EXACT,
        changes=("k_cache", "v_cache"),
        disturb=_disturb,
        storages=(*HALVES, "float32"),
    )


def _inputs(seed: int, num_tokens: int, n_kv_heads: int, head_dim: int, block_size: int) -> Inputs:
    """k and v are views of one fused projection, as in a model; the cache is NaN, so unwritten slots stay NaN."""
    rng = np.random.default_rng(seed)
    kv = guarded(normal(rng, num_tokens, 2 * n_kv_heads, head_dim))
    num_blocks = -(-num_tokens // block_size) + 2
    shape = (num_blocks, block_size, n_kv_heads, head_dim)
    return {
        "k": kv[:, :n_kv_heads],
        "v": kv[:, n_kv_heads:],
        "slot_mapping": rng.permutation(num_blocks * block_size)[:num_tokens].astype(np.int32),
        "k_cache": guarded(np.full(shape, np.nan, np.float32), num_axes=1),
        "v_cache": guarded(np.full(shape, np.nan, np.float32), num_axes=1),
    }


def _reference(k_cache: Array, v_cache: Array, *, storage: str | None = None, **inputs: Array) -> Outputs:
    kv_cache_write(**inputs, k_cache=k_cache, v_cache=v_cache)
    return {"k_cache": k_cache, "v_cache": v_cache}


def _candidate(ops: OpTable, k_cache: Array, v_cache: Array, **inputs: Array) -> Outputs:
    ops.kv_cache_write(**inputs, k_cache=k_cache, v_cache=v_cache)  # type: ignore[call-arg]
    return {"k_cache": k_cache, "v_cache": v_cache}


def _disturb(inputs: Inputs, rng: np.random.Generator) -> Kept:
    """All tokens but one; of the caches, only what the others write may differ."""
    num_tokens = len(inputs["k"])
    others = np.arange(num_tokens) != (int(rng.integers(num_tokens)) if num_tokens else 0)
    for name in ("k", "v"):
        inputs[name][others] = normal(rng, int(others.sum()), *inputs[name].shape[1:])
    block_size, written = inputs["k_cache"].shape[1], inputs["slot_mapping"][others]
    kept_slots = np.ones(inputs["k_cache"].shape[:2], np.bool_)
    kept_slots[written // block_size, written % block_size] = False
    return {"k_cache": kept_slots, "v_cache": kept_slots}


# ---- whole blocks


def _copy_case(name: str, op: str, num_copies: int, n_kv_heads: int, head_dim: int, block_size: int) -> Case:
    axes = {"num_copies": num_copies, "n_kv_heads": n_kv_heads, "head_dim": head_dim, "block_size": block_size}
    swaps = op == "swap"
    return Case(
        stem="kv_cache",
        name=name,
        axes=axes,
        make_inputs=partial(_copy_inputs, swaps=swaps, **axes),
        reference=partial(_copy_reference, kv_cache_swap if swaps else kv_cache_copy),
        candidate=lambda ops, **inputs: _copied(ops.kv_cache_swap if swaps else ops.kv_cache_copy, inputs),
        tolerance=EXACT,
        changes=("k_other", "v_other") if swaps else ("k_cache", "v_cache"),
        disturb=None if swaps else _disturb_copies,
        storages=(*HALVES, "float32"),
        skip={"cpu": "the CPU's op table holds the functions of ref.kv_cache themselves"},
    )


def _copy_inputs(seed: int, num_copies: int, swaps: bool, **axes: int) -> Inputs:
    """Blocks in random order, none both source and target; a third is neither. The last and the first are sources:
    what lies behind the last is nobody's. What lies in a target is NaN."""
    rng = np.random.default_rng(seed)
    num_blocks = 3 * num_copies + 1
    shape = (axes["block_size"], axes["n_kv_heads"], axes["head_dim"])
    blocks = np.array([num_blocks - 1, 0, *rng.permutation(np.arange(1, num_blocks - 1))], np.int32)[:num_blocks]
    inputs = {
        "k_cache": guarded(normal(rng, num_blocks, *shape), num_axes=1),
        "v_cache": guarded(normal(rng, num_blocks, *shape), num_axes=1),
        "src_blocks": blocks[:num_copies],
        "dst_blocks": blocks[num_copies : 2 * num_copies].copy(),
    }
    if not swaps:
        for cache in (inputs["k_cache"], inputs["v_cache"]):
            cache[inputs["dst_blocks"]] = np.nan
        return inputs
    inputs["dst_blocks"] = rng.permutation(num_copies + 2)[:num_copies].astype(np.int32)
    others = (guarded(np.full((num_copies + 2, *shape), np.nan, np.float32), num_axes=1) for _ in range(2))
    return inputs | dict(zip(("k_other", "v_other"), others, strict=True))


def _copy_reference(function: Callable[..., None], storage: str | None = None, **inputs: Array) -> Outputs:
    return _copied(function, inputs)


def _copied(function: Callable[..., None], inputs: Mapping[str, Array]) -> Outputs:
    function(**inputs)
    return {name: array for name, array in inputs.items() if name[:2] in ("k_", "v_")}


def _disturb_copies(inputs: Inputs, rng: np.random.Generator) -> Kept:
    """All blocks that are not read by the first copy."""
    kept = np.zeros(len(inputs["k_cache"]), np.bool_)
    if len(inputs["src_blocks"]):
        kept[[inputs["src_blocks"][0], inputs["dst_blocks"][0]]] = True
    for name in ("k_cache", "v_cache"):
        inputs[name][~kept] = normal(rng, int((~kept).sum()), *inputs[name].shape[1:])
    return {"k_cache": kept, "v_cache": kept}
