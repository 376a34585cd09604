"""Cases of caches that hold codes of 8 bits: their write, with and without a rotation, and the copy of whole blocks.

Attention that reads them is in conformance/kv_cache_codes_read.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.case import HALVES, Case, Inputs, Kept, Outputs
from conformance.inputs import guarded, normal
from conformance.kv_cache_codes_read import CACHES, NO_CODE, SCALES, STEM, coded, reads
from conformance.tolerance import EXACT
from engine.coded_kv import CODES, CodedKV
from engine.ops import OpTable
from ref.kv_cache import kv_cache_copy, kv_cache_swap, kv_cache_write
from ref.numerics import round_to
from ref.quant.kv import kv_dequantize, kv_quantized_write
from ref.rmsnorm import qk_norm
from ref.rope import rope, rope_cos_sin, rope_inv_freq

Array = NDArray[Any]

NO_PADDING = {"cpu": "a CPU step has no padding: every token has a slot"}
WHOLE = {"cpu": "no model that the CPU serves turns a part of its heads"}
WRITES = {  # num_tokens, n_heads, n_kv_heads, head_dim, block_size
    "no-tokens": (0, 4, 2, 16, 4),
    "one-token": (1, 9, 3, 64, 16),
    "gqa": (37, 6, 2, 24, 16),
    "mqa": (65, 8, 1, 10, 8),
    "dim-80": (5, 8, 2, 80, 32),
    "dim128": (6, 16, 2, 128, 16),
    "dim256": (2, 2, 1, 256, 16),
}
PADDING = 5  # tokens without a slot, the last ones


def cases() -> list[Case]:
    return [case for kind in CODES for case in (*_writes(kind), *reads(kind), *_copies(kind))]


# ---- writes


def _writes(kind: str) -> list[Case]:
    found = [_write_case(f"{kind}-{name}", kind, shape) for name, shape in WRITES.items()]
    if kind == "int8":  # only how a code is made is another thing
        return [*found, _write_case(f"{kind}-qk-norm", kind, WRITES["mqa"], op="qk_norm_rope_kv_write")]
    found += [
        _write_case(f"{kind}-plain-{name}", kind, WRITES[name], op="kv_cache_write") for name in ("mqa", "dim128")
    ]
    found += [
        _write_case(f"{kind}-qk-norm-{name}", kind, WRITES[name], op="qk_norm_rope_kv_write")
        for name in ("one-token", "mqa", "dim128", "dim256")
    ]
    return [
        *found,
        _write_case(f"{kind}-interleaved", kind, WRITES["gqa"], interleaved=True),
        _write_case(f"{kind}-part", kind, WRITES["dim-80"], rotary_dim=32, skip=WHOLE),
        _write_case(f"{kind}-padding", kind, WRITES["gqa"], num_padding=PADDING, skip=NO_PADDING),
    ]


def _write_case(
    name: str,
    kind: str,
    shape: tuple[int, int, int, int, int],
    op: str = "rope_kv_write",
    rotary_dim: int | None = None,
    num_padding: int = 0,
    interleaved: bool = False,
    skip: dict[str, str] | None = None,
) -> Case:
    """Turns are by right angles, so that no rounding lies between a number and its code; but after a norm it does:
    there what the codes of k stand for is compared, and not they themselves."""
    num_tokens, n_heads, n_kv_heads, head_dim, block_size = shape
    axes = {
        "num_tokens": num_tokens,
        "n_heads": n_heads,
        "n_kv_heads": n_kv_heads,
        "head_dim": head_dim,
        "block_size": block_size,
        "num_padding": num_padding,
        "rotary_dim": head_dim if rotary_dim is None else rotary_dim,
    }
    settings = {"interleaved": True} if interleaved else {}
    return Case(
        stem=STEM,
        name=f"write-{name}",
        axes=axes | settings | {"kind": kind},
        make_inputs=lambda seed: _write_inputs(seed, kind, op, **axes) | settings,
        reference=_write_reference,
        candidate=partial(_write_candidate, op=op),
        changes=CACHES,
        disturb=_disturb_writes,
        storages=HALVES,
        wide=("cos_sin", *SCALES, "k_decoded"),
        skip=skip or {},
    )


def _write_inputs(
    seed: int,
    kind: str,
    op: str,
    num_tokens: int,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
    block_size: int,
    num_padding: int,
    rotary_dim: int,
) -> Inputs:
    """Heads of all sizes; of the values one is zeros, one infinity, one NaN, one what lies between two codes."""
    rng = np.random.default_rng(seed)
    n_heads = 0 if op == "kv_cache_write" else n_heads
    sizes = np.float32(2.0) ** rng.integers(-8, 8, (num_tokens, n_heads + 2 * n_kv_heads, 1)).astype(np.float32)
    qkv = guarded(normal(rng, num_tokens, n_heads + 2 * n_kv_heads, head_dim) * sizes)
    q, k, v = qkv[:, :n_heads], qkv[:, n_heads : n_heads + n_kv_heads], qkv[:, n_heads + n_kv_heads :]
    if num_tokens > 4:
        v[0, 0], v[1, 0, 1], v[2, 0, -1] = 0.0, -np.inf, np.nan
        v[3, 0] = np.resize(np.arange(-8, 9) / 2, head_dim)  # steps of int8 and their halves: its scale is 1
        v[3, 0, 0] = 127.0
        v[4, 0] = np.resize([448, -432, 17, 19, 0.0009765625, 0.0029296875, 464, 0.013671875], head_dim)
        v[4, 0, v[4, 0] > 448] = 448.0
    inputs: Inputs = {"q": q, "k": k, "v": v}
    if op == "qk_norm_rope_kv_write":
        inputs |= {"q_weight": normal(rng, head_dim), "k_weight": normal(rng, head_dim), "eps": 0.1}
        cos_sin = rope_cos_sin(rope_inv_freq("default", 1e4, rotary_dim), rng.integers(0, 8192, num_tokens))
        inputs["cos_sin"] = cos_sin.astype(np.float32)
    elif op == "rope_kv_write":
        quarters = rng.integers(0, 4, (num_tokens, rotary_dim // 2))
        cos, sin = np.array([1, 0, -1, 0])[quarters], np.array([0, 1, 0, -1])[quarters]
        inputs["cos_sin"] = np.concatenate([cos, sin], axis=1).astype(np.float32)
    else:
        inputs.pop("q")
    num_blocks = -(-num_tokens // block_size) + 2
    inputs["slot_mapping"] = rng.permutation(num_blocks * block_size)[:num_tokens].astype(np.int32)
    inputs["slot_mapping"][num_tokens - num_padding :] = -1
    shape = (num_blocks, block_size, n_kv_heads, head_dim)
    for x in "kv":
        inputs[f"{x}_codes"] = guarded(np.full(shape, NO_CODE[kind], CODES[kind]), num_axes=1)
        inputs[f"{x}_scales"] = guarded(np.full(shape[:3], np.nan, np.float32), num_axes=1)
    return inputs


def _write_reference(
    k: Array,
    v: Array,
    slot_mapping: Array,
    k_codes: Array,
    v_codes: Array,
    k_scales: Array,
    v_scales: Array,
    q: Array | None = None,
    cos_sin: Array | None = None,
    q_weight: Array | None = None,
    k_weight: Array | None = None,
    eps: float = 0.0,
    interleaved: bool = False,
    storage: str | None = None,
) -> Outputs:
    """With a norm, k is what the codes of this storage type stand for, and in truth what was to be coded."""
    outputs: Outputs = {}
    caches = [array.copy() for array in (k_codes, v_codes, k_scales, v_scales)]
    if q is not None and cos_sin is not None:
        if q_weight is not None and k_weight is not None:
            q, k = qk_norm(q, k, q_weight, k_weight, eps)
        outputs["q"], k = (rope(x, cos_sin, interleaved=interleaved) for x in (q, k))
    kv_quantized_write(round_to(k, storage), v, slot_mapping, *caches)
    outputs |= {"v_codes": caches[1], "v_scales": caches[3]}
    if q_weight is None:
        return outputs | {"k_codes": caches[0], "k_scales": caches[2]}
    if storage is not None:
        return outputs | {"k_decoded": kv_dequantize(caches[0], caches[2])}
    numbers = np.full(k_codes.shape, np.nan, k.dtype)
    kv_cache_write(k, k, slot_mapping, numbers, numbers)
    return outputs | {"k_decoded": numbers}


def _write_candidate(ops: OpTable, op: str, **inputs: Any) -> Outputs:
    q = getattr(ops, op)(**coded(inputs))
    outputs = {"v_codes": inputs["v_codes"], "v_scales": inputs["v_scales"]} | ({} if q is None else {"q": q})
    if op != "qk_norm_rope_kv_write":
        return outputs | {"k_codes": inputs["k_codes"], "k_scales": inputs["k_scales"]}
    codes, scales = (np.asarray(x.get() if hasattr(x, "get") else x) for x in (inputs["k_codes"], inputs["k_scales"]))
    return outputs | {"k_decoded": kv_dequantize(codes, scales)}


def _disturb_writes(inputs: Inputs, rng: np.random.Generator) -> Kept:
    """All tokens but one; of the caches, only what the others write may differ."""
    num_tokens, block_size = len(inputs["k"]), inputs["k_codes"].shape[1]
    others = np.arange(num_tokens) != (int(rng.integers(num_tokens)) if num_tokens else 0)
    for name in ("q", "k", "v"):
        if name in inputs:
            inputs[name][others] = normal(rng, int(others.sum()), *inputs[name].shape[1:])
    written = inputs["slot_mapping"][others & (inputs["slot_mapping"] >= 0)]
    kept_slots = np.ones(inputs["k_codes"].shape[:2], np.bool_)
    kept_slots[written // block_size, written % block_size] = False
    return dict.fromkeys((*CACHES, "k_decoded"), kept_slots) | {"q": np.flatnonzero(~others)}


# ---- whole blocks


def _copies(kind: str) -> list[Case]:
    shapes = {"odd": (5, 3, 7, 3), "wide": (3, 8, 96, 33)} if kind == "fp8" else {"one": (1, 8, 128, 16)}
    return [
        _copy_case(f"{op}-{kind}-{name}", kind, op, *shape) for op in ("copy", "swap") for name, shape in shapes.items()
    ]


def _copy_case(name: str, kind: str, op: str, num_copies: int, n_kv_heads: int, head_dim: int, block_size: int) -> Case:
    axes = {"num_copies": num_copies, "n_kv_heads": n_kv_heads, "head_dim": head_dim, "block_size": block_size}
    others = tuple(f"other_{name}" for name in CACHES)
    copied = others if op == "swap" else CACHES

    def run(function: Callable[..., None], as_pairs: bool, inputs: Inputs) -> Outputs:
        pairs = [(f"{of}{x}_codes", f"{of}{x}_scales") for of in ("", "other_") for x in "kv"]
        pairs = pairs if op == "swap" else pairs[:2]
        blocks = inputs["src_blocks"], inputs["dst_blocks"]
        if as_pairs:
            function(*(CodedKV(inputs[codes], inputs[scales]) for codes, scales in pairs), *blocks)
        else:
            for part in (0, 1):
                function(*(inputs[pair[part]] for pair in pairs), *blocks)
        return {name: inputs[name] for name in copied}

    def reference(storage: str | None = None, **inputs: Array) -> Outputs:
        return run(kv_cache_swap if op == "swap" else kv_cache_copy, False, inputs)

    return Case(
        stem=STEM,
        name=name,
        axes=axes | {"kind": kind},
        make_inputs=partial(_copy_inputs, kind=kind, swaps=op == "swap", **axes),
        reference=reference,
        candidate=lambda ops, **inputs: run(getattr(ops, f"kv_cache_{op}"), True, inputs),
        tolerance=EXACT,
        changes=copied,
        storages=("bfloat16",),  # in which nothing is stored
        wide=(*SCALES, *(f"other_{name}" for name in SCALES)),
    )


def _copy_inputs(seed: int, kind: str, num_copies: int, swaps: bool, **axes: int) -> Inputs:
    """Blocks in random order, none both source and target; the last and the first are sources."""
    rng = np.random.default_rng(seed)
    num_blocks = 3 * num_copies + 1
    blocks = np.array([num_blocks - 1, 0, *rng.permutation(np.arange(1, num_blocks - 1))], np.int32)[:num_blocks]
    inputs: Inputs = {"src_blocks": blocks[:num_copies], "dst_blocks": blocks[num_copies : 2 * num_copies].copy()}
    if swaps:
        inputs["dst_blocks"] = rng.permutation(num_copies + 2)[:num_copies].astype(np.int32)
    sizes = {"": num_blocks} | ({"other_": num_copies + 2} if swaps else {})
    for of, count in sizes.items():
        shape = (count, axes["block_size"], axes["n_kv_heads"], axes["head_dim"])
        for x in "kv":
            codes = rng.integers(-128, 128, shape).astype(np.int8).view(CODES[kind])
            inputs[f"{of}{x}_codes"] = guarded(codes, num_axes=1)
            inputs[f"{of}{x}_scales"] = guarded(normal(rng, *shape[:3]), num_axes=1)
    return inputs
