"""engine.model_config.moe: which layers have experts, how many, and by what rule they are chosen (KRN-07, LDR-10)."""

import dataclasses
from typing import Any

import pytest

from conformance.golden_families import FAMILY_GOLDENS
from engine.config import ModelConfig
from engine.errors import ConfigError
from engine.model_config.fields import Fields
from engine.model_config.moe import DEEPSEEK_V2_MOE, DEEPSEEK_V3_MOE, deepseek_v2_experts, deepseek_v3_experts
from engine.model_config.read import model_config_from_hf, summary
from ref.config import parse_config

FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_moe")


def read(name: str, **overrides: Any) -> ModelConfig:
    return model_config_from_hf(FAMILY_GOLDENS[name] | overrides, None, "config.json")


def refusal(name: str, **overrides: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read(name, **overrides)
    return str(caught.value)


def without(name: str, *keys: str, **overrides: Any) -> dict[str, Any]:
    return {key: value for key, value in (FAMILY_GOLDENS[name] | overrides).items() if key not in keys}


def assert_as_ref(config: dict[str, Any]) -> None:
    """What the engine makes of a config file is what ref makes of it."""
    found, wanted = model_config_from_hf(config, None, "config.json"), parse_config(config)
    moe = dataclasses.asdict(found.moe)  # type: ignore[call-overload]
    moe["top_k"] = moe.pop("n_experts_per_tok")
    layers = moe.pop("layers")
    assert moe == {key: getattr(wanted.moe, key) for key in moe}  # type: ignore[attr-defined]
    assert layers == getattr(wanted, "moe_layers", (True,) * found.n_layers)
    window = getattr(wanted, "sliding_window", None)
    assert found.windows == getattr(wanted, "windows", (window,) * found.n_layers)
    for key in ("n_heads", "n_kv_heads", "head_dim", "norm_eps", "max_position_embeddings"):
        assert getattr(found, key) == getattr(wanted, key)
    assert found.rope.theta == wanted.rope.theta
    for key in ("qkv_bias", "o_bias", "qk_norm"):
        assert getattr(found, key) == getattr(
            wanted, key, getattr(wanted, "attention_bias", False) and key != "qk_norm"
        )


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_there_and_what_is_absent_is_as_in_ref(name: str) -> None:
    assert_as_ref(FAMILY_GOLDENS[name])
    absent = {
        "mixtral": ("num_local_experts", "num_experts_per_tok", "sliding_window", "rope_theta", "num_key_value_heads"),
        "qwen2_moe": ("num_experts_per_tok", "norm_topk_prob", "decoder_sparse_step", "rope_theta"),
        "qwen3_moe": ("num_experts_per_tok", "norm_topk_prob", "mlp_only_layers", "head_dim"),
        "deepseek_moe": ("first_k_dense_replace", "norm_topk_prob", "routed_scaling_factor", "n_shared_experts"),
    }[name]
    enough = {"num_experts": 8} if name.startswith("qwen") else {"num_attention_heads": 8, "hidden_size": 64}
    assert_as_ref(without(name, *absent, **enough))


@pytest.mark.parametrize(("name", "key"), [("mixtral", "num_experts"), ("qwen3_moe", "num_local_experts")])
def test_both_names_of_the_number_of_experts(name: str, key: str) -> None:
    """transformers 4 and 5 call it differently."""
    usual = {"num_experts", "num_local_experts"} - {key}
    config = without(name, *usual, **{key: 5})
    moe = model_config_from_hf(config, None, "config.json").moe
    assert moe is not None
    assert moe.n_experts == 5
    number = FAMILY_GOLDENS[name][min(usual)]
    assert read(name, **{key: number}) == read(name)
    assert f"is {number} but {key} is 7" in refusal(name, **{key: 7})


def test_which_layers_have_experts() -> None:
    def layers(name: str, **overrides: Any) -> list[int]:
        moe = read(name, **overrides).moe
        assert moe is not None
        return [layer for layer, has in enumerate(moe.layers) if has]

    qwen = {"num_hidden_layers": 6}
    assert layers("qwen3_moe", **qwen, mlp_only_layers=[]) == [0, 1, 2, 3, 4, 5]
    assert layers("qwen3_moe", **qwen, mlp_only_layers=None, decoder_sparse_step=2) == [1, 3, 5]
    assert layers("qwen3_moe", **qwen, mlp_only_layers=[3, 0], decoder_sparse_step=2) == [1, 5]
    assert layers("deepseek_moe", **qwen, first_k_dense_replace=3) == [3, 4, 5]
    assert layers("deepseek_moe", **qwen, first_k_dense_replace=1, moe_layer_freq=2) == [2, 4]
    assert layers("deepseek_moe", **qwen, first_k_dense_replace=6) == []
    assert layers("mixtral", num_hidden_layers=2) == [0, 1]


def test_windows_of_qwen_with_experts() -> None:
    """Qwen2-MoE: every other of the layers below max_window_layers; Qwen3-MoE: all of them."""
    window = {"use_sliding_window": True, "sliding_window": 8, "num_hidden_layers": 5, "mlp_only_layers": []}
    assert read("qwen2_moe", **window).windows == (8, None, 8, None, 8)
    assert read("qwen2_moe", **window, max_window_layers=3).windows == (8, None, 8, None, None)
    assert read("qwen3_moe", **window, max_window_layers=3).windows == (8,) * 5
    assert read("qwen3_moe", **window | {"use_sliding_window": False}).windows == (None,) * 5
    for name in ("qwen2_moe", "qwen3_moe"):
        assert_as_ref(FAMILY_GOLDENS[name] | window | {"max_window_layers": 3})
    kinds = ["full_attention", "sliding_attention", *["full_attention"] * 3]
    assert read("qwen2_moe", **window, layer_types=kinds).windows == (None, 8, None, None, None)


def test_shared_experts() -> None:
    def shared(name: str, **overrides: Any) -> tuple[int, bool]:
        moe = read(name, **overrides).moe
        assert moe is not None
        return moe.shared_intermediate_size, moe.shared_gate

    assert shared("qwen2_moe", shared_expert_intermediate_size=40) == (40, True)
    assert shared("qwen3_moe", shared_expert_intermediate_size=40) == (0, False)
    assert shared("deepseek_moe", n_shared_experts=3, moe_intermediate_size=24) == (72, False)
    assert shared("deepseek_moe", n_shared_experts=None) == (0, False)
    assert shared("deepseek_moe", n_shared_experts=0) == (0, False)


def deepseek(version: int, **values: Any) -> Fields:
    values = FAMILY_GOLDENS[f"deepseek_v{version}"] | values
    return Fields(values, DEEPSEEK_V2_MOE if version == 2 else DEEPSEEK_V3_MOE)


def test_rules_of_deepseek() -> None:
    """KRN-07: V2 takes groups by their best expert and has no bias; V3 by the best two, with sigmoid and a bias."""
    two, three = deepseek_v2_experts(deepseek(2)), deepseek_v3_experts(deepseek(3))
    assert (two.scoring, two.n_group, two.topk_group, two.group_best) == ("softmax", 4, 2, 1)
    assert (two.selection_bias, two.renormalize, two.scaling_factor) == (False, False, 1.5)
    assert (three.scoring, three.n_group, three.topk_group, three.group_best) == ("sigmoid", 4, 2, 2)
    assert (three.selection_bias, three.renormalize) == (True, True)
    greedy = deepseek_v2_experts(deepseek(2, topk_method="greedy", n_group=3))
    assert (greedy.n_group, greedy.topk_group) == (1, 1)  # groups mean nothing then


@pytest.mark.parametrize(
    ("version", "values", "says"),
    [
        (2, {"n_group": 3}, "n_group (3) must divide the number of experts (8)"),
        (2, {"n_group": None}, "n_group is missing"),
        (3, {"topk_group": 5}, "topk_group (5) must be at most n_group (4)"),
        (3, {"topk_group": 1}, "num_experts_per_tok (3) is more than the 2 experts in 1 of 4 groups"),
        (2, {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported; supported is 'greedy' or"),
        (3, {"topk_method": "greedy"}, "topk_method 'greedy' is not supported; supported is 'noaux_tc'"),
        (2, {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid' is not supported; supported is 'softmax'"),
        (3, {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported; supported is 'sigmoid'"),
        (3, {"routed_scaling_factor": 0}, "routed_scaling_factor must be finite and above 0, found 0"),
        (3, {"n_routed_experts": None}, "n_routed_experts is missing"),
    ],
)
def test_what_deepseek_cannot_mean(version: int, values: dict[str, Any], says: str) -> None:
    fields = deepseek(version, **values)
    (deepseek_v2_experts if version == 2 else deepseek_v3_experts)(fields)
    assert len(fields.problems) == 1
    assert says in fields.problems[0]


@pytest.mark.parametrize(
    ("name", "values", "says"),
    [
        ("mixtral", {"num_experts_per_tok": 6}, "num_experts_per_tok (6) is more than the 5 experts"),
        ("mixtral", {"num_local_experts": 0}, "num_local_experts must be an integer of at least 1, found 0"),
        ("mixtral", {"num_local_experts": "5"}, "num_local_experts must be an integer of at least 1, found '5'"),
        ("mixtral", {"num_local_experts": 10**9}, "num_local_experts must be at most 1024"),
        ("qwen2_moe", {"num_experts": None}, "num_experts is missing"),
        ("qwen2_moe", {"moe_intermediate_size": 0}, "moe_intermediate_size must be an integer of at least 1, found 0"),
        ("qwen2_moe", {"shared_expert_intermediate_size": None}, "shared_expert_intermediate_size is missing"),
        ("qwen2_moe", {"norm_topk_prob": 1}, "norm_topk_prob must be true or false, found 1"),
        ("qwen2_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step must be an integer of at least 1, found 0"),
        ("qwen3_moe", {"mlp_only_layers": [3]}, "mlp_only_layers must be a list of layers from 0 to 2, found [3]"),
        ("qwen3_moe", {"mlp_only_layers": 1}, "mlp_only_layers must be a list of layers from 0 to 2, found 1"),
        ("deepseek_moe", {"first_k_dense_replace": -1}, "first_k_dense_replace must be an integer of at least 0"),
        ("deepseek_moe", {"moe_layer_freq": 0}, "moe_layer_freq must be an integer of at least 1, found 0"),
        ("deepseek_moe", {"n_shared_experts": 1.5}, "n_shared_experts must be an integer of at least 0, found 1.5"),
        ("deepseek_moe", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    ],
)
def test_a_wrong_number_is_named(name: str, values: dict[str, Any], says: str) -> None:
    lines = refusal(name, **values).splitlines()
    assert says in lines[1]
    assert len(lines) == 2, "one problem, one line"


def test_ldr_10_all_problems_of_experts_are_listed_at_once() -> None:
    """LDR-10: those of the sizes that all families have too, each once."""
    text = refusal(
        "qwen2_moe", num_hidden_layers=0, vocab_size=0, num_experts=4, num_experts_per_tok=5, norm_topk_prob="yes"
    )
    for part in (
        "num_hidden_layers must be an integer of at least 1, found 0",
        "vocab_size must be",
        "num_experts_per_tok (5) is more than the 4 experts",
        "norm_topk_prob must be true or false, found 'yes'",
    ):
        assert text.count(part) == 1
    assert len(text.splitlines()) == 5


def test_the_summary_counts_experts() -> None:
    assert "; 6 experts in 1 of 3 layers, 3 a token; rope default" in summary(read("qwen2_moe"))
