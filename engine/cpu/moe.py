"""Experts on a CPU. Checked against ref.moe by conformance."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.cpu.activation import gate_up_act
from engine.cpu.linear import linear
from engine.cpu.team import Team
from engine.weights import LinearWeight
from ref.activation import sigmoid
from ref.moe import moe_sort

Float32 = NDArray[np.float32]
Ints = NDArray[np.integer[Any]]


def moe_mlp(
    x: Float32,
    expert_ids: Ints,
    weights: Float32,
    gate_up_proj: LinearWeight,
    down_proj: LinearWeight,
    *,
    team: Team,
) -> Float32:
    """Σ over choices of weight · down(silu(gate) · up), [num_tokens, hidden_size] → the same, float32.

    Args:
        expert_ids, weights: [num_tokens, top_k], as moe_route gives them; id −1 = none.
        gate_up_proj, down_proj: of all experts, prepared: weight_t [n_experts, in_features, out_features].

    One product an expert over the tokens that chose it. Each token adds up its choices in their order, so what others
    chose moves a bit of its sum only where a product of more rows rounds otherwise than one of fewer.
    """
    gate_up_t, down_t = gate_up_proj.tensors["weight_t"], down_proj.tensors["weight_t"]
    num_tokens, top_k = expert_ids.shape
    rows, offsets = moe_sort(expert_ids, len(gate_up_t))
    terms = np.zeros((num_tokens * top_k, down_proj.out_features), np.float32)
    scales = weights.reshape(-1, 1)
    for expert in np.flatnonzero(np.diff(offsets)):
        own = rows[offsets[expert] : offsets[expert + 1]]
        activated = gate_up_act(team.matmul(x[own // top_k], gate_up_t[expert]))
        terms[own] = team.matmul(activated, down_t[expert]) * scales[own]
    out: Float32 = terms.reshape(num_tokens, top_k, down_proj.out_features).sum(axis=1)
    return out


def moe_shared_expert(
    x: Float32,
    gate_up_proj: LinearWeight,
    down_proj: LinearWeight,
    *,
    shared_expert_gate: LinearWeight | None,
    team: Team,
) -> Float32:
    """σ(x · gate) · down(silu(gate) · up), without a gate its last factor alone, [num_tokens, hidden_size] → the same.

    Args:
        shared_expert_gate: of 1 output, or None.
    """
    y = linear(gate_up_act(linear(x, gate_up_proj, team=team)), down_proj, team=team)
    if shared_expert_gate is not None:
        y *= sigmoid(linear(x, shared_expert_gate, team=team))
    return y
