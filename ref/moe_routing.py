"""Which experts a token goes to, and with what weight: every rule of the supported families as one function.

| family | scoring | groups | bias | renormalize | scaling_factor |
|---|---|---|---|---|---|
| Mixtral, MiniCPM-MoE | softmax | – | – | yes | 1 |
| Qwen2-MoE, Qwen3-MoE | softmax | – | – | norm_topk_prob | 1 |
| DeepSeekMoE, DeepSeek V2-Lite (greedy) | softmax | – | – | norm_topk_prob | routed_scaling_factor |
| DeepSeek V2 (group_limited_greedy) | softmax | best 1 | – | norm_topk_prob | routed_scaling_factor |
| DeepSeek V3 (noaux_tc) | sigmoid | best 2 | e_score_correction_bias | norm_topk_prob | routed_scaling_factor |

Softmax over all experts, renormalised over the chosen ones, is the softmax over the chosen logits: what Mixtral's
paper says.

Source: Jiang et al. 2024, "Mixtral of Experts"; DeepSeek-AI 2024, "DeepSeek-V2" and "DeepSeek-V3 Technical Report".
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ref.activation import sigmoid
from ref.numerics import softmax

Array = NDArray[Any]

SCORINGS = {"softmax": softmax, "sigmoid": sigmoid}


def top_k_lower_first(scores: Array, k: int) -> NDArray[np.int64]:
    """The k best of the last axis, best first, the lower index first among equals: [..., n] → [..., k]."""
    order: NDArray[np.int64] = np.argsort(-scores, axis=-1, kind="stable")[..., :k].astype(np.int64)
    return order


def moe_route(
    router_logits: Array,
    top_k: int,
    *,
    scoring: str = "softmax",
    bias: Array | None = None,
    n_group: int = 1,
    topk_group: int = 1,
    group_best: int = 1,
    renormalize: bool = False,
    scaling_factor: float = 1.0,
) -> tuple[NDArray[np.int64], Array]:
    """Chooses top_k experts for each token.

    1. s = scoring(router_logits), over all experts; choice = s + bias. The bias chooses, it never weighs.
    2. With groups (experts in n_group runs of equal length) a group's score is the sum of its group_best best
       choices; outside the topk_group best groups choice is −inf, so that nothing there is chosen even if all within
       is negative.
    3. The top_k best by choice, best first; the lower id first among equals, for groups and for experts.
    4. weight = s of the chosen; divided by their sum if renormalize; then, in either case, times scaling_factor.

    Args:
        router_logits: [num_tokens, n_experts].
        scoring: "softmax" or "sigmoid".
        bias: [n_experts] or None.
    Returns:
        expert_ids [num_tokens, top_k] int64 and weights [num_tokens, top_k], dtype of router_logits.
    Raises:
        ValueError: an unknown scoring; n_group that does not divide n_experts; fewer experts to choose from than top_k.

    Numerics: give float32 or wider; bfloat16 logits tie often. DeepSeek adds 1e-20 to the sum it divides by, which
    changes nothing unless all scores underflow; then the weights here are 0 as well.
    Edge cases: the code published with DeepSeek V2 leaves scaling_factor out when it renormalizes; no checkpoint of V2
    does, so that rule and this one never differ.
    """
    num_tokens, n_experts = router_logits.shape
    if scoring not in SCORINGS:
        raise ValueError(f"scoring {scoring!r} of experts is not supported; known are {', '.join(SCORINGS)}")
    if n_experts % n_group:
        raise ValueError(f"{n_experts} experts cannot be cut into {n_group} equal groups; n_group must divide them")
    group_size, num_groups = n_experts // n_group, min(topk_group, n_group)
    if not 1 <= top_k <= num_groups * group_size:
        raise ValueError(f"cannot choose {top_k} experts out of {num_groups} groups of {group_size}")
    scores = SCORINGS[scoring](router_logits)  # [num_tokens, n_experts]
    choice = scores if bias is None else scores + bias
    if num_groups < n_group:
        grouped = choice.reshape(num_tokens, n_group, group_size)
        group_scores = -np.sort(-grouped, axis=-1)[..., :group_best].sum(axis=-1)  # [num_tokens, n_group]
        kept = np.zeros((num_tokens, n_group), np.bool_)
        np.put_along_axis(kept, top_k_lower_first(group_scores, num_groups), True, axis=-1)
        choice = np.where(np.repeat(kept, group_size, axis=-1), choice, -np.inf)
    expert_ids = top_k_lower_first(choice, top_k)
    weights = np.take_along_axis(scores, expert_ids, axis=-1)
    if renormalize:
        total = weights.sum(axis=-1, keepdims=True)
        weights = weights / np.where(total == 0, 1, total).astype(weights.dtype)
    return expert_ids, weights * weights.dtype.type(scaling_factor)
