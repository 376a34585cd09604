"""Exercises on what surrounds attention: the norm, the next token, the MLP over ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance import rmsnorm as engine_cases
from conformance.case import Inputs
from conformance.exercise import Exercise, Mistake, borrow, make_cases
from conformance.inputs import guarded, normal
from ref.activation import gate_up_act
from ref.collectives import split_ranges
from ref.layernorm import layernorm
from ref.linear import linear
from ref.rmsnorm import rmsnorm
from ref.sampling import draw, keep_top_p, rank, sample, token_weights
from ref.tensor_parallel import shard_gate_up

Array = NDArray[Any]
Rng = np.random.Generator

NORMED = {"normed": ("token", "element")}
TOKEN_IDS = {"token_ids": ("row",)}
PARTIAL = {"partial": ("rank", "token", "element")}


def _eps_outside(x: Array, weight: Array, eps: float) -> Array:
    root = np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True))
    return x / (root + np.float32(eps)) * weight


def _sum_of_squares(x: Array, weight: Array, eps: float) -> Array:
    return rmsnorm(x, weight, eps / x.shape[-1]) / np.sqrt(x.dtype.type(x.shape[-1]))


RMSNORM = Exercise(
    number=1,
    function="rmsnorm",
    task="divide each row by its root mean square and multiply by the weight",
    parameters=("x", "weight", "eps"),
    outputs=NORMED,
    read="ref/course/layers.md, ref/rmsnorm.py",
    cases=tuple(
        borrow(case, ("x", "weight", "eps"), NORMED, ("num_tokens", "hidden_size", "eps"))
        for case in engine_cases.cases()
        if not case.axes["fused"] and "ordered" not in case.axes
    ),
    mistakes=(
        Mistake("the squares are added, not averaged", _sum_of_squares),
        Mistake(
            "the mean is taken out first, as LayerNorm does", lambda x, weight, eps: layernorm(x, weight, None, eps)
        ),
        Mistake("the weight is taken as 1 + weight", lambda x, weight, eps: rmsnorm(x, 1 + weight, eps)),
        Mistake("the weight is left out", lambda x, weight, eps: rmsnorm(x, np.ones_like(weight), eps)),
        Mistake("eps stands outside the root", _eps_outside),
        Mistake("eps is left out: a row of zeros is 0 / 0", lambda x, weight, eps: rmsnorm(x, weight, 0.0)),
    ),
)


def _top_p_inputs(rng: Rng, offset: float = 0.0, keep: int = 5, draw_token: str = "any", ties: bool = False) -> Inputs:
    """top_p ends in the middle of a token's share, and so does the draw: neither hangs on a rounding."""
    num_rows, vocab_size = 6, 12
    logits = rng.permuted(np.tile(np.linspace(-1, 1.5, vocab_size), (num_rows, 1)), axis=1).astype(np.float32)
    if ties:
        logits = np.where(np.abs(logits) < 0.75, 0, logits).astype(np.float32)
    logits += np.float32(offset)
    temperature = np.resize([0.7, 1.0, 1.6], num_rows).astype(np.float32)
    top_p, uniforms = np.ones(num_rows, np.float32), np.zeros(num_rows, np.float32)
    for row in range(num_rows):
        weights = token_weights(logits[row].astype(np.float64), float(temperature[row]))
        shares = -np.sort(-weights) / weights.sum()
        if keep < vocab_size:
            top_p[row] = shares[:keep].sum() - shares[keep - 1] / 2
        kept = np.where(keep_top_p(logits[row], weights, float(top_p[row])), weights, 0)
        places = np.flatnonzero(kept)
        token = places[-1] if draw_token == "last" else rng.choice(places)
        uniforms[row] = 0 if draw_token == "zero" else (kept[:token].sum() + kept[token] / 2) / kept.sum()
    return {"logits": logits, "temperature": temperature, "top_p": top_p, "uniforms": uniforms}


def _sample_top_p(logits: Array, temperature: Array, top_p: Array, uniforms: Array) -> Array:
    return sample(logits, temperature, 0, top_p, 0.0, uniforms)


def _wrong_top_p(logits: Array, temperature: Array, top_p: Array, uniforms: Array, *, fault: str) -> Array:
    """One step taken in another way."""
    token_ids = np.zeros(len(logits), np.int32)
    for row in range(len(logits)):
        weights = token_weights(logits[row], float(temperature[row]))
        keep = keep_top_p(logits[row], weights, float(top_p[row]))
        order = rank(logits[row])
        if fault == "crossing":
            keep[order[max(1, int(keep.sum()) - 1) :]] = False
        if fault == "higher":
            order = np.argsort(logits[row], kind="stable")[::-1]
            keep = np.isin(np.arange(len(weights)), order[: int(keep.sum())])
        if fault == "at one":
            weights = token_weights(logits[row], 1.0)
            keep = keep_top_p(logits[row], weights, float(top_p[row]))
        if fault == "cold":
            keep = keep_top_p(logits[row], token_weights(logits[row], 1.0), float(top_p[row]))
        kept = np.where(keep, weights, 0)
        if fault == "ranked":
            token_ids[row] = order[draw(kept[order], float(uniforms[row]))]
        elif fault == "total":
            mass = np.cumsum(kept / weights.sum())
            token_ids[row] = min(np.searchsorted(mass, uniforms[row], side="right"), len(kept) - 1)
        elif fault == "of all":
            token_ids[row] = np.argmax(np.cumsum(kept) > uniforms[row] * weights.sum())
        elif fault == "zero":
            token_ids[row] = np.searchsorted(np.cumsum(kept), uniforms[row] * kept.sum(), side="left")
        else:
            token_ids[row] = draw(kept, float(uniforms[row]))
    return token_ids


