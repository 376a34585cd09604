"""Exercises on attention: positions, one sequence, parts that are joined."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.case import Inputs
from conformance.exercise import Exercise, Mistake, make_cases
from conformance.inputs import normal
from ref.attention import attend, attention_combine, attention_dense
from ref.rope import rope, rope_cos_sin, rope_inv_freq

Array = NDArray[Any]
Rng = np.random.Generator

OUT = {"out": ("token", "head", "element")}
OUT_LSE = {"out": ("sequence", "head", "element"), "lse": ("sequence", "head")}


def _rope_inputs(
    rng: Rng, positions: tuple[int, ...] = (0, 1, 2, 3), n_heads: int = 2, head_dim: int = 8, rotary_dim: int = 8
) -> Inputs:
    inv_freq = rope_inv_freq("default", 10000.0, rotary_dim)
    return {
        "x": normal(rng, len(positions), n_heads, head_dim),
        "cos_sin": rope_cos_sin(inv_freq, np.array(positions, np.int64)).astype(np.float32),
    }


def _turned_back(x: Array, cos_sin: Array) -> Array:
    half = cos_sin.shape[1] // 2
    return rope(x, np.concatenate([cos_sin[:, :half], -cos_sin[:, half:]], axis=1))


def _half_a_head_apart(x: Array, cos_sin: Array) -> Array:
    half = cos_sin.shape[1] // 2
    places = np.concatenate([np.arange(half), np.arange(half) + x.shape[-1] // 2])
    out = x.copy()
    out[..., places] = rope(x[..., places], cos_sin)
    return out


def _one_after_the_other(x: Array, cos_sin: Array) -> Array:
    half = cos_sin.shape[1] // 2
    cos, sin = cos_sin[:, None, :half], cos_sin[:, None, half:]
    out = x.copy()
    out[..., :half] = out[..., :half] * cos - out[..., half : 2 * half] * sin
    out[..., half : 2 * half] = out[..., half : 2 * half] * cos + out[..., :half] * sin
    return out


ROPE = Exercise(
    number=3,
    function="rope",
    task="turn the pairs (i, i + rotary_dim / 2) of every head by the angles of their position",
    parameters=("x", "cos_sin"),
    outputs=OUT,
    read="ref/course/rope.md, ref/rope.py",
    cases=make_cases(
        "rope",
        OUT,
        rope,
        _rope_inputs,
        {
            "position-0": {"positions": (0,)},
            "one-pair": {"head_dim": 2, "rotary_dim": 2},
            "prompt": {},
            "far": {"positions": (4095, 7, 100000)},
            "part-of-the-head": {"head_dim": 12},
            "many-heads": {"n_heads": 7, "head_dim": 64, "rotary_dim": 64},
            "no-tokens": {"positions": ()},
        },
    ),
    mistakes=(
        Mistake("neighbours are paired (interleaved)", lambda x, cos_sin: rope(x, cos_sin, interleaved=True)),
        Mistake("pairs turn the other way round: a · cos + b · sin", _turned_back),
        Mistake("partners are head_dim / 2 apart instead of rotary_dim / 2", _half_a_head_apart),
        Mistake("the second of a pair is made from the first when that has turned already", _one_after_the_other),
    ),
)


def _attention_inputs(
    rng: Rng, q_len: int = 5, kv_len: int = 5, n_heads: int = 4, n_kv_heads: int = 2, score: float = 0.0
) -> Inputs:
    """`score` is added to all scores by one element of q and k; exp of it overflows, the answer stays."""
    head_dim = 8
    q, k = normal(rng, q_len, n_heads, head_dim, scale=2.0), normal(rng, kv_len, n_kv_heads, head_dim)
    if score:
        q[..., -1], k[..., -1] = 16.0, score * head_dim**0.5 / 16.0
    return {"q": q, "k": k, "v": normal(rng, kv_len, n_kv_heads, head_dim), "sm_scale": head_dim**-0.5}


def _sees_all(q: Array, k: Array, v: Array, sm_scale: float) -> Array:
    return np.stack([attend(row, k, v, sm_scale)[0] for row in q])


def _first_keys(q: Array, k: Array, v: Array, sm_scale: float) -> Array:
    return attention_dense(q, k[: len(q)], v[: len(q)], sm_scale)


def _heads_in_turn(q: Array, k: Array, v: Array, sm_scale: float) -> Array:
    heads = np.arange(q.shape[1]) % k.shape[1]
    return attention_dense(q, k[:, heads], v[:, heads], sm_scale)


def _overflowing(q: Array, k: Array, v: Array, sm_scale: float) -> Array:
    out = attention_dense(q, k, v, sm_scale)
    group = q.shape[1] // k.shape[1]
    scores = np.einsum("qhd,khd->qhk", q, np.repeat(k, group, axis=1)) * q.dtype.type(sm_scale)
    return np.where(np.isinf(np.exp(scores)).any(axis=-1)[..., None], np.float32(np.nan), out)


ATTENTION = Exercise(
    number=4,
    function="attention_dense",
    task="causal attention of one sequence, a KV head for each group of query heads",
    parameters=("q", "k", "v", "sm_scale"),
    outputs=OUT,
    read="ref/course/attention.md, ref/attention.py (attend, attention_dense) and softmax of ref/numerics.py",
    cases=make_cases(
        "attention",
        OUT,
        attention_dense,
        _attention_inputs,
        {
            "one-token": {"q_len": 1, "kv_len": 1},
            "one-head": {"n_heads": 1, "n_kv_heads": 1},
            "mha": {"n_kv_heads": 4},
            "mqa": {"n_kv_heads": 1},
            "groups-of-2": {},
            "groups-of-3": {"n_heads": 6},
            "chunk": {"q_len": 3, "kv_len": 9},
            "decode": {"q_len": 1, "kv_len": 9},
            "large-scores": {"score": 200.0},
        },
    ),
    mistakes=(
        Mistake("every query sees every key: no causal mask", _sees_all),
        Mistake("query i stands at position i instead of kv_len - q_len + i", _first_keys),
        Mistake("query head h reads KV head h % n_kv_heads instead of h // group", _heads_in_turn),
        Mistake("scores are not scaled", lambda q, k, v, sm_scale: attention_dense(q, k, v, 1.0)),
        Mistake("exp of a large score overflows: take the largest off first", _overflowing),
    ),
)


def _combine_inputs(rng: Rng, lse: tuple[float, ...]) -> Inputs:
    num_splits, num_seqs, n_heads, head_dim = len(lse), 2, 3, 4
    base = np.array(lse, np.float32)[:, None, None]
    partial_lse = base + rng.uniform(-0.25, 0.25, (num_splits, num_seqs, n_heads)).astype(np.float32)
    partial_out = normal(rng, num_splits, num_seqs, n_heads, head_dim)
    return {"partial_out": np.where(np.isinf(base)[..., None], np.float32(0), partial_out), "partial_lse": partial_lse}


def _mean(partial_out: Array, partial_lse: Array) -> tuple[Array, Array]:
    return partial_out.mean(axis=0), attention_combine(partial_out, partial_lse)[1]


def _sum(partial_out: Array, partial_lse: Array) -> tuple[Array, Array]:
    return partial_out.sum(axis=0), attention_combine(partial_out, partial_lse)[1]


def _no_maximum(partial_out: Array, partial_lse: Array) -> tuple[Array, Array]:
    shares = np.exp(partial_lse)
    total = shares.sum(axis=0)
    return (shares[..., None] * partial_out).sum(axis=0) / total[..., None], np.log(total)


def _no_largest_of_nothing(partial_out: Array, partial_lse: Array) -> tuple[Array, Array]:
    largest = partial_lse.max(axis=0)
    shares = np.exp(partial_lse - largest)  # −inf − −inf
    total = shares.sum(axis=0)
    return (shares[..., None] * partial_out).sum(axis=0) / total[..., None], largest + np.log(total)


COMBINE = Exercise(
    number=5,
    function="attention_combine",
    task="join attention over separate sets of keys into attention over all of them (online softmax)",
    parameters=("partial_out", "partial_lse"),
    outputs=OUT_LSE,
    read="ref/course/attention.md, ref/attention.py (attention_combine) and logsumexp of ref/numerics.py",
    cases=make_cases(
        "attention",
        OUT_LSE,
        attention_combine,
        _combine_inputs,
        {
            "equal": {"lse": (1.0, 1.0)},
            "two-halves": {"lse": (0.5, 2.0)},
            "far-apart": {"lse": (-30.0, 30.0)},
            "large": {"lse": (1000.0, 1001.0)},
            "small": {"lse": (-1000.0, -1001.0)},
            "one-half-empty": {"lse": (-np.inf, 0.25)},
            "both-empty": {"lse": (-np.inf, -np.inf)},
            "three-parts": {"lse": (0.0, 3.0, 1.0)},
        },
    ),
    mistakes=(
        Mistake("all parts count alike", _mean),
        Mistake("parts are added without their shares", _sum),
        Mistake("exp of lse overflows, or all of it vanishes: take the largest lse off first", _no_maximum),
        Mistake("−inf is taken off −inf where no part has a key", _no_largest_of_nothing),
    ),
)
