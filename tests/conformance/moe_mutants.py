"""Faults to plant in the experts and in the choice of them; test_the_tests.py plants them."""

from tests.conformance.mutants import mutants

MOE = mutants(
    "moe",
    ("moe_mlp", "rows of other tokens", "x[own // top_k]", "x[own % num_tokens]"),
    ("moe_mlp", "every token's first expert does all", "down_t[expert]", "down_t[expert_ids.max()]"),
    ("moe_mlp", "weights of other choices", "* scales[own]", "* scales[own[::-1]]"),
    ("moe_mlp", "last expert left out", "np.diff(offsets))", "np.diff(offsets[:-1]))"),
    (
        "moe_mlp",
        "last row of each expert left out",
        "offsets[expert + 1]]",
        "max(offsets[expert], offsets[expert + 1] - 1)]",
    ),
    ("moe_mlp", "padding not cleared", "np.zeros((num_tokens", "np.empty((num_tokens"),
    ("moe_mlp", "padding goes to the last expert", "moe_sort(expert_ids,", "moe_sort(expert_ids % len(gate_up_t),"),
    ("moe_mlp", "mean of the choices", ".sum(axis=1)", ".mean(axis=1)"),
    (
        "moe_mlp",
        "half precision on the way",
        "x[own // top_k]",
        "x[own // top_k].astype(np.float16).astype(np.float32)",
    ),
    ("moe_shared_expert", "gate ignored", "if shared_expert_gate is not None", "if False"),
    ("moe_shared_expert", "gate without its sigmoid", "y *= sigmoid(", "y *= ("),
)
MOE_ROUTING = mutants(
    "moe_routing",
    (
        "moe_route",
        "higher id first among equals",
        'np.argsort(-scores, axis=-1, kind="stable")[..., :k]',
        '(scores.shape[-1] - 1 - np.argsort(-scores[..., ::-1], axis=-1, kind="stable"))[..., :k]',
    ),
    ("moe_route", "worst first", "np.argsort(-scores, axis", "np.argsort(scores, axis"),
    ("moe_route", "sigmoid ignored", "SCORINGS[scoring](router_logits)", 'SCORINGS["softmax"](router_logits)'),
    ("moe_route", "bias ignored", "scores if bias is None", "scores if True"),
    ("moe_route", "bias weighs", "np.take_along_axis(scores,", "np.take_along_axis(choice,"),
    ("moe_route", "groups ignored", "if num_groups < n_group:", "if False:"),
    ("moe_route", "groups by their best expert alone", "[..., :group_best]", "[..., :1]"),
    ("moe_route", "groups by all their experts", "[..., :group_best]", "[..., :]"),
    (
        "moe_route",
        "one group too many",
        "top_k_lower_first(group_scores, num_groups)",
        "top_k_lower_first(group_scores, num_groups + 1)",
    ),
    ("moe_route", "groups that are out score 0", "choice, -np.inf)", "choice, 0.0)"),
    ("moe_route", "never renormalized", "if renormalize:", "if False:"),
    ("moe_route", "always renormalized", "if renormalize:", "if True:"),
    ("moe_route", "not scaled", "weights.dtype.type(scaling_factor)", "weights.dtype.type(1)"),
)
MOE_MUTANTS = [*MOE, *MOE_ROUTING]
