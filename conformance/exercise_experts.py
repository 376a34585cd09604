"""The exercise on the choice of experts."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.case import Inputs
from conformance.exercise import Exercise, Mistake, make_cases
from ref.moe_routing import moe_route

Array = NDArray[Any]
Rng = np.random.Generator

CHOSEN = {"expert_ids": ("token", "choice"), "weights": ("token", "choice")}


def _moe_inputs(
    rng: Rng,
    n_group: int = 4,
    topk_group: int = 2,
    top_k: int = 4,
    shift: float = 0.0,
    ties: bool = False,
) -> Inputs:
    """Logits and biases are spread evenly and shuffled, so that no two choices are nearly equal but by rare chance."""
    num_tokens, n_experts = 6, 16
    spread = np.tile(np.linspace(-2, 2, n_experts), (num_tokens, 1))
    bias = rng.permutation(np.linspace(0, 0.7, n_experts)) + shift
    if ties:
        spread, bias = np.round(spread / 2), np.zeros(n_experts)
    return {
        "router_logits": rng.permuted(spread, axis=1).astype(np.float32),
        "bias": bias.astype(np.float32),
        "top_k": top_k,
        "n_group": n_group,
        "topk_group": topk_group,
        "scaling_factor": 2.5,
    }


def _route(scaling_factor: float = 1.0, **inputs: Any) -> tuple[Array, Array]:
    settings = {"scoring": "sigmoid", "group_best": 2, "renormalize": True, "scaling_factor": scaling_factor}
    return moe_route(**{**settings, **inputs})


def _biased_weights(router_logits: Array, bias: Array, scaling_factor: float, **inputs: Any) -> tuple[Array, Array]:
    ids, _ = _route(router_logits=router_logits, bias=bias, **inputs)
    chosen = np.take_along_axis(1 / (1 + np.exp(-router_logits)) + bias, ids, axis=-1)
    return ids, chosen / chosen.sum(axis=-1, keepdims=True) * np.float32(scaling_factor)


def _masked_by_zero(
    router_logits: Array, bias: Array, top_k: int, n_group: int, topk_group: int, scaling_factor: float
) -> tuple[Array, Array]:
    scores = 1 / (1 + np.exp(-router_logits))
    grouped = (scores + bias).reshape(len(scores), n_group, -1)
    group_scores = np.sort(grouped, axis=-1)[..., -2:].sum(axis=-1)
    kept = np.argsort(np.argsort(-group_scores, axis=-1, kind="stable"), axis=-1) < topk_group
    choice = np.where(kept[..., None], grouped, np.float32(0)).reshape(scores.shape)
    ids = np.argsort(-choice, axis=-1, kind="stable")[:, :top_k]
    weights = np.take_along_axis(scores, ids, axis=-1)
    return ids, weights / weights.sum(axis=-1, keepdims=True) * np.float32(scaling_factor)


def _higher_id_first(router_logits: Array, bias: Array, n_group: int, **inputs: Any) -> tuple[Array, Array]:
    """All in the opposite order, which puts the last of equals first."""
    ids, weights = _route(router_logits=router_logits[:, ::-1], bias=bias[::-1], n_group=n_group, **inputs)
    return router_logits.shape[1] - 1 - ids, weights


MOE = Exercise(
    number=11,
    function="moe_route",
    task="DeepSeek V3's choice of experts: sigmoid, a bias that only chooses, the best groups first",
    parameters=("router_logits", "bias", "top_k", "n_group", "topk_group", "scaling_factor"),
    outputs=CHOSEN,
    read="ref/course/moe.md, ref/moe_routing.py",
    cases=make_cases(
        "moe_routing",
        CHOSEN,
        _route,
        _moe_inputs,
        {
            "one-group": {"n_group": 1, "topk_group": 1},
            "all-groups": {"topk_group": 4},
            "two-of-four": {},
            "all-of-a-group": {"topk_group": 1},
            "negative-choices": {"shift": -3.0, "top_k": 7},
            "ties": {"ties": True},
        },
    ),
    mistakes=(
        Mistake("the bias counts in the weights too", _biased_weights),
        Mistake("softmax is taken instead of sigmoid", lambda **inputs: _route(**inputs, scoring="softmax")),
        Mistake("a group is judged by its best expert alone", lambda **inputs: _route(**inputs, group_best=1)),
        Mistake(
            "all groups stay in the choice", lambda topk_group, **inputs: _route(topk_group=inputs["n_group"], **inputs)
        ),
        Mistake("weights are not divided by their sum", lambda **inputs: _route(**inputs, renormalize=False)),
        Mistake("scaling_factor is left out", lambda scaling_factor, **inputs: _route(**inputs)),
        Mistake("what lies outside the groups gets choice 0, which beats negative ones", _masked_by_zero),
        Mistake("among equals the higher id is the better", _higher_id_first),
    ),
)
