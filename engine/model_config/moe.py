"""Experts as the families' config.json describes them. The rules of routing are those of ref.moe_routing.

Each function gives a MoeConfig and notes problems in the fields; what cannot be told from a file with problems is 0.
"""

from __future__ import annotations

from typing import Any

from engine.config import MoeConfig
from engine.model_config.fields import LARGEST, Fields, is_int

# what transformers takes for keys that are absent
MIXTRAL_MOE = {"num_local_experts": 8, "num_experts_per_tok": 2}
QWEN_MOE = {"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": None}
MINICPM_MOE = {"num_experts": None, "num_experts_per_tok": 2}
_DEEPSEEK_MOE = {"n_shared_experts": None, "first_k_dense_replace": 0, "moe_layer_freq": 1}
DEEPSEEK_V2_MOE = {
    **_DEEPSEEK_MOE,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
}
DEEPSEEK_V3_MOE = {
    **_DEEPSEEK_MOE,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
}


def mixtral_experts(fields: Fields) -> MoeConfig:
    """In every layer; renormalized softmax."""
    return _same_in_all_layers(fields, _n_experts(fields, "num_local_experts", "num_experts"))


def minicpm_experts(fields: Fields) -> MoeConfig | None:
    """As Mixtral, if the file has num_experts; None: a dense model."""
    if not fields.optional("num_experts"):
        return None
    return _same_in_all_layers(fields, _n_experts(fields, "num_experts"))


def qwen_experts(fields: Fields, shared_expert: bool) -> MoeConfig:
    """On every decoder_sparse_step-th layer that mlp_only_layers does not name; softmax.

    Args:
        shared_expert: there is one, behind a sigmoid gate (Qwen2-MoE).
    """
    every = _integer(fields, "decoder_sparse_step") or 1
    n_layers = _common(fields, "num_hidden_layers")
    dense = fields.optional("mlp_only_layers") or []
    in_range = isinstance(dense, list) and all(is_int(layer) and 0 <= layer < n_layers for layer in dense)
    if n_layers and not in_range:
        fields.problem(f"mlp_only_layers must be a list of layers from 0 to {n_layers - 1}, found {dense!r}")
    return _checked(
        fields,
        MoeConfig(
            n_experts=_n_experts(fields, "num_experts", "num_local_experts"),
            n_experts_per_tok=_integer(fields, "num_experts_per_tok"),
            intermediate_size=_integer(fields, "moe_intermediate_size"),
            layers=tuple(in_range and layer not in dense and (layer + 1) % every == 0 for layer in range(n_layers)),
            renormalize=fields.flag("norm_topk_prob"),
            shared_intermediate_size=_integer(fields, "shared_expert_intermediate_size") if shared_expert else 0,
            shared_gate=shared_expert,
        ),
    )


def deepseek_v2_experts(fields: Fields) -> MoeConfig:
    """DeepSeekMoE, V2 and V2-Lite: softmax; V2 first chooses groups, by the best expert of each."""
    _one_of(fields, "scoring_func", ("softmax",))
    grouped = _one_of(fields, "topk_method", ("greedy", "group_limited_greedy")) == "group_limited_greedy"
    return _deepseek(
        fields,
        n_group=_integer(fields, "n_group") if grouped else 1,
        topk_group=_integer(fields, "topk_group") if grouped else 1,
    )


def deepseek_v3_experts(fields: Fields) -> MoeConfig:
    """V3 and R1: sigmoid; a bias that only chooses; groups by the sum of their two best."""
    _one_of(fields, "scoring_func", ("sigmoid",))
    _one_of(fields, "topk_method", ("noaux_tc",))
    return _deepseek(
        fields,
        scoring="sigmoid",
        n_group=_integer(fields, "n_group"),
        topk_group=_integer(fields, "topk_group"),
        group_best=2,
        selection_bias=True,
    )


def _same_in_all_layers(fields: Fields, n_experts: int) -> MoeConfig:
    return _checked(
        fields,
        MoeConfig(
            n_experts=n_experts,
            n_experts_per_tok=_integer(fields, "num_experts_per_tok"),
            intermediate_size=_common(fields, "intermediate_size"),
            layers=(True,) * _common(fields, "num_hidden_layers"),
            renormalize=True,
        ),
    )


def _deepseek(fields: Fields, **routing: Any) -> MoeConfig:
    """From first_k_dense_replace on, every moe_layer_freq-th layer; n_shared_experts are one that is so much wider."""
    first, every = _integer(fields, "first_k_dense_replace", low=0), _integer(fields, "moe_layer_freq") or 1
    size, n_layers = _integer(fields, "moe_intermediate_size"), _common(fields, "num_hidden_layers")
    n_shared = 0 if fields.optional("n_shared_experts") is None else _integer(fields, "n_shared_experts", low=0)
    return _checked(
        fields,
        MoeConfig(
            n_experts=_n_experts(fields, "n_routed_experts", "num_local_experts"),
            n_experts_per_tok=_integer(fields, "num_experts_per_tok"),
            intermediate_size=size,
            layers=tuple(layer >= first and layer % every == 0 for layer in range(n_layers)),
            renormalize=fields.flag("norm_topk_prob"),
            scaling_factor=fields.number("routed_scaling_factor"),
            shared_intermediate_size=n_shared * size,
            **routing,
        ),
    )


def _checked(fields: Fields, moe: MoeConfig) -> MoeConfig:
    """The same, with a problem noted for numbers that cannot stand together; a 0 has its problem already."""
    if not all((moe.n_experts, moe.n_experts_per_tok, moe.n_group, moe.topk_group)):
        return moe
    if moe.n_experts % moe.n_group:
        fields.problem(f"n_group ({moe.n_group}) must divide the number of experts ({moe.n_experts})")
    elif moe.topk_group > moe.n_group:
        fields.problem(f"topk_group ({moe.topk_group}) must be at most n_group ({moe.n_group})")
    elif moe.n_experts_per_tok > (reach := moe.n_experts // moe.n_group * moe.topk_group):
        groups = f" in {moe.topk_group} of {moe.n_group} groups" if moe.n_group > 1 else ""
        fields.problem(f"num_experts_per_tok ({moe.n_experts_per_tok}) is more than the {reach} experts{groups}")
    return moe


def _n_experts(fields: Fields, *keys: str) -> int:
    """The number of experts under the first key that is there; transformers 5 has other names than 4 for it."""
    given = [key for key in keys if fields.values.get(key) is not None]
    if len({repr(fields.values[key]) for key in given}) > 1:
        fields.problem(" but ".join(f"{key} is {fields.values[key]!r}" for key in given))
    return fields.integer(name := given[0] if given else keys[0], fields.value(name))


def _common(fields: Fields, key: str) -> int:
    """A size that all families have, so that its problems are noted elsewhere; 0 if it has one."""
    value = fields.value(key)
    return value if is_int(value) and 0 < value <= LARGEST[key] else 0


def _one_of(fields: Fields, key: str, known: tuple[str, ...]) -> str:
    value = fields.value(key)
    if value not in known:
        fields.problem(f"{key} {value!r} is not supported; supported is {' or '.join(map(repr, known))}")
    return str(value)


def _integer(fields: Fields, key: str, low: int = 1) -> int:
    return fields.integer(key, fields.value(key), low)
