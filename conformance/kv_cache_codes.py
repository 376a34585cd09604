"""Cases of caches that hold codes of 8 bits: their write, with and without a rotation, attention that reads them, and
the copy of whole blocks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.attention import CHUNKS, EDGES, MIXED, TILES, Lens
from conformance.case import HALVES, Case, Inputs, Kept, Outputs
from conformance.inputs import GARBAGE, guarded, normal, paged_kv
from conformance.tolerance import EXACT
from engine.coded_kv import CODES, CodedKV
from engine.ops import OpTable
from ref.attention import attention_decode, attention_prefill, first_visible
from ref.kv_cache import kv_cache_copy, kv_cache_slots, kv_cache_swap, kv_cache_write
from ref.numerics import round_to
from ref.quant.kv import kv_dequantize, kv_quantize, kv_quantized_write
from ref.rmsnorm import qk_norm
from ref.rope import rope, rope_cos_sin, rope_inv_freq

Array = NDArray[Any]

CACHES = ("k_codes", "v_codes", "k_scales", "v_scales")
SCALES = ("k_scales", "v_scales")
NO_CODE = {"fp8": 0x7F, "int8": -128}  # NaN, and what no number is rounded to
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
    return [case for kind in CODES for case in (*_writes(kind), *_reads(kind), *_copies(kind))]


def coded(inputs: Inputs) -> Inputs:
    """The same with each cache's codes and scales as one thing, as ops take them."""
    rest = {name: value for name, value in inputs.items() if name not in CACHES}
    caches = {f"{x}_cache": CodedKV(inputs[f"{x}_codes"], inputs[f"{x}_scales"]) for x in "kv"}
    return rest | caches


def decoded(inputs: Inputs) -> Inputs:
    """The same with caches of numbers, as ref.attention takes them."""
    rest = {name: value for name, value in inputs.items() if name not in CACHES}
    return rest | {f"{x}_cache": kv_dequantize(inputs[f"{x}_codes"], inputs[f"{x}_scales"]) for x in "kv"}


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
        stem="kv_cache_codes",
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


# ---- reads


def _reads(kind: str) -> list[Case]:
    decodes = {
        "one-token": {"seq_lens": (1,)},
        "mixed": {"seq_lens": MIXED},
        "block-edges": {"seq_lens": EDGES, "block_size": 16},
        "block-1": {"seq_lens": (7, 3), "block_size": 1},
        "mha": {"seq_lens": MIXED, "n_heads": 4, "n_kv_heads": 4},
        "gqa7-dim80": {"seq_lens": (40, 17, 1), "n_heads": 14, "head_dim": 80, "block_size": 16},
        "heads16-dim96": {"seq_lens": (50, 3), "n_heads": 16, "n_kv_heads": 1, "head_dim": 96, "block_size": 1},
        "heads8-dim128": {"seq_lens": (63, 65), "n_heads": 16, "head_dim": 128, "block_size": 32},
        "heads24-dim256": {"seq_lens": (20, 70), "n_heads": 24, "n_kv_heads": 1, "head_dim": 256, "block_size": 16},
        "splits": {"seq_lens": (600, 90), "n_heads": 8, "head_dim": 128, "block_size": 16},
        "window-70": {"seq_lens": (260, 140), "n_heads": 2, "n_kv_heads": 1, "block_size": 16, "window": 70},
        "window-7": {"seq_lens": MIXED, "window": 7},
        "no-sequence": {"seq_lens": ()},
    }
    prefills = {
        "one-token": {"query_lens": (1,), "seq_lens": (1,)},
        "chunks": {"query_lens": CHUNKS[0], "seq_lens": CHUNKS[1]},
        "block-1": {"query_lens": CHUNKS[0], "seq_lens": CHUNKS[1], "block_size": 1},
        "gqa7-dim80": {"query_lens": CHUNKS[0], "seq_lens": CHUNKS[1], "n_heads": 14, "head_dim": 80},
        "heads4-dim128": {"query_lens": CHUNKS[0], "seq_lens": CHUNKS[1], "n_heads": 8, "head_dim": 128},
        "dim96": {"query_lens": CHUNKS[0], "seq_lens": CHUNKS[1], "n_heads": 2, "n_kv_heads": 1, "head_dim": 96},
        "dim256": {"query_lens": (9, 40), "seq_lens": (70, 45), "n_heads": 2, "n_kv_heads": 1, "head_dim": 256},
        "tiles": {"query_lens": TILES[0], "seq_lens": TILES[1], "n_heads": 2, "n_kv_heads": 1, "block_size": 16},
        "tiles-window-20": {"query_lens": TILES[0], "seq_lens": TILES[1], "n_heads": 2, "n_kv_heads": 1, "window": 20},
        "window-5": {"query_lens": CHUNKS[0], "seq_lens": CHUNKS[1], "window": 5},
    }
    if kind == "int8":  # only how a code is read is another thing
        few = ("mixed", "heads8-dim128", "heads24-dim256", "splits", "window-70")
        few += ("chunks", "heads4-dim128", "tiles-window-20")
        decodes, prefills = ({name: axes for name, axes in of.items() if name in few} for of in (decodes, prefills))
    found = [_read_case(f"decode-{kind}-{name}", kind, attention_decode, **axes) for name, axes in decodes.items()]
    found += [_read_case(f"prefill-{kind}-{name}", kind, attention_prefill, **axes) for name, axes in prefills.items()]
    sizes = {"tiny": 2.0**-12, "huge": 2.0**9}  # of values; the heads of the others are near 1
    for name, size in sizes.items():
        found.append(_read_case(f"decode-{kind}-{name}", kind, attention_decode, seq_lens=(300, 33), value_size=size))
        axes = {"query_lens": (20,), "seq_lens": (150,), "value_size": size}
        found.append(_read_case(f"prefill-{kind}-{name}", kind, attention_prefill, **axes))
    return found


