"""Cases of multi-head latent attention: the write of latents, one query a sequence (absorbed), and chunks of prompts
(expanded)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.case import Case, Inputs, Kept, Outputs
from conformance.inputs import disturb_paged_kv, guarded, normal, paged_kv
from engine.ops import OpTable
from engine.weights import LinearWeight
from ref.mla import mla_decode, mla_prefill, mla_sm_scale
from ref.mla_latent import mla_rope_latent_write
from ref.rope import rope_cos_sin, rope_inv_freq

Array = NDArray[Any]
Lens = tuple[int, ...]

MIXED: Lens = (33, 1, 100, 8, 2, 7, 9, 31, 3, 64)  # on both sides of powers of two, which the CPU groups by
CHUNKS: tuple[Lens, Lens] = ((4, 1, 7, 16, 3), (20, 33, 7, 48, 4))  # with a past; one is the whole prompt, one decode
TILES: tuple[Lens, Lens] = ((150, 129), (170, 129))  # longer than the 128 queries that a CPU takes at once
SMALLEST = {"n_heads": 1, "rank": 1, "nope": 1, "rotated": 2, "v_dim": 1}
WIDE_VALUES = {"nope": 6, "rotated": 4, "v_dim": 20}  # wider than queries and keys
DEEPSEEK = {"n_heads": 3, "rank": 512, "nope": 128, "rotated": 64, "v_dim": 128, "block_size": 16}
WRITES = {  # num_tokens, n_heads, rank, nope, rotated, block_size
    "no-tokens": (0, 2, 8, 6, 4, 4),
    "one-token": (1, 16, 512, 128, 64, 16),
    "smallest": (3, 1, 1, 1, 2, 1),
    "minicpm3": (37, 5, 256, 64, 32, 16),
    "odd": (65, 3, 17, 5, 10, 3),
}


def cases() -> list[Case]:
    padding = "a CPU step has no padding: every token has a slot"
    return [
        *(_write(name, *shape, interleaved=True) for name, shape in WRITES.items()),
        *(_write(f"{name}-halves", *WRITES[name], interleaved=False) for name in ("one-token", "minicpm3", "odd")),
        _write("padding", *WRITES["odd"], interleaved=True, num_padding=5, skip={"cpu": padding}),
        _decode("one-token", (1,)),
        _decode("mixed", MIXED),
        _decode("equal", (24, 24)),
        _decode("block-edges", (15, 16, 17, 32), block_size=16),
        _decode("block-1", (7, 3), block_size=1),
        _decode("smallest", MIXED, **SMALLEST),
        _decode("wide-values", MIXED, **WIDE_VALUES),
        _decode("deepseek", (130, 9), **DEEPSEEK),
        _prefill("one-token", ((1,), (1,))),
        _prefill("prompts", ((5, 1, 17, 2), (5, 1, 17, 2))),
        _prefill("chunks", CHUNKS),
        _prefill("chunks-block16", CHUNKS, block_size=16),
        _prefill("chunks-block1", CHUNKS, block_size=1),
        _prefill("smallest", CHUNKS, **SMALLEST),
        _prefill("wide-values", CHUNKS, **WIDE_VALUES),
        _prefill("deepseek", CHUNKS, **DEEPSEEK),
        _prefill("tiles", TILES, n_heads=2),
    ]


# ---- write


def _write(
    name: str,
    num_tokens: int,
    n_heads: int,
    rank: int,
    nope: int,
    rotated: int,
    block_size: int,
    interleaved: bool,
    num_padding: int = 0,
    skip: dict[str, str] | None = None,
) -> Case:
    axes = {
        "num_tokens": num_tokens,
        "n_heads": n_heads,
        "rank": rank,
        "nope": nope,
        "rotated": rotated,
        "block_size": block_size,
        "interleaved": interleaved,
        "num_padding": num_padding,
    }
    return Case(
        stem="mla",
        name=f"write-{name}",
        axes=axes,
        make_inputs=partial(_write_inputs, **axes),
        reference=partial(_run_write, mla_rope_latent_write),
        candidate=lambda ops, **inputs: _run_write(ops.mla_rope_latent_write, **inputs),
        changes=("latent_cache",),
        disturb=_disturb_write,
        skip=skip or {},
    )


def _write_inputs(
    seed: int,
    num_tokens: int,
    n_heads: int,
    rank: int,
    nope: int,
    rotated: int,
    block_size: int,
    interleaved: bool,
    num_padding: int,
) -> Inputs:
    """kv_a is a part of a fused projection, as in a model; the cache is NaN; eps is one that matters."""
    rng = np.random.default_rng(seed)
    fused = guarded(normal(rng, num_tokens, 7 + rank + rotated))
    positions = rng.integers(0, 8192, num_tokens)
    num_blocks = -(-num_tokens // block_size) + 2
    slot_mapping = rng.permutation(num_blocks * block_size)[:num_tokens].astype(np.int32)
    slot_mapping[num_tokens - num_padding :] = -1
    latent_cache = np.full((num_blocks, block_size, rank + rotated), np.nan, np.float32)
    return {
        "q": guarded(normal(rng, num_tokens, n_heads, nope + rotated)),
        "kv_a": fused[:, 7:],
        "kv_a_layernorm": normal(rng, rank),
        "eps": 0.1,
        "cos_sin": rope_cos_sin(rope_inv_freq("default", 1e4, rotated), positions).astype(np.float32),
        "slot_mapping": slot_mapping,
        "latent_cache": guarded(latent_cache, num_axes=1),
        "interleaved": interleaved,
    }


def _run_write(op: Callable[..., Array], latent_cache: Array, **inputs: Any) -> Outputs:
    q = op(**inputs, latent_cache=latent_cache)
    return {"q": q, "latent_cache": latent_cache}


def _disturb_write(inputs: Inputs, rng: np.random.Generator) -> Kept:
    """All tokens but one; of the cache, only what the others write may differ."""
    num_tokens = len(inputs["q"])
    keep = int(rng.integers(num_tokens)) if num_tokens else 0
    others = np.arange(num_tokens) != keep
    for name in ("q", "kv_a"):
        inputs[name][others] = normal(rng, int(others.sum()), *inputs[name].shape[1:])
    block_size = inputs["latent_cache"].shape[1]
    written = inputs["slot_mapping"][others]
    kept_slots = np.ones(inputs["latent_cache"].shape[:2], np.bool_)
    kept_slots[written // block_size, written % block_size] = False
    return {"q": slice(keep, keep + 1), "latent_cache": kept_slots}


# ---- attention


def _axes(**changed: Any) -> dict[str, Any]:
    usual = {"n_heads": 4, "rank": 16, "nope": 12, "rotated": 8, "v_dim": 10, "block_size": 4}
    return usual | changed


def _decode(name: str, seq_lens: Lens, **changed: Any) -> Case:
    axes = _axes(query_lens=None, seq_lens=seq_lens, **changed)
    return Case(
        stem="mla",
        name=f"decode-{name}",
        axes=axes,
        make_inputs=partial(_inputs, **axes),
        reference=lambda **inputs: {"out": mla_decode(**inputs)},
        candidate=lambda ops, **inputs: {"out": ops.mla_decode(**_split(ops, inputs))},
        disturb=_disturb,
    )


def _prefill(name: str, lens: tuple[Lens, Lens], **changed: Any) -> Case:
    axes = _axes(query_lens=lens[0], seq_lens=lens[1], **changed)
    return Case(
        stem="mla",
        name=f"prefill-{name}",
        axes=axes,
        make_inputs=partial(_inputs, **axes),
        reference=lambda **inputs: {"out": mla_prefill(**inputs)},
        candidate=lambda ops, **inputs: {"out": ops.mla_prefill(**_split(ops, inputs))},
        disturb=_disturb,
    )


def _inputs(
    seed: int,
    query_lens: Lens | None,
    seq_lens: Lens,
    n_heads: int,
    rank: int,
    nope: int,
    rotated: int,
    v_dim: int,
    block_size: int,
) -> Inputs:
    """q is spread by 3, so that a softmax has a few large weights."""
    rng = np.random.default_rng(seed)
    num_tokens = len(seq_lens) if query_lens is None else sum(query_lens)
    paged = paged_kv(rng, seq_lens, block_size, 1, rank + rotated)
    inputs: Inputs = {
        "q": guarded(normal(rng, num_tokens, n_heads, nope + rotated, scale=3.0)),
        "latent_cache": paged["k_cache"][:, :, 0],
        "kv_b_proj": normal(rng, n_heads * (nope + v_dim), rank, scale=rank**-0.5),
        "block_table": paged["block_table"],
        "seq_lens": np.array(seq_lens, np.int32),
        "sm_scale": mla_sm_scale(nope + rotated, 40.0, 0.707),
    }
    if query_lens is not None:
        inputs["cu_seqlens_q"] = np.cumsum([0, *query_lens], dtype=np.int32)
    return inputs


def _split(ops: OpTable, inputs: Inputs) -> Inputs:
    """The inputs with kv_b_proj as a model has it."""
    kv_b_proj, q, latent_cache = inputs["kv_b_proj"], inputs["q"], inputs["latent_cache"]
    out_features, rank = kv_b_proj.shape
    stored = LinearWeight("dense", out_features, rank, {"weight": kv_b_proj})
    nope = q.shape[2] - (latent_cache.shape[2] - rank)
    return {**inputs, "kv_b_proj": ops.mla_split_kv_b(stored, q.shape[1], nope)}


def _disturb(inputs: Inputs, rng: np.random.Generator) -> Kept:
    """All sequences but one, and all unused memory."""
    q, seq_lens, latent_cache = inputs["q"], inputs["seq_lens"], inputs["latent_cache"]
    cu_seqlens_q = inputs.get("cu_seqlens_q", np.arange(len(seq_lens) + 1))
    keep = int(rng.integers(len(seq_lens)))
    rows = slice(int(cu_seqlens_q[keep]), int(cu_seqlens_q[keep + 1]))
    others = np.ones(len(q), np.bool_)
    others[rows] = False
    q[others] = normal(rng, int(others.sum()), *q.shape[1:])
    disturb_paged_kv(rng, latent_cache, latent_cache, inputs["block_table"], seq_lens, keep)
    return {"out": rows}
