"""Mixture of experts: many feed-forward blocks of which each token uses a few (ref/moe_routing.py says which).

A row is one (token, choice) pair. Rows are sorted by expert, so that each expert is one matrix product over a run of
rows; afterwards each token adds up its rows, weighted. Source: Shazeer et al. 2017, "Outrageously Large Neural
Networks"; shared experts: Dai et al. 2024, "DeepSeekMoE".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ref.activation import gate_up_act, sigmoid
from ref.linear import linear
from ref.numerics import round_to

Array = NDArray[Any]
Ints = NDArray[np.integer[Any]]
Experts = Sequence[Array] | Array  # [n_experts, out_features, in_features], or what yields them one at a time


def moe_sort(expert_ids: Ints, n_experts: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Puts rows into the order of their experts.

    Args:
        expert_ids: [num_tokens, top_k]; −1 = no expert (padding), no row is made of it.
    Returns:
        rows [num_rows] int64: token · top_k + choice of each row, by expert and then by token; and offsets
        [n_experts + 1] int64: expert e owns rows[offsets[e] : offsets[e + 1]], which may be none.
    Raises:
        ValueError: an id that is no expert and not −1.
    """
    flat = np.asarray(expert_ids, np.int64).reshape(-1)
    wrong = flat[(flat < -1) | (flat >= n_experts)]
    if wrong.size:
        raise ValueError(f"expert id {wrong[0]} is outside 0 … {n_experts - 1}; padding is −1")
    order = np.argsort(flat, kind="stable")
    rows = order[np.count_nonzero(flat == -1) :]  # those without an expert come first
    offsets = np.searchsorted(flat[rows], np.arange(n_experts + 1))
    return rows.astype(np.int64), offsets.astype(np.int64)


def moe_linear(x: Array, experts: Experts, offsets: Ints) -> Array:
    """linear of each run of rows with its expert's weight.

    Args:
        x: [num_rows, in_features], rows sorted by expert.
        experts: n_experts weights [out_features, in_features]. Only those that own rows are looked at, so a sequence
            may decode a weight when it is asked for.
        offsets: [n_experts + 1], as moe_sort gives it.
    Returns:
        [num_rows, out_features], dtype of x; rows past offsets[−1] are padding and come back as zeros.

    Edge cases: with no rows at all the first expert says how wide nothing is.
    """
    used = [e for e in range(len(offsets) - 1) if offsets[e] < offsets[e + 1]]
    parts = [linear(x[offsets[e] : offsets[e + 1]], experts[e]) for e in used]
    out_features = parts[0].shape[1] if parts else experts[0].shape[0]
    padding = np.zeros((len(x) - int(offsets[-1]), out_features), x.dtype)
    return np.concatenate([*parts, padding]).astype(x.dtype)


def moe_combine(y: Array, rows: Ints, weights: Array) -> Array:
    """out[token] = Σ_choice weights[token, choice] · y[row of (token, choice)].

    Args:
        y: [num_rows, hidden_size], in the order of rows.
        rows: [num_rows], as moe_sort gives it.
        weights: [num_tokens, top_k].
    Returns:
        [num_tokens, hidden_size], dtype of y.

    Numerics: summed in the order of choices, from 0, one rounding at the end; so a token's sum does not depend on
    what other tokens chose.
    Edge cases: a token without rows is zeros, whatever its weights are.
    """
    num_tokens, top_k = weights.shape
    products = np.zeros((num_tokens * top_k, y.shape[1]), y.dtype)
    products[rows] = weights.reshape(-1)[rows, None].astype(y.dtype) * y
    out: Array = products.reshape(num_tokens, top_k, y.shape[1]).sum(axis=1)
    return out


def moe_mlp(
    x: Array,
    expert_ids: Ints,
    weights: Array,
    gate_up_proj: Experts,
    down_proj: Experts,
    activation: str = "silu",
    *,
    storage: str | None = None,
) -> Array:
    """The routed experts: moe_sort, gate_up_proj, gate_up_act, down_proj, moe_combine.

    Args:
        x: [num_tokens, hidden_size].
        expert_ids, weights: [num_tokens, top_k], as moe_route gives them; id −1 = none.
        gate_up_proj: n_experts of [2 · intermediate_size, hidden_size], gate first (w1 and w3 of Mixtral).
        down_proj: n_experts of [hidden_size, intermediate_size].
    Returns:
        [num_tokens, hidden_size], dtype of x.
    Raises:
        ValueError: an id that is no expert and not −1; an activation that is not known.

    Numerics: each product and the activation are rounded to `storage`, and the sum once at the end.
    """
    rows, offsets = moe_sort(expert_ids, len(gate_up_proj))
    gate_up = round_to(moe_linear(x[rows // expert_ids.shape[1]], gate_up_proj, offsets), storage)
    activated = round_to(gate_up_act(gate_up, activation), storage)
    y = round_to(moe_linear(activated, down_proj, offsets), storage)
    return round_to(moe_combine(y, rows, weights), storage)


def moe_shared_expert(
    x: Array,
    gate_up_proj: Array,
    down_proj: Array,
    activation: str = "silu",
    shared_expert_gate: Array | None = None,
    *,
    storage: str | None = None,
) -> Array:
    """The expert that every token goes to; its output is added to that of moe_mlp.

    Args:
        x: [num_tokens, hidden_size].
        gate_up_proj, down_proj: [2 · intermediate_size, hidden_size] and [hidden_size, intermediate_size]. Several
            shared experts (n_shared_experts of DeepSeek) are one that is as many times as wide.
        shared_expert_gate: [1, hidden_size]: multiply by σ(x · gate), as Qwen2-MoE does; None: do not, as DeepSeek.
    Returns:
        [num_tokens, hidden_size], dtype of x.

    Numerics: as moe_mlp; the gate is not rounded on its own.
    """
    activated = round_to(gate_up_act(round_to(linear(x, gate_up_proj), storage), activation), storage)
    y = round_to(linear(activated, down_proj), storage)
    return y if shared_expert_gate is None else round_to(sigmoid(linear(x, shared_expert_gate)) * y, storage)
