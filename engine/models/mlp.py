"""The dense gated MLP, as most families have it in some layers or in all. Defined by ref.model.blocks.gated_mlp."""

from __future__ import annotations

from typing import Any

from engine.ops import OpTable
from engine.weights import LinearSpec, Weights

Array = Any

GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")


def mlp_linears(
    dest: str,
    source: str,
    hidden_size: int,
    intermediate_size: int,
    *,
    bias: bool = False,
    names: tuple[str, str, str] = GATE_UP_DOWN,
    n_experts: int = 0,
    gated: bool = True,
    norm: str = "",
) -> list[LinearSpec]:
    """DEST.gate_up_proj and DEST.down_proj of the modules SOURCE.NAME; with n_experts SOURCE holds "{expert}".

    gated: gate_up_proj is read by linear_gate_up_act alone. norm: see LinearSpec.
    """
    gate, up, down = names
    gated = gated and not n_experts
    gate_up = ((f"{source}.{gate}", intermediate_size), (f"{source}.{up}", intermediate_size))
    return [
        LinearSpec(
            *(f"{dest}.gate_up_proj", gate_up, hidden_size, bias, n_experts),
            gated=gated,
            feeds=f"{dest}.down_proj" if gated else "",
            norm=norm,
        ),
        LinearSpec(f"{dest}.down_proj", ((f"{source}.{down}", hidden_size),), intermediate_size, bias, n_experts),
    ]


def mlp(hidden: Array, dest: str, weights: Weights, ops: OpTable) -> Array:
    """[num_tokens, hidden_size] → the same."""
    gated = ops.linear_gate_up_act(hidden, weights.linears[f"{dest}.gate_up_proj"])
    return ops.linear(gated, weights.linears[f"{dest}.down_proj"])
