"""engine.model_config.mla: latent attention as published configs have it, and what is refused (KRN-03, LDR-10)."""

import math
from dataclasses import asdict
from typing import Any

import pytest

from conformance.golden_families import FAMILY_GOLDENS
from conformance.golden_models import config_v5
from engine.config import MlaConfig, ModelConfig
from engine.errors import ConfigError
from engine.model_config.read import model_config_from_hf, summary
from ref.config import parse_config
from ref.mla import mla_sm_scale

FAMILIES = ("deepseek_v2_lite", "deepseek_v2", "deepseek_v3", "minicpm3")
SIZES = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
PUBLISHED: dict[str, dict[str, Any]] = {  # what matters here of each config.json
    "deepseek_v3": {
        **{"hidden_size": 7168, "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536},
        **{"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
        "max_position_embeddings": 163840,
        "rope_scaling": {
            **{"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0},
            **{"original_max_position_embeddings": 4096, "type": "yarn"},
        },
    },
    "deepseek_v2_lite": {
        **{"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None},
        **{"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
        "max_position_embeddings": 163840,
        "rope_scaling": {
            **{"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707},
            **{"original_max_position_embeddings": 4096, "type": "yarn"},
        },
    },
    "minicpm3": {
        **{"hidden_size": 2560, "num_attention_heads": 40, "num_key_value_heads": 40, "q_lora_rank": 768},
        **{"kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": None},
        "max_position_embeddings": 32768,
        "rope_scaling": {
            **{"type": "longrope", "long_factor": [1.0] * 16, "short_factor": [1.0] * 16},
            "original_max_position_embeddings": 32768,
        },
    },
}


def read(name: str, **overrides: Any) -> ModelConfig:
    return model_config_from_hf(FAMILY_GOLDENS[name] | overrides, None, "config.json")


def refusal(name: str, **overrides: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read(name, **overrides)
    return str(caught.value)


def latent(config: ModelConfig) -> MlaConfig:
    assert config.mla is not None
    return config.mla


@pytest.mark.parametrize("name", FAMILIES)
def test_both_forms_mean_what_they_mean_to_ref(name: str) -> None:
    config = FAMILY_GOLDENS[name]
    # transformers 5 writes head_dim too, the part that rotates, and the whole head's as qk_head_dim
    new = config_v5(config) | {"head_dim": config["qk_rope_head_dim"], "qk_head_dim": 20}
    found, wanted = read(name), parse_config(config)
    assert model_config_from_hf(new, None, "config.json") == found
    assert {key: getattr(latent(found), key) for key in SIZES} == {key: getattr(wanted, key) for key in SIZES}
    assert latent(found).sm_scale == mla_sm_scale(20, wanted.rope.factor, wanted.rope.mscale_all_dim)
    assert latent(found).eps == 1e-6
    for key in ("n_heads", "head_dim", "norm_eps", "embedding_scale", "residual_scale", "logit_scale"):
        assert getattr(found, key) == getattr(wanted, key)
    assert found.rope_interleaved == getattr(wanted, "interleaved", False)
    assert found.n_mtp_layers == getattr(wanted, "n_mtp_layers", 0)
    assert (found.rotary_dim, found.rope.kind) == (8, wanted.rope.kind)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name: str) -> None:
    found, given = read(name, **PUBLISHED[name]), PUBLISHED[name]
    nope, rotated = given["qk_nope_head_dim"], given["qk_rope_head_dim"]
    assert (found.head_dim, found.rotary_dim, found.n_kv_heads) == (nope + rotated, rotated, found.n_heads)
    v_head_dim = given["v_head_dim"] or given["hidden_size"] // given["num_attention_heads"]
    assert {**asdict(latent(found)), "v_head_dim": given["v_head_dim"]}.items() >= {
        key: given[key] for key in SIZES
    }.items()
    assert latent(found).v_head_dim == v_head_dim
    width = given["kv_lora_rank"] + rotated
    assert f"{found.n_heads} heads of {nope + rotated}, latents of {width}" in summary(found)


def test_krn_03_scale_of_scores() -> None:
    """KRN-03: DeepSeek's scores are scaled by m(mscale_all_dim)² more, m(s) = 0.1 · s · ln(40) + 1; MiniCPM3's not."""
    for name, mscale in (("deepseek_v2_lite", 0.707), ("deepseek_v3", 1.0)):
        expected = (0.1 * mscale * math.log(40) + 1) ** 2 / math.sqrt(192)
        assert latent(read(name, **PUBLISHED[name])).sm_scale == pytest.approx(expected, rel=1e-15)
    assert latent(read("minicpm3", **PUBLISHED["minicpm3"])).sm_scale == pytest.approx(96**-0.5, rel=1e-15)
    assert latent(read("deepseek_v3", rope_scaling=None)).sm_scale == pytest.approx(20**-0.5, rel=1e-15)


def test_what_is_absent() -> None:
    config = {key: value for key, value in FAMILY_GOLDENS["deepseek_v3"].items() if key != "num_key_value_heads"}
    for key in ("q_lora_rank", "attention_bias", "num_nextn_predict_layers", "rope_scaling"):
        del config[key]
    found = model_config_from_hf(config, None, "config.json")
    assert (latent(found).q_lora_rank, found.n_kv_heads, found.qkv_bias, found.n_mtp_layers) == (None, 4, False, 0)
    assert found.rope_interleaved
    assert not read("deepseek_v3", rope_interleave=False).rope_interleaved
    biased = read("deepseek_v2", attention_bias=True)
    assert (biased.qkv_bias, biased.o_bias, biased.mlp_bias) == (True, True, False)


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        (
            "deepseek_v3",
            {"num_key_value_heads": 2},
            "num_key_value_heads is 2; with latent attention it must be num_att",
        ),
        ("deepseek_v2", {"kv_lora_rank": None}, "kv_lora_rank is missing"),
        ("deepseek_v2", {"kv_lora_rank": 0}, "kv_lora_rank must be an integer of at least 1, found 0"),
        ("deepseek_v2", {"q_lora_rank": "24"}, "q_lora_rank must be an integer of at least 1, found '24'"),
        ("deepseek_v2", {"qk_rope_head_dim": None}, "qk_rope_head_dim is missing"),
        ("deepseek_v2", {"qk_rope_head_dim": 7}, "qk_rope_head_dim is 7; rotary position embedding needs an even one"),
        ("deepseek_v2", {"qk_nope_head_dim": 10**9}, "qk_nope_head_dim must be at most"),
        ("deepseek_v2", {"v_head_dim": None}, "v_head_dim is missing"),
        ("deepseek_v2", {"v_head_dim": 21}, "v_head_dim (21) is above qk_nope_head_dim + qk_rope_head_dim (20)"),
        ("deepseek_v2", {"rope_interleave": "no"}, "rope_interleave must be true or false, found 'no'"),
        ("deepseek_v3", {"num_nextn_predict_layers": -1}, "num_nextn_predict_layers must be an integer of at least 0"),
        ("deepseek_v3", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ("minicpm3", {"scale_emb": None}, "scale_emb is missing"),
        ("minicpm3", {"hidden_size": None}, "hidden_size is missing"),
        ("minicpm3", {"num_attention_heads": 0}, "num_attention_heads must be an integer of at least 1, found 0"),
    ],
)
def test_ldr_10_what_is_missing_or_contradictory_is_refused(name: str, change: dict[str, Any], says: str) -> None:
    """LDR-10: by name, with what was found."""
    assert says in refusal(name, **change)


def test_a_longrope_list_is_as_long_as_what_rotates() -> None:
    scaling = FAMILY_GOLDENS["minicpm3"]["rope_scaling"] | {"long_factor": [1.0] * 10}
    assert "long_factor of rope_type 'longrope' must be a list of 4 numbers" in refusal(
        "minicpm3", rope_scaling=scaling
    )


def test_a_problem_is_told_once() -> None:
    text = refusal("deepseek_v2", rope_scaling={"type": "yarn", "factor": "4", "mscale": 1.0, "mscale_all_dim": 1.0})
    assert text.count("factor of rope_type 'yarn' must be a number, found '4'") == 1
