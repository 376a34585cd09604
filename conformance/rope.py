"""Cases of the rotary embedding fused with the KV write."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.case import Case, Inputs, Kept, Outputs
from conformance.inputs import guarded, normal
from ref.rope import qk_norm_rope_kv_write, rope_cos_sin, rope_inv_freq, rope_kv_write

Array = NDArray[Any]

SHAPES = {  # num_tokens, n_heads, n_kv_heads, head_dim, block_size
    "no-tokens": (0, 4, 2, 16, 4),
    "one-token": (1, 9, 3, 64, 16),
    "smallest": (3, 1, 1, 2, 1),
    "gqa": (37, 6, 2, 24, 16),
    "mha": (5, 4, 4, 32, 3),
    "mqa": (65, 8, 1, 10, 8),
}


def cases() -> list[Case]:
    found = [_case(name, *shape) for name, shape in SHAPES.items()]
    found += [_case(f"qk-norm-{name}", *SHAPES[name], qk_norm=True) for name in ("one-token", "gqa", "mqa")]
    found += [
        _case(f"interleaved-{name}", *SHAPES[name], interleaved=True) for name in ("no-tokens", "smallest", "gqa")
    ]
    padding = "a CPU step has no padding: every token has a slot"
    return [*found, _case("padding", *SHAPES["gqa"], num_padding=5, skip={"cpu": padding})]


def _case(
    name: str,
    num_tokens: int,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
    block_size: int,
    num_padding: int = 0,
    qk_norm: bool = False,
    interleaved: bool = False,
    skip: dict[str, str] | None = None,
) -> Case:
    axes = {
        "num_tokens": num_tokens,
        "n_heads": n_heads,
        "n_kv_heads": n_kv_heads,
        "head_dim": head_dim,
        "block_size": block_size,
        "num_padding": num_padding,
    }
    settings = {"interleaved": True} if interleaved else {}
    return Case(
        stem="rope",
        name=name,
        axes=axes | settings,
        make_inputs=lambda seed: (_qk_norm_inputs if qk_norm else _inputs)(seed, **axes) | settings,
        reference=partial(_run, qk_norm_rope_kv_write if qk_norm else rope_kv_write),
        candidate=lambda ops, **inputs: _run(ops.qk_norm_rope_kv_write if qk_norm else ops.rope_kv_write, **inputs),
        changes=("k_cache", "v_cache"),
        disturb=_disturb,
        skip=skip or {},
    )


def _inputs(
    seed: int, num_tokens: int, n_heads: int, n_kv_heads: int, head_dim: int, block_size: int, num_padding: int
) -> Inputs:
    """q, k, v are views of one fused projection, as in a model; the cache is NaN, so unwritten slots stay NaN."""
    rng = np.random.default_rng(seed)
    qkv = guarded(normal(rng, num_tokens, n_heads + 2 * n_kv_heads, head_dim))
    positions = rng.integers(0, 8192, num_tokens)
    num_blocks = -(-num_tokens // block_size) + 2
    slot_mapping = rng.permutation(num_blocks * block_size)[:num_tokens].astype(np.int32)
    slot_mapping[num_tokens - num_padding :] = -1
    shape = (num_blocks, block_size, n_kv_heads, head_dim)
    return {
        "q": qkv[:, :n_heads],
        "k": qkv[:, n_heads : n_heads + n_kv_heads],
        "v": qkv[:, n_heads + n_kv_heads :],
        "cos_sin": rope_cos_sin(rope_inv_freq("default", 1e4, head_dim), positions).astype(np.float32),
        "slot_mapping": slot_mapping,
        "k_cache": guarded(np.full(shape, np.nan, np.float32), num_axes=1),
        "v_cache": guarded(np.full(shape, np.nan, np.float32), num_axes=1),
    }


def _qk_norm_inputs(seed: int, head_dim: int, **axes: int) -> Inputs:
    """The same, and norms of the heads with an eps that matters."""
    rng = np.random.default_rng(seed + 1)
    inputs = _inputs(seed, head_dim=head_dim, **axes)
    weights = {name: normal(rng, head_dim) for name in ("q_weight", "k_weight")}
    return {name: inputs[name] for name in ("q", "k", "v")} | weights | {"eps": 0.1} | inputs


def _run(op: Callable[..., Array], k_cache: Array, v_cache: Array, **inputs: Array) -> Outputs:
    q = op(**inputs, k_cache=k_cache, v_cache=v_cache)
    return {"q": q, "k_cache": k_cache, "v_cache": v_cache}


def _disturb(inputs: Inputs, rng: np.random.Generator) -> Kept:
    """All tokens but one; of the caches, only what the others write may differ."""
    num_tokens = len(inputs["q"])
    keep = int(rng.integers(num_tokens)) if num_tokens else 0
    others = np.arange(num_tokens) != keep
    for name in ("q", "k", "v"):
        inputs[name][others] = normal(rng, int(others.sum()), *inputs[name].shape[1:])
    block_size = inputs["k_cache"].shape[1]
    written = inputs["slot_mapping"][others]
    kept_slots = np.ones(inputs["k_cache"].shape[:2], np.bool_)
    kept_slots[written // block_size, written % block_size] = False
    return {"q": slice(keep, keep + 1), "k_cache": kept_slots, "v_cache": kept_slots}
