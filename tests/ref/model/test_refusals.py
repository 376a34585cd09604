"""What config.json may not say, family by family: each is refused with the key, what was found and what is known."""

from typing import Any

import pytest

from conformance.golden_families import FAMILY_GOLDENS
from ref.config import parse_config
from ref.model.minicpm import MiniCPM3Config
from ref.model.registry import FAMILIES, forward


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "qwen2",
            {"architectures": ["Qwen9ForCausalLM"]},
            "architecture 'Qwen9ForCausalLM' is not supported; ref knows",
        ),
        ("qwen2", {"rope_scaling": {"type": "mrope"}}, "rope type 'mrope' is not supported; ref knows default, linear"),
        ("qwen2", {"rope_scaling": {"rope_type": "default", "type": "mrope"}}, "rope type 'mrope' is not supported"),
        ("qwen2", {"rope_scaling": {"rope_type": "default", "mrope_section": [2, 2, 2]}}, "rope type 'mrope' is not"),
        ("qwen2", {"rope_parameters": {"rope_type": "default", "mrope_section": [4]}}, "rope type 'mrope' is not"),
        ("qwen2", {"rope_scaling": {"rope_type": "linear", "type": "dynamic", "factor": 2.0}}, "but type is 'dynamic'"),
        ("qwen2", {"rope_parameters": {"sliding_attention": {"rope_theta": 1e4}}}, "rope of its own for sliding_att"),
        ("qwen2", {"rope_scaling": {"type": "yarn"}}, "'yarn' needs a number factor, found None"),
        (
            "qwen2",
            {"num_attention_heads": 5, "num_key_value_heads": 5},
            "hidden_size 48 is no multiple of num_attention",
        ),
        ("qwen2_window", {"layer_types": ["full_attention"]}, "layer_types has 1 entries for 3 layers"),
        ("qwen2_window", {"layer_types": ["chunked"] * 3}, "'chunked'; supported here: 'full_attention', 'sliding_att"),
        ("qwen2_window", {"sliding_window": 0}, "sliding_window must be a positive integer, found 0"),
        ("qwen2_moe", {"num_experts": None}, "num_local_experts must be a positive integer, found None"),
        ("qwen2_moe", {"shared_expert_intermediate_size": None}, "shared_expert_intermediate_size must be"),
        ("mixtral", {"num_local_experts": "8"}, "num_local_experts must be a positive integer, found '8'"),
        ("minicpm", {"scale_depth": None}, "scale_depth must be a number, finite and above 0, found None"),
        ("minicpm", {"dim_model_base": "256"}, "dim_model_base must be a number, .* found '256'"),
        ("command_r", {"logit_scale": True}, "logit_scale must be a number, .* found True"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'; supported here: 'greedy', 'group_lim"),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'; supported here: 'softmax'"),
        ("deepseek_v2", {"n_group": None}, "n_group must be a positive integer, found None"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method is 'greedy'; supported here: 'noaux_tc'"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads is 2; with latent attention it must be"),
        ("deepseek_v3", {"n_group": 3}, "n_group 3 must divide the 8 experts"),
        ("deepseek_v3", {"topk_group": 9}, "topk_group 9 must be at most n_group"),
        ("deepseek_v3", {"num_experts_per_tok": 100}, "num_experts_per_tok 100 must be at most"),
        ("deepseek_v3", {"norm_topk_prob": "yes"}, "norm_topk_prob must be true or false, found 'yes'"),
        ("deepseek_v3", {"first_k_dense_replace": "1"}, "first_k_dense_replace must be a positive integer, found '1'"),
        ("deepseek_v3", {"n_shared_experts": -1}, "n_shared_experts must be a positive integer, found -1"),
        ("mixtral", {"num_experts_per_tok": 99}, "num_experts_per_tok 99 must be at most"),
        ("qwen3_moe", {"mlp_only_layers": "0"}, "mlp_only_layers must be a list of layers, found '0'"),
        ("cpm1", {"scale_attn_weights": False}, "scale_attn_weights false is not supported"),
        ("qwen1", {"scale_attn_weights": False}, "scale_attn_weights false is not supported"),
        ("deepseek_v3", {"kv_lora_rank": None}, "kv_lora_rank must be a positive integer, found None"),
    ],
)
def test_refused(name: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_config({**FAMILY_GOLDENS[name], **change})


@pytest.mark.parametrize("name", FAMILY_GOLDENS)
def test_an_activation_that_is_not_known_is_refused(name: str) -> None:
    """CPM-Ant and Qwen 1 have no such key: their code says gelu and silu."""
    key = "activation_function" if name == "cpm1" else "hidden_act"
    config = {**FAMILY_GOLDENS[name], key: "swoosh"}
    if name in ("cpm_ant", "qwen1"):
        parse_config(config)
        return
    with pytest.raises(ValueError, match=f"{key} is 'swoosh'; supported here: '"):
        parse_config(config)


def test_the_refusal_of_an_architecture_names_all_that_are_known() -> None:
    with pytest.raises(ValueError) as error:
        parse_config({"architectures": ["BertModel"]})
    assert all(name in str(error.value) for name in FAMILIES)


def test_a_family_without_its_weights_names_the_first() -> None:
    for config in FAMILY_GOLDENS.values():
        with pytest.raises(ValueError, match=r"the checkpoint has no tensor .*; config\.json asks for one of shape \["):
            forward(parse_config(config), {}, [5])


def test_every_architecture_but_renamed_ones_has_a_golden() -> None:
    covered = {config["architectures"][0] for config in FAMILY_GOLDENS.values()}
    llama = {"LlamaForCausalLM", "MistralForCausalLM"}  # conformance.golden_models
    renamed = {"DeepseekVLForConditionalGeneration", "MultiModalityCausalLM"}  # test_families
    assert covered | llama | renamed == set(FAMILIES)


def test_values_of_minicpm3_are_as_wide_as_a_share_of_the_hidden_state_unless_said_otherwise() -> None:
    """48 / 4 heads, where the golden says 10."""
    config = parse_config({**FAMILY_GOLDENS["minicpm3"], "v_head_dim": None})
    assert isinstance(config, MiniCPM3Config)
    assert config.v_head_dim == 12
