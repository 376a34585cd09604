"""Mixture of experts as a block of a model: a router, experts that are gated MLPs, and maybe one that all tokens use.

The operations are ref/moe_routing.py and ref/moe.py. Beside the block stand the names and shapes of its weights.
Source: Dai et al. 2024, "DeepSeekMoE", and the papers named there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ref.activation import sigmoid
from ref.model.blocks import GATE_UP_DOWN, gated_mlp, linear_shapes, mlp_shapes
from ref.model.run import Run, Shapes
from ref.moe import moe_combine, moe_sort
from ref.moe_routing import moe_route

Array = NDArray[Any]

W1_W3_W2 = ("w1", "w3", "w2")  # what Mixtral calls gate_proj, up_proj and down_proj


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """The arguments of ref.moe_routing.moe_route, the sizes, and the names of weights."""

    n_experts: int
    top_k: int
    intermediate_size: int  # of one expert
    renormalize: bool
    scoring: str = "softmax"
    scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    group_best: int = 1
    selection_bias: bool = False  # gate.e_score_correction_bias
    shared_intermediate_size: int = 0  # 0: no shared expert
    shared_name: str = "shared_experts"
    shared_gate: bool = False  # shared_expert_gate, through a sigmoid
    names: tuple[str, str, str] = GATE_UP_DOWN

    def __post_init__(self) -> None:
        """Raises ValueError for numbers that cannot stand together, in the words of config.json."""
        if self.n_experts % self.n_group:
            raise ValueError(f"config.json: n_group {self.n_group} must divide the {self.n_experts} experts")
        if self.topk_group > self.n_group:
            raise ValueError(f"config.json: topk_group {self.topk_group} must be at most n_group {self.n_group}")
        if self.top_k > (reach := self.n_experts // self.n_group * self.topk_group):
            raise ValueError(
                f"config.json: num_experts_per_tok {self.top_k} must be at most {reach}, so many can be chosen"
            )


def moe_block(moe: MoeConfig, run: Run, key: str, hidden: Array) -> Array:
    """Σ over the chosen experts of weight · mlp(x), plus the shared expert.

    Args:
        key: the block's name in the checkpoint, such as model.layers.0.mlp.
        hidden: [num_tokens, hidden_size], normed.
    Returns:
        [num_tokens, hidden_size], dtype of hidden.
    Raises:
        ValueError: see moe_route.

    An expert that no token has chosen is not looked at, let alone decoded.
    """
    router_logits = run.linear(f"{key}.gate", hidden)
    expert_ids, weights = moe_route(
        router_logits,
        moe.top_k,
        scoring=moe.scoring,
        bias=run.weights[f"{key}.gate.e_score_correction_bias"] if moe.selection_bias else None,
        n_group=moe.n_group,
        topk_group=moe.topk_group,
        group_best=moe.group_best,
        renormalize=moe.renormalize,
        scaling_factor=moe.scaling_factor,
    )
    run.show(f"{key}.expert_ids", expert_ids)
    run.show(f"{key}.expert_weights", weights)
    rows, offsets = moe_sort(expert_ids, moe.n_experts)
    y = np.zeros((len(rows), hidden.shape[1]), hidden.dtype)
    for expert in np.flatnonzero(np.diff(offsets)):
        own = slice(int(offsets[expert]), int(offsets[expert + 1]))
        y[own] = gated_mlp(run, f"{key}.experts.{expert}", hidden[rows[own] // moe.top_k], moe.names)
    out = run.step(f"{key}.experts", moe_combine(y, rows, weights))
    if not moe.shared_intermediate_size:
        return out
    shared = gated_mlp(run, f"{key}.{moe.shared_name}", hidden)
    if moe.shared_gate:
        gate = sigmoid(run.product(f"{key}.shared_expert_gate", hidden))  # [num_tokens, 1]
        shared = run.step(f"{key}.shared_expert_gate", gate * shared)
    return out + shared


def moe_shapes(moe: MoeConfig, key: str, hidden_size: int) -> Shapes:
    """Name and shape of every weight of the block."""
    shapes = linear_shapes(f"{key}.gate", moe.n_experts, hidden_size)
    if moe.selection_bias:
        shapes[f"{key}.gate.e_score_correction_bias"] = (moe.n_experts,)
    for expert in range(moe.n_experts):
        shapes |= mlp_shapes(f"{key}.experts.{expert}", hidden_size, moe.intermediate_size, names=moe.names)
    if moe.shared_intermediate_size:
        shapes |= mlp_shapes(f"{key}.{moe.shared_name}", hidden_size, moe.shared_intermediate_size)
    if moe.shared_gate:
        shapes |= linear_shapes(f"{key}.shared_expert_gate", 1, hidden_size)
    return shapes
