"""Cases of attention in which one key of very many holds all the weight (KRN-09): at a power of two, before and behind.

Query i looks along dimension i only, where one key has 10 and all others 0: a score of 100 against zeros, which weigh
less than 1e-37 together. The answer is the value of that key, to the bit, however the keys are split among blocks.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from conformance.case import HALVES, Case, Inputs
from conformance.inputs import guarded
from ref.attention import attention_decode, attention_prefill

HEAD_DIM = 64
BLOCK_SIZE = 16
SCORE = 100.0
LONG = {"cpu": "it would gather the cache once for every query", "host": "minutes on a CPU; 1000 keys are run there"}


def cases() -> list[Case]:
    return [
        _case(kind, exponent, LONG if exponent > 10 else {}) for exponent in (10, 17) for kind in ("decode", "prefill")
    ]


def places_of(exponent: int) -> list[int]:
    """Every power of two up to 2^exponent, and the places beside it."""
    return sorted({2**e + offset for e in range(exponent + 1) for offset in (-1, 0, 1)})


def _case(kind: str, exponent: int, skip: dict[str, str]) -> Case:
    is_decode = kind == "decode"
    function = attention_decode if is_decode else attention_prefill
    return Case(
        stem="attention",
        name=f"{kind}-one-key-of-{2**exponent}",
        axes={"places": f"2^0 … 2^{exponent}, and beside", "head_dim": HEAD_DIM, "block_size": BLOCK_SIZE},
        make_inputs=partial(_inputs, exponent=exponent, is_decode=is_decode),
        reference=lambda **inputs: {"out": function(**inputs)},
        candidate=lambda ops, **inputs: {"out": getattr(ops, function.__name__)(**inputs)},
        storages=HALVES,
        skip=skip,
    )


def _inputs(seed: int, exponent: int, is_decode: bool) -> Inputs:
    """Decoding, each query is a sequence of its own over the same blocks; as a prompt, they are the end of one."""
    rng = np.random.default_rng(seed)
    places = np.array(places_of(exponent))
    num_queries = len(places)
    seq_len = int(places[-1]) + 1 + num_queries
    num_blocks = -(-seq_len // BLOCK_SIZE)
    table = rng.permutation(num_blocks).astype(np.int32)
    k_cache = guarded(np.full((num_blocks, BLOCK_SIZE, 1, HEAD_DIM), np.nan, np.float32), num_axes=1)
    v_cache = guarded(np.full(k_cache.shape, np.nan, np.float32), num_axes=1)
    owned = np.arange(seq_len)
    at = (table[owned // BLOCK_SIZE], owned % BLOCK_SIZE)
    k_cache[at] = 0.0
    v_cache[at] = rng.standard_normal((seq_len, 1, HEAD_DIM), np.float32)
    k_cache[at[0][places], at[1][places], 0, np.arange(num_queries)] = SCORE**0.5
    q = np.zeros((num_queries, 1, HEAD_DIM), np.float32)
    q[np.arange(num_queries), 0, np.arange(num_queries)] = SCORE**0.5
    inputs: dict[str, Any] = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "sm_scale": 1.0}
    if is_decode:
        return inputs | {
            "block_table": np.tile(table, (num_queries, 1)),
            "seq_lens": np.full(num_queries, seq_len, np.int32),
        }
    return inputs | {
        "block_table": table[None],
        "seq_lens": np.array([seq_len], np.int32),
        "cu_seqlens_q": np.array([0, num_queries], np.int32),
    }
