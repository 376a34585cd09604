"""Attention over caches that hold codes of 8 bits: cases of kv_cache_codes, and what all of them share."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.attention import CHUNKS, EDGES, MIXED, TILES, Lens
from conformance.case import HALVES, Case, Inputs, Kept, Outputs
from conformance.inputs import GARBAGE, guarded, normal, paged_kv
from engine.coded_kv import CodedKV
from engine.ops import OpTable
from ref.attention import attention_decode, attention_prefill, first_visible
from ref.kv_cache import kv_cache_slots
from ref.quant.kv import kv_dequantize, kv_quantize

Array = NDArray[Any]

STEM = "kv_cache_codes"
CACHES = ("k_codes", "v_codes", "k_scales", "v_scales")
SCALES = ("k_scales", "v_scales")
NO_CODE = {"fp8": 0x7F, "int8": -128}  # NaN, and what no number is rounded to


def coded(inputs: Inputs) -> Inputs:
    """The same with each cache's codes and scales as one thing, as ops take them."""
    rest = {name: value for name, value in inputs.items() if name not in CACHES}
    caches = {f"{x}_cache": CodedKV(inputs[f"{x}_codes"], inputs[f"{x}_scales"]) for x in "kv"}
    return rest | caches


def decoded(inputs: Inputs) -> Inputs:
    """The same with caches of numbers, as ref.attention takes them."""
    rest = {name: value for name, value in inputs.items() if name not in CACHES}
    return rest | {f"{x}_cache": kv_dequantize(inputs[f"{x}_codes"], inputs[f"{x}_scales"]) for x in "kv"}


def reads(kind: str) -> list[Case]:
    """Decode and prefill over codes of this kind, with values of usual, tiny and huge sizes."""
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
        stem=STEM,
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
