"""Cases of paged attention: one query a sequence (decode), and chunks of prompts (prefill)."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.case import HALVES, Case, Inputs, Kept, Outputs
from conformance.inputs import disturb_paged_kv, guarded, normal, paged_kv
from engine.ops import OpTable
from ref.attention import attention_decode, attention_prefill, first_visible

Array = NDArray[Any]
Lens = tuple[int, ...]

MIXED: Lens = (33, 1, 100, 8, 2, 7, 9, 31, 3, 64)  # on both sides of powers of two, which the CPU groups by
EDGES: Lens = (15, 16, 17, 32)  # a block of 16 not full, full, begun
PROMPTS: tuple[Lens, Lens] = ((5, 1, 17, 2), (5, 1, 17, 2))  # query lengths, sequence lengths
CHUNKS: tuple[Lens, Lens] = ((4, 1, 7, 16, 3), (20, 33, 7, 48, 4))  # with a past; one is the whole prompt, one decode
TILES: tuple[Lens, Lens] = ((150, 129), (170, 129))  # longer than the 128 queries that a CPU takes at once
NO_SUCH_HEAD_DIM = dict.fromkeys(("host", "gpu"), "there are kernels for head_dim 64, 80, 96, 128 and 256 only")
NO_SEQUENCE = "the engine calls attention with at least one sequence, each with a token"


def cases() -> list[Case]:
    return [*_decode_cases(), *_prefill_cases()]


def _decode_cases() -> list[Case]:
    return [
        decode_case("one-token", (1,)),
        decode_case("mixed", MIXED),
        decode_case("same-bucket", (40, 63, 33)),
        decode_case("equal", (24, 24)),
        decode_case("block-edges", EDGES, block_size=16),
        decode_case("block-1", (7, 3), block_size=1),
        decode_case("block-larger", (7, 3, 31), block_size=32),
        decode_case("mha", MIXED, n_heads=4, n_kv_heads=4),
        decode_case("mqa", MIXED, n_heads=8, n_kv_heads=1),
        decode_case("gqa3", (130, 9), n_heads=9, n_kv_heads=3, block_size=16),
        decode_case("gqa7-dim80", (40, 17, 1), n_heads=14, n_kv_heads=2, head_dim=80, block_size=16),
        decode_case("gqa8-dim128", (63, 65), n_heads=16, n_kv_heads=2, head_dim=128, block_size=32),
        decode_case("gqa16-dim96", (50, 3), n_heads=16, n_kv_heads=1, head_dim=96, block_size=1),
        decode_case("gqa17", (33, 31), n_heads=17, n_kv_heads=1),
        decode_case("gqa24-dim256", (20,), n_heads=24, n_kv_heads=1, head_dim=256, block_size=16),
        decode_case("splits", (300,), n_heads=4, n_kv_heads=1, block_size=16),
        decode_case("splits-dim128", (257, 5), n_heads=8, n_kv_heads=2, head_dim=128, block_size=32),
        decode_case("splits-dim80", (200,), n_heads=2, n_kv_heads=2, head_dim=80, block_size=1),
        decode_case("splits-window-70", (260, 140), n_heads=2, n_kv_heads=1, block_size=16, window=70),
        decode_case("splits-window-1", (260, 1), n_heads=2, n_kv_heads=1, block_size=16, window=1),
        decode_case("splits-first-wins", (300,), n_heads=4, n_kv_heads=1, block_size=16, top_token=0),
        decode_case("splits-last-wins", (300,), n_heads=4, n_kv_heads=1, block_size=16, top_token=299),
        decode_case("dim10", MIXED, head_dim=10, skip=NO_SUCH_HEAD_DIM),
        decode_case("large-scores", MIXED, score_offset=100.0),
        decode_case("window-1", MIXED, window=1),
        decode_case("window-7", MIXED, window=7),
        decode_case("window-block", EDGES, window=16, block_size=16),
        decode_case("window-larger", MIXED, window=1000),
        decode_case("no-sequence", (), skip={"cpu": NO_SEQUENCE}),
        decode_case("empty-sequence", (5, 0, 3), skip={"cpu": NO_SEQUENCE}),
    ]


def _prefill_cases() -> list[Case]:
    return [
        prefill_case("one-token", ((1,), (1,))),
        prefill_case("prompts", PROMPTS),
        prefill_case("chunks", CHUNKS),
        prefill_case("chunks-block16", CHUNKS, block_size=16),
        prefill_case("chunks-block1", CHUNKS, block_size=1),
        prefill_case("mha", CHUNKS, n_heads=4, n_kv_heads=4),
        prefill_case("mqa", CHUNKS, n_heads=8, n_kv_heads=1),
        prefill_case("gqa3", CHUNKS, n_heads=9, n_kv_heads=3),
        prefill_case("gqa7-dim80", CHUNKS, n_heads=7, n_kv_heads=1, head_dim=80, block_size=32),
        prefill_case("gqa16-dim96", PROMPTS, n_heads=16, n_kv_heads=1, head_dim=96),
        prefill_case("gqa4-dim128", CHUNKS, n_heads=8, n_kv_heads=2, head_dim=128, block_size=16),
        prefill_case("dim256", CHUNKS, n_heads=2, n_kv_heads=1, head_dim=256, block_size=16),
        prefill_case("dim256-window-9", CHUNKS, n_heads=2, n_kv_heads=1, head_dim=256, block_size=1, window=9),
        prefill_case("long-past", ((3, 1), (200, 130)), n_heads=2, n_kv_heads=1, block_size=32),
        prefill_case("dim10", CHUNKS, head_dim=10, skip=NO_SUCH_HEAD_DIM),
        prefill_case("large-scores", CHUNKS, score_offset=100.0),
        prefill_case("tiles", TILES, n_heads=2, n_kv_heads=1, block_size=16),
        prefill_case("tiles-window-20", TILES, n_heads=2, n_kv_heads=1, block_size=16, window=20),
        prefill_case("tiles-window-140", TILES, n_heads=2, n_kv_heads=1, block_size=16, window=140),
        prefill_case("window-1", CHUNKS, window=1),
        prefill_case("window-5", CHUNKS, window=5),
        prefill_case("window-larger", CHUNKS, window=1000),
    ]


def _axes(**changed: Any) -> dict[str, Any]:
    usual = {"n_heads": 6, "n_kv_heads": 2, "head_dim": 64, "block_size": 4, "window": None, "score_offset": 0.0}
    return usual | {"top_token": None} | changed


def decode_case(name: str, seq_lens: Lens, skip: dict[str, str] | None = None, **changed: Any) -> Case:
    axes = _axes(seq_lens=seq_lens, **changed)
    return Case(
        stem="attention",
        name=f"decode-{name}",
        axes=axes,
        make_inputs=partial(_inputs, query_lens=None, **axes),
        reference=lambda **inputs: {"out": attention_decode(**inputs)},
        candidate=_decode_candidate,
        disturb=_disturb,
        storages=HALVES,
        skip=skip or {},
    )


def prefill_case(name: str, lens: tuple[Lens, Lens], skip: dict[str, str] | None = None, **changed: Any) -> Case:
    axes = _axes(query_lens=lens[0], seq_lens=lens[1], **changed)
    return Case(
        stem="attention",
        name=f"prefill-{name}",
        axes=axes,
        make_inputs=partial(_inputs, **axes),
        reference=lambda **inputs: {"out": attention_prefill(**inputs)},
        candidate=_prefill_candidate,
        disturb=_disturb,
        storages=HALVES,
        skip=skip or {},
    )


def _inputs(
    seed: int,
    query_lens: Lens | None,
    seq_lens: Lens,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
    block_size: int,
    window: int | None,
    score_offset: float,
    top_token: int | None,
) -> Inputs:
    """q is spread by 3, so that a softmax has a few large weights. score_offset moves all scores up; at 100 exp of
    one overflows, though the answer is the same. top_token: the token of each sequence whose score alone is moved up,
    by 200: where another is taken for the largest, exp of it overflows."""
    rng = np.random.default_rng(seed)
    num_tokens = len(seq_lens) if query_lens is None else sum(query_lens)
    inputs: Inputs = {
        "q": guarded(normal(rng, num_tokens, n_heads, head_dim, scale=3.0), num_axes=2),
        **paged_kv(rng, seq_lens, block_size, n_kv_heads, head_dim),
        "seq_lens": np.array(seq_lens, np.int32),
        "sm_scale": head_dim**-0.5,
        "window": window,
    }
    if score_offset:
        # by the last element: sums that meet it early would round at its size over and over, each order differently
        inputs["q"][..., -1] = score_offset**0.5
        inputs["k_cache"][..., -1] *= 0  # NaN stays
        inputs["k_cache"][..., -1] += score_offset**0.5 * head_dim**0.5
    if top_token is not None:
        inputs["q"][..., -1], inputs["k_cache"][..., -1] = 8.0, inputs["k_cache"][..., -1] * 0
        blocks = inputs["block_table"][:, top_token // block_size]
        inputs["k_cache"][blocks, top_token % block_size, :, -1] = 25.0 * head_dim**0.5
    if query_lens is not None:
        inputs["cu_seqlens_q"] = np.cumsum([0, *query_lens], dtype=np.int32)
    return inputs


def _decode_candidate(ops: OpTable, **inputs: Any) -> Outputs:
    return {"out": ops.attention_decode(**inputs)}


def _prefill_candidate(ops: OpTable, **inputs: Any) -> Outputs:
    return {"out": ops.attention_prefill(**inputs)}


def _disturb(inputs: Inputs, rng: np.random.Generator) -> Kept:
    """All sequences but one, what its window hides, and all unused memory."""
    q, seq_lens = inputs["q"], inputs["seq_lens"]
    cu_seqlens_q = inputs.get("cu_seqlens_q", np.arange(len(seq_lens) + 1))
    keep = int(rng.integers(len(seq_lens))) if len(seq_lens) else 0
    rows = slice(int(cu_seqlens_q[keep]), int(cu_seqlens_q[keep + 1])) if len(seq_lens) else slice(0, 0)
    others = np.ones(len(q), np.bool_)
    others[rows] = False
    q[others] = normal(rng, int(others.sum()), *q.shape[1:])
    oldest = first_visible(int(seq_lens[keep]) - (rows.stop - rows.start), inputs["window"]) if len(seq_lens) else 0
    disturb_paged_kv(rng, inputs["k_cache"], inputs["v_cache"], inputs["block_table"], seq_lens, keep, oldest)
    return {"out": rows}
