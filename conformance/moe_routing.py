"""Cases of the choice of experts: every rule of the supported families, and scores that tie.

Logits are whole steps of a grid, shuffled in each row, so that float32 and float64 put experts in the same order:
either they are a step apart, or they are equal and the lower id comes first.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.case import Case, Inputs, Kept, Outputs
from conformance.inputs import guarded
from engine.ops import OpTable
from ref.moe_routing import moe_route

Array = NDArray[Any]

STEP = 1 / 16
V3 = {"scoring": "sigmoid", "n_group": 8, "topk_group": 4, "group_best": 2, "renormalize": True, "scaling_factor": 2.5}
RULES: dict[str, tuple[int, int, dict[str, Any]]] = {  # n_experts, top_k, the rest of the rule
    "one-expert": (1, 1, {"renormalize": True}),
    "mixtral": (8, 2, {"renormalize": True}),
    "all-experts": (6, 6, {"renormalize": True}),
    "qwen2": (60, 4, {}),
    "qwen3": (128, 8, {"renormalize": True}),
    "deepseek": (64, 6, {"scaling_factor": 1.5}),
    "deepseek-v2": (160, 6, {"n_group": 8, "topk_group": 3, "scaling_factor": 16.0}),
    "deepseek-v3": (256, 8, V3),
    "groups-of-one": (16, 2, V3 | {"n_group": 16, "topk_group": 3}),
    "all-groups": (16, 4, V3 | {"n_group": 4}),
    "scaled-not-normed": (16, 4, V3 | {"n_group": 4, "topk_group": 2, "renormalize": False}),
}


def cases() -> list[Case]:
    found = [_case(name, rule, num_tokens=9) for name, rule in RULES.items()]
    found += [_case(f"{name}-{n}-tokens", RULES[name], n) for name in ("mixtral", "deepseek-v3") for n in (0, 1, 130)]
    for name in ("mixtral", "qwen3", "deepseek-v2", "deepseek-v3"):
        found += [
            _case(f"{name}-ties", RULES[name], 33, levels=3),
            _case(f"{name}-all-equal", RULES[name], 2, levels=1),
        ]
    return [*found, _case("deepseek-v3-below-zero", RULES["deepseek-v3"], 9, bias=-2.0)]


def _case(
    name: str, rule: tuple[int, int, dict[str, Any]], num_tokens: int, levels: int = 0, bias: float = 0.0
) -> Case:
    """levels: how many different logits there are, 0: all; bias: the mean of V3's, −2 puts all choices below 0."""
    n_experts, top_k, settings = rule
    return Case(
        stem="moe_routing",
        name=name,
        axes={"num_tokens": num_tokens, "n_experts": n_experts, "top_k": top_k, **settings},
        make_inputs=partial(
            _inputs,
            num_tokens=num_tokens,
            n_experts=n_experts,
            levels=levels or n_experts,
            bias=bias if settings.get("scoring") == "sigmoid" else None,
        ),
        reference=lambda **inputs: _outputs(moe_route(**inputs, top_k=top_k, **settings)),
        candidate=lambda ops, **inputs: _candidate(ops, **inputs, top_k=top_k, **settings),
        disturb=_disturb,
    )


def _inputs(seed: int, num_tokens: int, n_experts: int, levels: int, bias: float | None) -> Inputs:
    rng = np.random.default_rng(seed)
    # a quarter of a step off, as σ(x) + σ(−x) = σ(0) + σ(0) would tie or not by the last digit
    grid = (np.arange(n_experts) % levels - levels // 2 + 0.25).astype(np.float32) * np.float32(STEP)
    logits = np.array([rng.permutation(grid) for _ in range(num_tokens)], np.float32).reshape(num_tokens, n_experts)
    biases = rng.integers(-4, 5, n_experts).astype(np.float32) * np.float32(STEP)
    return {
        "router_logits": guarded(logits),
        "bias": None if bias is None else guarded(biases + np.float32(bias)),
    }


def _candidate(ops: OpTable, router_logits: Array, top_k: int, **settings: Any) -> Outputs:
    return _outputs(ops.moe_route(router_logits, top_k, **settings))


def _outputs(routed: tuple[Array, Array]) -> Outputs:
    return {"expert_ids": routed[0], "weights": routed[1]}


def _disturb(inputs: Inputs, rng: np.random.Generator) -> Kept:
    logits = inputs["router_logits"]
    keep = int(rng.integers(len(logits))) if len(logits) else 0
    others = np.arange(len(logits)) != keep
    logits[others] = rng.permuted(logits[others], axis=1) * np.float32(3)
    rows = slice(keep, keep + 1)
    return {"expert_ids": rows, "weights": rows}
