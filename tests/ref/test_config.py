"""ref.config: both forms of config.json give the same, defaults are those of transformers, the rest is refused."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from conformance.golden_models import GOLDENS, config_v5, llama_config
from ref.config import parse_config, read_config
from ref.model.fields import RopeConfig

LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 32,
}


@pytest.mark.parametrize("name", GOLDENS)
def test_both_forms_mean_the_same(name: str) -> None:
    config = llama_config(**GOLDENS[name])
    assert parse_config(config) == parse_config(config_v5(config))


def test_geometry() -> None:
    config = parse_config(llama_config(**GOLDENS["llama3"]))
    assert (config.n_layers, config.n_heads, config.n_kv_heads, config.head_dim) == (2, 4, 2, 16)
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (64, 96, 160)
    assert config.rope == RopeConfig("llama3", 500000.0, 8.0, 1.0, 4.0, 32)
    assert config.tie_word_embeddings
    assert config.eos_token_ids == (2, 3)
    assert config.dtype == "float32"


@pytest.mark.parametrize(("eos", "expected"), [(2, (2,)), ([2, 3], (2, 3)), (None, ())])
def test_end_of_sequence_ids(eos: Any, expected: tuple[int, ...]) -> None:
    assert parse_config(llama_config(eos_token_id=eos)).eos_token_ids == expected


def test_missing_keys_take_the_defaults_of_transformers() -> None:
    config = llama_config()
    for key in ("num_key_value_heads", "rms_norm_eps", "rope_theta", "rope_scaling", "max_position_embeddings"):
        del config[key]
    llama = parse_config(config)
    assert (llama.n_kv_heads, llama.norm_eps, llama.rope.theta) == (4, 1e-6, 10000.0)
    assert llama.max_position_embeddings == 2048
    mistral = parse_config(config | {"architectures": ["MistralForCausalLM"], "num_attention_heads": 8})
    assert (mistral.n_kv_heads, mistral.sliding_window, mistral.max_position_embeddings) == (8, 4096, 131072)


def test_null_key_value_heads_are_as_many_as_heads() -> None:
    mistral = {"architectures": ["MistralForCausalLM"], "num_attention_heads": 16}
    assert parse_config(llama_config(num_key_value_heads=None, **mistral)).n_kv_heads == 16


@pytest.mark.parametrize("architecture", ["CohereForCausalLM", "MixtralForCausalLM"])
def test_a_base_in_rope_parameters_stands_above_the_default_of_the_family(architecture: str) -> None:
    config = llama_config(architectures=[architecture])
    del config["rope_theta"]
    assert parse_config(config | {"rope_parameters": {"rope_theta": 12345.0}}).rope.theta == 12345.0
    assert parse_config(config).rope.theta == {"CohereForCausalLM": 500000.0}.get(architecture, 1e6)


def test_the_window_belongs_to_mistral_alone() -> None:
    assert parse_config(llama_config(sliding_window=8)).sliding_window is None
    mistral = {"architectures": ["MistralForCausalLM"]}
    assert parse_config(llama_config(sliding_window=8, **mistral)).sliding_window == 8
    assert parse_config(llama_config(sliding_window=None, **mistral)).sliding_window is None


def test_dynamic_scales_from_max_position_embeddings() -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 7}
    assert parse_config(llama_config(rope_scaling=scaling)).rope.original_max_position_embeddings == 2048


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"rope_scaling": {"rope_type": "mrope", "factor": 2.0}}, "rope type 'mrope' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "'linear' needs a number factor, found None"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "'llama3' needs a number low_freq_factor"),
        ({"architectures": ["BertModel"]}, "architecture 'BertModel' is not supported"),
        ({"architectures": None}, "architectures must be a list of one name, found None"),
        ({"architectures": ["LlamaForCausalLM", "Other"]}, "architectures must be a list of one name"),
        ({"rope_scaling": {"factor": 2.0}}, "rope_type is missing beside factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0.0}}, "factor must be a number, finite and above 0, found 0.0"),
        ({"rope_scaling": {"type": "linear", "factor": math.nan}}, "factor must be .* found nan"),
        ({"rope_scaling": [2.0]}, "rope_scaling must be an object"),
        (
            {"rope_theta": 5e5, "rope_parameters": {"rope_theta": 1e4}},
            "rope_theta is 500000.0 in one place and 10000.0",
        ),
        (
            {"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}},
            "low_freq_factor 4.0 must be below high_freq_factor 4.0",
        ),
        ({"rope_theta": -1.0}, "rope_theta must be a number, finite and above 0, found -1.0"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps must be a number, finite and above 0, found '1e-5'"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false, found 'no'"),
        ({"attention_bias": "no"}, "attention_bias must be true or false, found 'no'"),
        ({"num_hidden_layers": 2**40}, "num_hidden_layers must be at most 4096, found 1099511627776"),
        ({"quantization_config": "awq"}, "quantization_config must be an object, found 'awq'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "'yarn' needs a number factor, found None"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"num_hidden_layers": None}, "num_hidden_layers must be a positive integer, found None"),
        ({"vocab_size": 0}, "vocab_size must be a positive integer, found 0"),
        ({"hidden_size": "64"}, "hidden_size must be a positive integer, found '64'"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple of num_key_value_heads 3"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_what_cannot_be_honoured_is_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_config(llama_config(**overrides))


def test_read_config_takes_a_folder_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(llama_config()))
    assert read_config(tmp_path) == read_config(tmp_path / "config.json") == parse_config(llama_config())


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_a_broken_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json"):
        read_config(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_config(tmp_path / "absent.json")
