"""Cases of the rotary embedding fused with the KV write."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.case import HALVES, Case, Inputs, Kept, Outputs
from conformance.inputs import guarded, normal
from ref.rope import qk_norm_rope_kv_write, rope_cos_sin, rope_inv_freq, rope_kv_write

Array = NDArray[Any]

NO_PADDING = {"cpu": "a CPU step has no padding: every token has a slot"}
WHOLE = {"cpu": "no model that the CPU serves turns a part of its heads"}
HALVES_ONLY = {"cpu": "no model that the CPU serves norms heads and turns neighbours"}

SHAPES = {  # num_tokens, n_heads, n_kv_heads, head_dim, block_size
    "no-tokens": (0, 4, 2, 16, 4),
    "one-token": (1, 9, 3, 64, 16),
    "smallest": (3, 1, 1, 2, 1),
    "gqa": (37, 6, 2, 24, 16),
    "mha": (5, 4, 4, 32, 3),
    "mqa": (65, 8, 1, 10, 8),
    "dim80": (5, 8, 2, 80, 32),
    "dim96": (3, 4, 1, 96, 1),
    "dim128": (6, 16, 2, 128, 16),
    "dim256": (2, 2, 1, 256, 16),
}
ROTARY_DIMS = {"gqa": 10, "dim80": 32, "dim256": 64}  # where a part of each head turns
PADDING = 5  # tokens without a slot, the last ones


def cases() -> list[Case]:
    found = [make_case(name, *shape) for name, shape in SHAPES.items()]
    found += [
        make_case(f"part-{name}", *SHAPES[name], rotary_dim=size, skip=WHOLE) for name, size in ROTARY_DIMS.items()
    ]
    normed = ("one-token", "smallest", "gqa", "mqa", "dim80", "dim128", "dim256")
    found += [make_case(f"qk-norm-{name}", *SHAPES[name], qk_norm=True) for name in normed]
    found.append(make_case("qk-norm-by-head", *SHAPES["gqa"], qk_norm=True, by_head=True))
    interleaved = ("no-tokens", "smallest", "gqa", "dim128")
    found += [make_case(f"interleaved-{name}", *SHAPES[name], interleaved=True) for name in interleaved]
    found.append(make_case("part-interleaved", *SHAPES["dim80"], rotary_dim=32, interleaved=True, skip=WHOLE))
    found.append(make_case("qk-norm-interleaved", *SHAPES["gqa"], qk_norm=True, interleaved=True, skip=HALVES_ONLY))
    found.append(make_case("padding", *SHAPES["gqa"], num_padding=PADDING, skip=NO_PADDING))
    return [*found, make_case("qk-norm-padding", *SHAPES["gqa"], num_padding=PADDING, qk_norm=True, skip=NO_PADDING)]


def make_case(
    name: str,
    num_tokens: int,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
    block_size: int,
    num_padding: int = 0,
    rotary_dim: int | None = None,
    qk_norm: bool = False,
    by_head: bool = False,
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
        "rotary_dim": head_dim if rotary_dim is None else rotary_dim,
    }
    make = partial(_qk_norm_inputs, by_head=by_head) if qk_norm else _inputs
    settings = {"interleaved": True} if interleaved else {}
    return Case(
        stem="rope",
        name=name,
        axes=axes | settings,
        make_inputs=lambda seed: make(seed, **axes) | settings,
        reference=partial(_reference, qk_norm_rope_kv_write if qk_norm else rope_kv_write),
        candidate=lambda ops, **inputs: _run(ops.qk_norm_rope_kv_write if qk_norm else ops.rope_kv_write, **inputs),
        changes=("k_cache", "v_cache"),
        disturb=_disturb,
        storages=(*HALVES, "float32"),
        wide=("cos_sin",),
        skip=skip or {},
    )


def _inputs(
    seed: int,
    num_tokens: int,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
    block_size: int,
    num_padding: int,
    rotary_dim: int,
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
        "cos_sin": rope_cos_sin(rope_inv_freq("default", 1e4, rotary_dim), positions).astype(np.float32),
        "slot_mapping": slot_mapping,
        "k_cache": guarded(np.full(shape, np.nan, np.float32), num_axes=1),
        "v_cache": guarded(np.full(shape, np.nan, np.float32), num_axes=1),
    }


def _qk_norm_inputs(seed: int, by_head: bool, **axes: int) -> Inputs:
    """The same, and norms of the heads, with a weight for all or one for each, and an eps that matters."""
    rng = np.random.default_rng(seed + 1)
    inputs = _inputs(seed, **axes)
    head_dim = (axes["head_dim"],)
    weights = {
        f"{name}_weight": normal(rng, *((axes[heads],) if by_head else ()), *head_dim)
        for name, heads in (("q", "n_heads"), ("k", "n_kv_heads"))
    }
    return {name: inputs[name] for name in ("q", "k", "v")} | weights | {"eps": 0.1} | inputs


def _reference(op: Callable[..., Array], *, storage: str | None = None, **inputs: Array) -> Outputs:
    return _run(partial(op, storage=storage) if op is qk_norm_rope_kv_write else op, **inputs)


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
    written = inputs["slot_mapping"][others & (inputs["slot_mapping"] >= 0)]
    kept_slots = np.ones(inputs["k_cache"].shape[:2], np.bool_)
    kept_slots[written // block_size, written % block_size] = False
    return {"q": slice(keep, keep + 1), "k_cache": kept_slots, "v_cache": kept_slots}