TOP_P = Exercise(
    number=7,
    function="sample_top_p",
    task="the next token id from logits, a temperature, top_p and a given uniform number",
    parameters=("logits", "temperature", "top_p", "uniforms"),
    outputs=TOKEN_IDS,
    read="ref/course/sampling.md, ref/sampling.py (token_weights, keep_top_p, draw)",
    cases=make_cases(
        "sampling",
        TOKEN_IDS,
        _sample_top_p,
        _top_p_inputs,
        {
            "keep-all": {"keep": 12},
            "keep-one": {"keep": 1},
            "nucleus": {},
            "last-kept": {"draw_token": "last"},
            "uniform-0": {"draw_token": "zero", "keep": 3},
            "large-logits": {"offset": 500.0},
            "ties": {"ties": True, "draw_token": "last"},
        },
    ),
    mistakes=(
        Mistake("the token that passes top_p is left out", partial(_wrong_top_p, fault="crossing")),
        Mistake("top_p is counted before the temperature", partial(_wrong_top_p, fault="cold")),
        Mistake("the draw walks by rank, best first, instead of by token id", partial(_wrong_top_p, fault="ranked")),
        Mistake("the uniform is not multiplied by the weight that is left", partial(_wrong_top_p, fault="total")),
        Mistake(
            "the uniform is multiplied by the weight of all tokens, not of those kept",
            partial(_wrong_top_p, fault="of all"),
        ),
        Mistake("with uniform 0 a token of weight 0 is drawn", partial(_wrong_top_p, fault="zero")),
        Mistake("the temperature is left out", partial(_wrong_top_p, fault="at one")),
        Mistake("among equal logits the higher id is the better", partial(_wrong_top_p, fault="higher")),
    ),
)


def _mlp_inputs(rng: Rng, intermediate_size: int, world_size: int) -> Inputs:
    num_tokens, hidden_size = 3, 6
    return {
        "x": guarded(normal(rng, num_tokens, hidden_size)),
        "gate_up_proj": normal(rng, 2 * intermediate_size, hidden_size),
        "down_proj": normal(rng, hidden_size, intermediate_size),
        "world_size": world_size,
    }


def _tensor_parallel_mlp(x: Array, gate_up_proj: Array, down_proj: Array, world_size: int) -> Array:
    return _partials(x, gate_up_proj, down_proj, split_ranges(down_proj.shape[1], world_size))


def _partials(x: Array, gate_up_proj: Array, down_proj: Array, parts: list[range]) -> Array:
    return np.stack(
        [
            linear(gate_up_act(linear(x, shard_gate_up(gate_up_proj, part))), down_proj[:, part.start : part.stop])
            for part in parts
        ]
    )


def _rest_to_the_last(x: Array, gate_up_proj: Array, down_proj: Array, world_size: int) -> Array:
    total, each = down_proj.shape[1], down_proj.shape[1] // world_size
    ends = [*(each * rank for rank in range(1, world_size)), total]
    parts = [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    return _partials(x, gate_up_proj, down_proj, parts)


def _fused_rows(x: Array, gate_up_proj: Array, down_proj: Array, world_size: int) -> Array:
    parts = split_ranges(down_proj.shape[1], world_size)
    rows = [gate_up_proj[2 * part.start : 2 * part.stop] for part in parts]
    return np.stack(
        [
            linear(gate_up_act(linear(x, own)), down_proj[:, part.start : part.stop])
            for own, part in zip(rows, parts, strict=True)
        ]
    )


def _all_reduced(x: Array, gate_up_proj: Array, down_proj: Array, world_size: int) -> Array:
    partial_sums = _tensor_parallel_mlp(x, gate_up_proj, down_proj, world_size)
    return np.broadcast_to(partial_sums.sum(axis=0), partial_sums.shape)


TENSOR_PARALLEL = Exercise(
    number=10,
    function="tensor_parallel_mlp",
    task="what each rank adds to a gated MLP that is cut over world_size ranks",
    parameters=("x", "gate_up_proj", "down_proj", "world_size"),
    outputs=PARTIAL,
    read="ref/course/parallel.md, ref/tensor_parallel.py, ref/activation.py, ref/collectives.py (split_sizes)",
    cases=make_cases(
        "tensor_parallel",
        PARTIAL,
        _tensor_parallel_mlp,
        _mlp_inputs,
        {
            "one-rank": {"intermediate_size": 8, "world_size": 1},
            "two-ranks": {"intermediate_size": 8, "world_size": 2},
            "10-on-3": {"intermediate_size": 10, "world_size": 3},
            "11-on-4": {"intermediate_size": 11, "world_size": 4},
            "a-rank-with-nothing": {"intermediate_size": 2, "world_size": 3},
        },
    ),
    mistakes=(
        Mistake("gate_up_proj is cut as it stands, so that rank 0 gets no row of up", _fused_rows),
        Mistake("what does not divide goes to the last rank instead of one each to the first", _rest_to_the_last),
        Mistake("the ranks' parts are added up already", _all_reduced),
        Mistake(
            "gate and up are swapped",
            lambda gate_up_proj, **inputs: _tensor_parallel_mlp(
                gate_up_proj=np.roll(gate_up_proj, len(gate_up_proj) // 2, axis=0), **inputs
            ),
        ),
    ),
)
