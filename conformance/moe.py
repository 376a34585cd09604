"""Cases of the routed experts, and of the expert that all tokens use.

An expert without tokens has weights of NaN: whoever looks at it will show it. So will whoever uses a row of padding,
which is NaN too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.case import Case, Inputs, Kept, Outputs
from conformance.inputs import guarded, normal
from engine.ops import OpTable
from engine.weights import LinearWeight
from ref.moe import moe_mlp, moe_shared_expert

Array = NDArray[Any]
Assign = Callable[[np.random.Generator, int, int, int], Array]  # (rng, num_tokens, n_experts, top_k) → expert_ids


def _any(rng: np.random.Generator, num_tokens: int, n_experts: int, top_k: int) -> Array:
    """Different experts of each token, in any order."""
    return rng.permuted(np.tile(np.arange(n_experts), (num_tokens, 1)), axis=1)[:, :top_k]


def _first_two(rng: np.random.Generator, num_tokens: int, n_experts: int, top_k: int) -> Array:
    return _any(rng, num_tokens, 2, top_k)


def _last(rng: np.random.Generator, num_tokens: int, n_experts: int, top_k: int) -> Array:
    """All tokens to the last expert."""
    return np.full((num_tokens, top_k), n_experts - 1)


def _all_but_one(rng: np.random.Generator, num_tokens: int, n_experts: int, top_k: int) -> Array:
    """Everybody at the first experts, save one token at the last ones."""
    expert_ids = np.tile(np.arange(top_k), (num_tokens, 1))
    expert_ids[num_tokens // 2] = np.arange(n_experts - top_k, n_experts)
    return expert_ids


def _padded(rng: np.random.Generator, num_tokens: int, n_experts: int, top_k: int) -> Array:
    """Every third token is padding, and another has a choice less than the others."""
    expert_ids = _any(rng, num_tokens, n_experts, top_k)
    expert_ids[::3] = -1
    expert_ids[1, 0] = -1
    return expert_ids


def _nobody(rng: np.random.Generator, num_tokens: int, n_experts: int, top_k: int) -> Array:
    return np.full((num_tokens, top_k), -1)


ROUTED: dict[str, tuple[Assign, tuple[int, int, int, int, int]]] = {
    # num_tokens, n_experts, top_k, hidden_size, intermediate_size
    "no-tokens": (_any, (0, 4, 2, 8, 6)),
    "one-expert": (_any, (1, 1, 1, 3, 16)),
    "one-token": (_any, (1, 8, 2, 96, 64)),
    "odd": (_any, (7, 5, 3, 33, 17)),
    "all-experts": (_any, (5, 6, 6, 24, 10)),
    "idle": (_first_two, (9, 8, 2, 16, 12)),
    "one-has-all": (_last, (17, 8, 1, 16, 12)),
    "one-apart": (_all_but_one, (15, 8, 2, 16, 12)),
    "padding": (_padded, (16, 8, 2, 16, 12)),
    "only-padding": (_nobody, (3, 8, 2, 16, 12)),
    "many": (_any, (4097, 8, 2, 12, 6)),
    "many-experts": (_any, (40, 128, 8, 16, 8)),
    "shared-out": (_last, (70, 3, 1, 128, 96)),  # products large enough for several threads
}
SHARED = {  # num_tokens, hidden_size, intermediate_size
    "no-tokens": (0, 8, 6),
    "one-token": (1, 96, 64),
    "odd": (7, 33, 17),
    "shared-out": (70, 128, 96),
}


def cases() -> list[Case]:
    found = [_routed(name, assign, *sizes) for name, (assign, sizes) in ROUTED.items()]
    return found + [_shared(name, *sizes, gated) for name, sizes in SHARED.items() for gated in (False, True)]


def _routed(
    name: str,
    assign: Assign,
    num_tokens: int,
    n_experts: int,
    top_k: int,
    hidden_size: int,
    intermediate_size: int,
) -> Case:
    axes = {
        "num_tokens": num_tokens,
        "n_experts": n_experts,
        "top_k": top_k,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
    }
    return Case(
        stem="moe",
        name=f"routed-{name}",
        axes=axes,
        make_inputs=partial(_routed_inputs, assign=assign, **axes),
        reference=lambda **inputs: {"out": moe_mlp(**inputs)},
        candidate=_routed_candidate,
        disturb=_routed_disturb,
    )


def _routed_inputs(
    seed: int,
    assign: Assign,
    num_tokens: int,
    n_experts: int,
    top_k: int,
    hidden_size: int,
    intermediate_size: int,
) -> Inputs:
    """Rows of x of sizes from 1e-3 to 1e3, and weights of choices from 1e-3 to 1, not side by side in memory."""
    rng = np.random.default_rng(seed)
    expert_ids = np.asarray(assign(rng, num_tokens, n_experts, top_k), np.int64).reshape(num_tokens, top_k)
    gate_up = normal(rng, n_experts, 2 * intermediate_size, hidden_size, scale=hidden_size**-0.5)
    down = normal(rng, n_experts, hidden_size, intermediate_size, scale=intermediate_size**-0.5)
    x = normal(rng, num_tokens, hidden_size) * _sizes(rng, num_tokens, 1, -3, 3)
    weights = _sizes(rng, num_tokens, top_k, -3, 0)
    idle = np.setdiff1d(np.arange(n_experts), expert_ids)
    gate_up[idle], down[idle] = np.nan, np.nan
    x[(expert_ids == -1).all(axis=1)] = np.nan
    weights[expert_ids == -1] = np.nan
    return {
        "x": guarded(x),
        "expert_ids": guarded(expert_ids),
        "weights": guarded(weights),
        "gate_up_proj": gate_up,
        "down_proj": down,
    }


def _routed_candidate(
    ops: OpTable, x: Array, expert_ids: Array, weights: Array, gate_up_proj: Array, down_proj: Array
) -> Outputs:
    return {"out": ops.moe_mlp(x, expert_ids, weights, _prepared(ops, gate_up_proj), _prepared(ops, down_proj))}


def _routed_disturb(inputs: Inputs, rng: np.random.Generator) -> Kept:
    """Others go where they went, but with other content and weight; experts that `keep` does not use are others."""
    x, expert_ids, weights = inputs["x"], inputs["expert_ids"], inputs["weights"]
    keep = int(rng.integers(len(x))) if len(x) else 0
    others = np.arange(len(x)) != keep
    x[others] = normal(rng, int(others.sum()), x.shape[1], scale=100.0)
    weights[others] = rng.random(weights[others].shape, np.float32)
    for name in ("gate_up_proj", "down_proj"):
        unused = np.setdiff1d(np.arange(len(inputs[name])), expert_ids[keep : keep + 1])
        inputs[name][unused] = normal(rng, len(unused), *inputs[name].shape[1:])
    return {"out": slice(keep, keep + 1)}


def _shared(name: str, num_tokens: int, hidden_size: int, intermediate_size: int, gated: bool) -> Case:
    axes = {"num_tokens": num_tokens, "hidden_size": hidden_size, "intermediate_size": intermediate_size}
    return Case(
        stem="moe",
        name=f"shared-{name}" + ("-gated" if gated else ""),
        axes=axes | {"gated": gated},
        make_inputs=partial(_shared_inputs, **axes, gated=gated),
        reference=lambda **inputs: {"out": moe_shared_expert(**inputs)},
        candidate=_shared_candidate,
        disturb=_shared_disturb,
    )


def _shared_inputs(seed: int, num_tokens: int, hidden_size: int, intermediate_size: int, gated: bool) -> Inputs:
    """The larger rows of x open or shut the gate."""
    rng = np.random.default_rng(seed)
    return {
        "x": guarded(normal(rng, num_tokens, hidden_size) * _sizes(rng, num_tokens, 1, -3, 1)),
        "gate_up_proj": normal(rng, 2 * intermediate_size, hidden_size, scale=hidden_size**-0.5),
        "down_proj": normal(rng, hidden_size, intermediate_size, scale=intermediate_size**-0.5),
        "shared_expert_gate": normal(rng, 1, hidden_size, scale=hidden_size**-0.5) if gated else None,
    }


def _shared_candidate(
    ops: OpTable, x: Array, gate_up_proj: Array, down_proj: Array, shared_expert_gate: Array | None
) -> Outputs:
    gate = None if shared_expert_gate is None else _prepared(ops, shared_expert_gate)
    weights = (_prepared(ops, gate_up_proj), _prepared(ops, down_proj))
    return {"out": ops.moe_shared_expert(x, *weights, shared_expert_gate=gate)}


def _shared_disturb(inputs: Inputs, rng: np.random.Generator) -> Kept:
    x = inputs["x"]
    keep = int(rng.integers(len(x))) if len(x) else 0
    others = np.arange(len(x)) != keep
    x[others] = normal(rng, int(others.sum()), x.shape[1], scale=100.0)
    return {"out": slice(keep, keep + 1)}


def _sizes(rng: np.random.Generator, rows: int, columns: int, low: float, high: float) -> Array:
    """Powers of 10 between those of low and high, [rows, columns]."""
    return np.float32(10) ** rng.uniform(low, high, (rows, columns)).astype(np.float32)


def _prepared(ops: OpTable, weight: Array) -> LinearWeight:
    out_features, in_features = weight.shape[-2:]
    return ops.prepare(LinearWeight("dense", out_features, in_features, {"weight": weight}))
