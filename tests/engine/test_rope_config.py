"""engine.model_config.rope: yarn and longrope as published checkpoints spell them, and what is refused (LDR-08)."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from conformance.golden_families import FAMILY_GOLDENS, family_tensors
from conformance.golden_models import config_v5, llama_config, write_checkpoint
from engine.build import build_engine
from engine.config import EngineConfig, RopeConfig
from engine.errors import ConfigError
from engine.model_config.read import model_config_from_hf, summary
from ref.config import parse_config

QWEN_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
DEEPSEEK_V2 = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
DEEPSEEK_V3 = {**DEEPSEEK_V2, "mscale": 1.0, "mscale_all_dim": 1.0}
LONGROPE = {  # of heads of 32
    "type": "longrope",
    "short_factor": [1 + i / 16 for i in range(16)],
    "long_factor": [2 + i for i in range(16)],
    "original_max_position_embeddings": 512,
}


def read(scaling: dict[str, Any], **overrides: Any) -> RopeConfig:
    return model_config_from_hf(llama_config(rope_scaling=scaling, **overrides), None, "config.json").rope


def refusal(scaling: dict[str, Any], **overrides: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read(scaling, **overrides)
    return str(caught.value)


def without(scaling: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in scaling.items() if key not in keys}


@pytest.mark.parametrize(
    "scaling",
    [
        QWEN_YARN,
        {**QWEN_YARN, "truncate": False, "beta_fast": 24, "beta_slow": 2.0},
        {**QWEN_YARN, "attention_factor": 1.25, "finetuned": True},
        {**QWEN_YARN, "beta_fast": None, "attention_factor": None},
        DEEPSEEK_V2,
        DEEPSEEK_V3,
        {**DEEPSEEK_V3, "mscale": 0.5},
        {**DEEPSEEK_V3, "beta_fast": 1.0, "beta_slow": 1.0},  # a step in place of a slope, as a V3 of others has it
        LONGROPE,
        {**LONGROPE, "attention_factor": 1.5},
        {**LONGROPE, "factor": 32.0},
        {**LONGROPE, "original_max_position_embeddings": 2048},
    ],
)
def test_both_forms_mean_what_they_mean_to_ref(scaling: dict[str, Any]) -> None:
    config = llama_config(rope_scaling=scaling)
    rope = model_config_from_hf(config, None, "config.json").rope
    assert model_config_from_hf(config_v5(config), None, "config.json").rope == rope
    expected, found = asdict(parse_config(config).rope), asdict(rope)
    factor = found.pop("attention_factor")
    assert factor == pytest.approx(expected["attention_factor"], rel=1e-15)
    assert found == {key: expected[key] for key in found}


def test_krn_03_attention_factors() -> None:
    """KRN-03: m(mscale) / m(mscale_all_dim) with m(s) = 0.1 · s · ln(factor) + 1; with neither key, Qwen's m(1)."""
    assert read(QWEN_YARN).attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    assert read(DEEPSEEK_V2).attention_factor == read(DEEPSEEK_V3).attention_factor == 1.0
    quotient = (0.1 * math.log(40) + 1) / (0.05 * math.log(40) + 1)
    assert read({**DEEPSEEK_V3, "mscale_all_dim": 0.5}).attention_factor == pytest.approx(quotient)
    assert read({**DEEPSEEK_V3, "attention_factor": 2.0}).attention_factor == 2.0


def test_krn_10_factors_of_longrope() -> None:
    """KRN-10: sqrt(1 + ln(max / original) / ln(original)), or the factor of the config; the log says which list."""
    assert read(LONGROPE).attention_factor == pytest.approx(math.sqrt(1 + math.log(4) / math.log(512)))
    assert read({**LONGROPE, "factor": 32}).attention_factor == pytest.approx(math.sqrt(1 + 5 / 9))  # 2^5 and 2^9
    beside = read(without(LONGROPE, "original_max_position_embeddings"), original_max_position_embeddings=512)
    assert beside == read(LONGROPE)
    config = model_config_from_hf(llama_config(rope_scaling=LONGROPE), None, "config.json")
    assert "original length 512 (prompts up to it use the short factors" in summary(config)