def _read_case(name: str, kind: str, function: Callable[..., Array], **changed: Any) -> Case:
    usual = {"n_heads": 6, "n_kv_heads": 2, "head_dim": 64, "block_size": 4, "window": None, "value_size": 1.0}
    axes: dict[str, Any] = usual | {"kind": kind} | changed

    def candidate(ops: OpTable, **inputs: Any) -> Outputs:
        return {"out": getattr(ops, function.__name__)(**coded(inputs))}

    return Case(
        stem="kv_cache_codes",
        name=name,
        axes=axes,
        make_inputs=partial(_read_inputs, **axes),
        reference=lambda **inputs: {"out": function(**decoded(inputs))},
        candidate=candidate,
        disturb=_disturb_reads,
        storages=HALVES,
        wide=SCALES,
        skip={} if axes["seq_lens"] else {"cpu": "the engine calls attention with at least one sequence"},
    )


def _read_inputs(
    seed: int,
    kind: str,
    seq_lens: Lens,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
    block_size: int,
    window: int | None,
    value_size: float,
    query_lens: Lens | None = None,
) -> Inputs:
    """Scales differ from token to token; every third key's head is zeros. What nobody owns has a NaN for its scale."""
    rng = np.random.default_rng(seed)
    num_tokens = len(seq_lens) if query_lens is None else sum(query_lens)
    paged = paged_kv(rng, seq_lens, block_size, n_kv_heads, head_dim)
    inputs: Inputs = {"q": guarded(normal(rng, num_tokens, n_heads, head_dim, scale=3.0), num_axes=2)}
    for x, size in (("k", 1.0), ("v", value_size)):
        cache = paged.pop(f"{x}_cache")
        sizes = size * np.float32(2.0) ** rng.uniform(-2, 1, cache.shape[:3]).astype(np.float32)
        sizes[rng.integers(0, 9, sizes.shape) == 0] = 0.0
        codes, scales = kv_quantize(cache * sizes[..., None].astype(np.float32), kind)
        codes[np.isnan(cache)] = NO_CODE[kind]
        scales[np.isnan(cache[..., 0])] = np.nan
        inputs[f"{x}_codes"], inputs[f"{x}_scales"] = (guarded(array, num_axes=1) for array in (codes, scales))
    inputs |= {**paged, "seq_lens": np.array(seq_lens, np.int32), "sm_scale": head_dim**-0.5, "window": window}
    if query_lens is not None:
        inputs["cu_seqlens_q"] = np.cumsum([0, *query_lens], dtype=np.int32)
    return inputs


def _disturb_reads(inputs: Inputs, rng: np.random.Generator) -> Kept:
    """All sequences but one, what its window hides, and all unused memory."""
    q, seq_lens, block_table = inputs["q"], inputs["seq_lens"], inputs["block_table"]
    cu_seqlens_q = inputs.get("cu_seqlens_q", np.arange(len(seq_lens) + 1))
    keep = int(rng.integers(len(seq_lens))) if len(seq_lens) else 0
    rows = slice(int(cu_seqlens_q[keep]), int(cu_seqlens_q[keep + 1])) if len(seq_lens) else slice(0, 0)
    others = np.ones(len(q), np.bool_)
    others[rows] = False
    q[others] = normal(rng, int(others.sum()), *q.shape[1:])
    block_size = inputs["k_codes"].shape[1]
    owned, changed = (np.zeros(inputs["k_codes"].shape[:2], np.bool_) for _ in range(2))
    for row, seq_len in enumerate(seq_lens.tolist()):
        slots = kv_cache_slots(block_table[row], np.arange(seq_len), block_size)
        owned[slots // block_size, slots % block_size] = True
        oldest = first_visible(seq_len - (rows.stop - rows.start), inputs["window"]) if row == keep else seq_len
        changed[slots[:oldest] // block_size, slots[:oldest] % block_size] = True
    for x in "kv":
        codes, scales = inputs[f"{x}_codes"], inputs[f"{x}_scales"]
        codes[changed | ~owned] = rng.integers(0, 120, codes.shape).astype(codes.dtype)[changed | ~owned]
        scales[changed] = rng.uniform(0.001, 0.01, scales.shape).astype(np.float32)[changed]
        scales[~owned] = GARBAGE
    return {"out": rows}


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
        stem="kv_cache_codes",
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
