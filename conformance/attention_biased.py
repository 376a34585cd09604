"""Cases of the attention of a prefix language model, with a bias on its scores, over the paged cache."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.case import Case, Inputs, Kept, Outputs
from conformance.inputs import disturb_paged_kv, guarded, normal, paged_kv
from engine.ops import OpTable
from ref.attention_biased import attention_biased

Array = NDArray[Any]

SEQS: dict[str, tuple[tuple[int, int, int], ...]] = {  # of each sequence: queries, rows, rows of its prompt
    "prompts": ((9, 9, 9), (5, 5, 5), (40, 40, 40)),
    "decodes": ((1, 30, 9), (1, 6, 5), (1, 10, 9)),
    "mixed": ((1, 12, 9), (7, 7, 7), (6, 15, 9)),  # the last one: several tokens behind a prompt that is cached
    "resumed": ((14, 14, 9),),  # a prompt and what was generated, in one call
    "soft-prompt-alone": ((3, 3, 3),),
}
N_HEADS, HEAD_DIM, BLOCK_SIZE, NUM_BUCKETS, MAX_DISTANCE, NUM_SOFT = 3, 8, 4, 16, 20, 3


def cases() -> list[Case]:
    return [
        Case(
            stem="attention_biased",
            name=name,
            axes={"seqs": seqs, "n_heads": N_HEADS, "head_dim": HEAD_DIM, "num_soft": NUM_SOFT},
            make_inputs=partial(_inputs, seqs=seqs),
            reference=lambda **inputs: {"out": attention_biased(**inputs)},
            candidate=_candidate,
            disturb=_disturb,
            skip={"cpu": "the CPU's op table holds ref.attention_biased itself"},
        )
        for name, seqs in SEQS.items()
    ]


def _inputs(seed: int, seqs: tuple[tuple[int, int, int], ...]) -> Inputs:
    rng = np.random.default_rng(seed)
    q_lens, seq_lens, prefix_lens = np.array(seqs, np.int32).T
    return {
        "q": guarded(normal(rng, int(q_lens.sum()), N_HEADS, HEAD_DIM)),
        **paged_kv(rng, seq_lens.tolist(), BLOCK_SIZE, N_HEADS, HEAD_DIM),
        "cu_seqlens_q": np.cumsum([0, *q_lens], dtype=np.int32),
        "seq_lens": seq_lens.copy(),
        "prefix_lens": prefix_lens.copy(),
        "sm_scale": HEAD_DIM**-0.5,
        "bias_table": normal(rng, NUM_BUCKETS + 2, N_HEADS),
        "num_soft": NUM_SOFT,
        "max_distance": MAX_DISTANCE,
    }


def _candidate(ops: OpTable, **inputs: Any) -> Outputs:
    return {"out": ops.attention_biased(**inputs)}


def _disturb(inputs: Inputs, rng: np.random.Generator) -> Kept:
    """All sequences but one."""
    keep = int(rng.integers(len(inputs["seq_lens"])))
    rows = slice(int(inputs["cu_seqlens_q"][keep]), int(inputs["cu_seqlens_q"][keep + 1]))
    others = np.ones(len(inputs["q"]), np.bool_)
    others[rows] = False
    inputs["q"][others] = normal(rng, int(others.sum()), N_HEADS, HEAD_DIM)
    caches = (inputs["k_cache"], inputs["v_cache"], inputs["block_table"], inputs["seq_lens"])
    disturb_paged_kv(rng, *caches, keep)
    return {"out": rows}