@pytest.mark.parametrize(
    ("scaling", "says"),
    [
        (without(QWEN_YARN, "factor"), "factor of rope_type 'yarn' is missing"),
        (without(QWEN_YARN, "original_max_position_embeddings"), "original_max_position_embeddings is missing"),
        ({**QWEN_YARN, "factor": 0.5}, "factor of rope_type 'yarn' must be at least 1"),
        ({**QWEN_YARN, "attn_factor": 1.0}, "rope_type 'yarn' does not take attn_factor"),
        ({**QWEN_YARN, "mscale": 0.7}, "mscale of rope_type 'yarn' is there alone"),
        ({**QWEN_YARN, "mscale_all_dim": 0.7}, "mscale_all_dim of rope_type 'yarn' is there alone"),
        ({**QWEN_YARN, "beta_fast": 1, "beta_slow": 2}, "beta_fast (1) must be at least beta_slow (2)"),
        ({**QWEN_YARN, "beta_slow": "1"}, "beta_slow of rope_type 'yarn' must be a number, found '1'"),
        ({**QWEN_YARN, "truncate": 1}, "truncate of rope_type 'yarn' must be true or false, found 1"),
        ({**QWEN_YARN, "attention_factor": 0}, "attention_factor of rope_type 'yarn' must be finite and above 0"),
        ({**QWEN_YARN, "short_factor": [1.0]}, "rope_type 'yarn' does not take short_factor"),
        (without(LONGROPE, "long_factor"), "long_factor of rope_type 'longrope' is missing"),
        (
            {**LONGROPE, "short_factor": [1.0] * 15},
            "must be a list of 16 numbers, one for each pair that rotates, foun",
        ),
        ({**LONGROPE, "short_factor": 1.0}, "must be a list of 16 numbers, one for each pair that rotates, found 1.0"),
        ({**LONGROPE, "long_factor": [1.0] * 15 + [0]}, "must hold numbers, finite and above 0, found 0"),
        ({**LONGROPE, "long_factor": [1.0] * 15 + [True]}, "must hold numbers, finite and above 0, found True"),
        ({**LONGROPE, "original_max_position_embeddings": 1}, "must be at least 2, found 1"),
        ({**LONGROPE, "original_max_position_embeddings": 4096}, "(4096) is above max_position_embeddings (2048)"),
        ({**LONGROPE, "short_mscale": 1.1}, "rope_type 'longrope' does not take short_mscale"),
        (without(LONGROPE, "original_max_position_embeddings"), "original_max_position_embeddings is missing"),
    ],
)
def test_ldr_08_what_is_missing_or_contradictory_is_refused(scaling: dict[str, Any], says: str) -> None:
    """LDR-08: nothing about rope is guessed."""
    assert says in refusal(scaling)


def test_an_original_length_in_two_places_must_be_the_same() -> None:
    assert "is 64 in one place and 512 in rope_scaling" in refusal(LONGROPE, original_max_position_embeddings=64)
    assert "rope_theta must be above 1 with rope_type 'yarn'" in refusal(QWEN_YARN, rope_theta=1.0)


@pytest.mark.parametrize("positions", [16, 64, 100])
def test_yarn_reaches_as_far_as_its_own_numbers_say(tmp_path: Path, positions: int) -> None:
    """4 · 16, whether max_position_embeddings is the length before the stretching (Qwen) or after it (DeepSeek)."""
    config = {**FAMILY_GOLDENS["qwen2_yarn"], "max_position_embeddings": positions}
    folder = write_checkpoint(tmp_path, config, family_tensors(config, 0))
    assert build_engine(EngineConfig(model=str(folder)), progress=False).info.max_model_len == 64
    with pytest.raises(ConfigError, match=r"--max-model-len 65: the checkpoint's positions end at 64"):
        build_engine(EngineConfig(model=str(folder), max_model_len=65), progress=False)
