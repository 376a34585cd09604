"""Exercises on attention over a cache: keys and values in pages, and the latent form, which caches neither."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance import attention
from conformance.case import Case, Inputs, Outputs
from conformance.exercise import Exercise, Mistake, borrow, make_cases
from conformance.inputs import normal
from ref.attention import attention_decode
from ref.mla import mla_dense

Array = NDArray[Any]
Rng = np.random.Generator

OUT = {"out": ("sequence", "head", "element")}
OUT_OF_ONE = {"out": ("head", "element")}
DECODE = ("q", "k_cache", "v_cache", "block_table", "seq_lens", "sm_scale")

LATENT_BYTES = 2_000_000  # what the long case may take: the keys of its 16 heads are 4 MB, the latents 0.1 MB


def _decode_case(case: Case) -> Case:
    axes = ("seq_lens", "n_heads", "n_kv_heads", "head_dim", "block_size")
    return replace(borrow(case, DECODE, OUT, axes), name=case.name.removeprefix("decode-"))


def _no_table(q: Array, k_cache: Array, v_cache: Array, block_table: Array, seq_lens: Array, sm_scale: float) -> Array:
    in_order = np.maximum(np.arange(block_table.size).reshape(block_table.shape), 0) % len(k_cache)
    return attention_decode(q, k_cache, v_cache, in_order, seq_lens, sm_scale)


def _whole_blocks(
    q: Array, k_cache: Array, v_cache: Array, block_table: Array, seq_lens: Array, sm_scale: float
) -> Array:
    block_size = k_cache.shape[1]
    return attention_decode(q, k_cache, v_cache, block_table, -(-seq_lens // block_size) * block_size, sm_scale)


def _whole_table(
    q: Array, k_cache: Array, v_cache: Array, block_table: Array, seq_lens: Array, sm_scale: float
) -> Array:
    num_slots = np.full_like(seq_lens, block_table.shape[1] * k_cache.shape[1])
    return attention_decode(q, k_cache, v_cache, block_table, num_slots, sm_scale)


def _decode_in_turn(
    q: Array, k_cache: Array, v_cache: Array, block_table: Array, seq_lens: Array, sm_scale: float
) -> Array:
    heads = np.arange(q.shape[1]) % k_cache.shape[2]
    return attention_decode(q, k_cache[:, :, heads], v_cache[:, :, heads], block_table, seq_lens, sm_scale)


PAGED = Exercise(
    number=6,
    function="attention_decode",
    task="attention of the last token of several sequences, whose keys and values lie in pages",
    parameters=DECODE,
    outputs=OUT,
    read="ref/course/kv_cache.md, ref/kv_cache.py, ref/attention.py (attention_decode)",
    cases=tuple(
        _decode_case(case)
        for case in attention.cases()
        if case.name.startswith("decode-") and case.axes["window"] is None and not case.skip
    ),
    mistakes=(
        Mistake("blocks are read in the order in which they lie, not as block_table says", _no_table),
        Mistake("the last block is read to its end, past seq_len, where NaN may lie", _whole_blocks),
        Mistake(
            "all of a row of block_table is read, entries of −1 and slots of nobody too; a weight of 0 does not help, "
            "as 0 times NaN is NaN",
            _whole_table,
        ),
        Mistake("query head h reads KV head h % n_kv_heads instead of h // group", _decode_in_turn),
        Mistake(
            "the newest key is left out",
            lambda seq_lens, **inputs: attention_decode(seq_lens=np.maximum(seq_lens - 1, 1), **inputs),
        ),
    ),
)


def _mla_inputs(
    rng: Rng, kv_len: int = 7, n_heads: int = 3, rank: int = 8, rotary: int = 4, nope: int = 6, v_head_dim: int = 6
) -> Inputs:
    return {
        "q": normal(rng, n_heads, nope + rotary),
        "latent": normal(rng, kv_len, rank + rotary),
        "kv_b_proj": normal(rng, n_heads * (nope + v_head_dim), rank, scale=0.5),
        "sm_scale": (nope + rotary) ** -0.5,
    }


def _expanded(q: Array, latent: Array, kv_b_proj: Array, sm_scale: float) -> Array:
    return mla_dense(q[None], latent, kv_b_proj, sm_scale)[0]


def _keys_of_all_first(q: Array, latent: Array, kv_b_proj: Array, sm_scale: float) -> Array:
    n_heads, nope = q.shape[0], q.shape[1] - (latent.shape[1] - kv_b_proj.shape[1])
    keys, values = np.split(kv_b_proj, [n_heads * nope])
    by_head = [part.reshape(n_heads, -1, kv_b_proj.shape[1]) for part in (keys, values)]
    return _expanded(q, latent, np.concatenate(by_head, axis=1).reshape(kv_b_proj.shape), sm_scale)


def _without_positions(q: Array, latent: Array, kv_b_proj: Array, sm_scale: float) -> Array:
    rank = kv_b_proj.shape[1]
    return _expanded(q, np.where(np.arange(latent.shape[1]) < rank, latent, np.float32(0)), kv_b_proj, sm_scale)


def _scale_of_the_latent(q: Array, latent: Array, kv_b_proj: Array, sm_scale: float) -> Array:
    return _expanded(q, latent, kv_b_proj, latent.shape[1] ** -0.5)


def _within(case: Case, limit: int) -> Case:
    """The case, failing also when its candidate allocates more than `limit` bytes at a time."""

    def candidate(function: Any, **inputs: Any) -> Outputs:
        tracemalloc.start()
        try:
            outputs = case.candidate(function, **inputs)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        if peak > limit:
            raise MemoryError(
                f"took {peak / 1e6:.0f} MB, limit {limit / 1e6:.0f} MB: keys and values of every head were made; "
                "take the query through W_uk instead"
            )
        return outputs

    return replace(case, candidate=candidate)


MLA = Exercise(
    number=12,
    function="mla_decode",
    task="latent attention of one query in the absorbed form: no key and no value is ever made",
    parameters=("q", "latent", "kv_b_proj", "sm_scale"),
    outputs=OUT_OF_ONE,
    read="ref/course/mla.md, ref/mla.py",
    cases=tuple(
        _within(case, LATENT_BYTES)
        for case in make_cases(
            "mla",
            OUT_OF_ONE,
            _expanded,
            _mla_inputs,
            {
                "one-key": {"kv_len": 1},
                "one-head": {"n_heads": 1},
                "three-heads": {},
                "values-wider-than-keys": {"v_head_dim": 10},
                "long": {"kv_len": 1024, "n_heads": 16, "rank": 16, "nope": 64, "v_head_dim": 64},
            },
        )
    ),
    mistakes=(
        Mistake("kv_b_proj is cut into all keys and all values; it holds both head by head", _keys_of_all_first),
        Mistake("the part of q and latent that carries positions is left out", _without_positions),
        Mistake("scores are scaled by the width of the latent instead of sm_scale", _scale_of_the_latent),
    ),
)
