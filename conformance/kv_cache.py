"""Cases of the write of keys and values without a rotation, for models whose positions are learned."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.case import HALVES, Case, Inputs, Kept, Outputs
from conformance.inputs import guarded, normal
from conformance.tolerance import EXACT
from engine.ops import OpTable
from ref.kv_cache import kv_cache_write

Array = NDArray[Any]

SHAPES = {  # num_tokens, n_kv_heads, head_dim, block_size
    "no-tokens": (0, 2, 16, 4),
    "one-token": (1, 3, 64, 16),
    "smallest": (3, 1, 1, 1),
    "many": (37, 2, 24, 16),
    "odd": (65, 5, 7, 3),
}


def cases() -> list[Case]:
    return [make_case(name, *shape) for name, shape in SHAPES.items()]


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
