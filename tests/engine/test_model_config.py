"""engine.model_config: every spelling of config.json has one meaning, and what has none is refused by name (LDR-08)."""

import json
from typing import Any

import numpy as np
import pytest

from conformance.golden_models import config_v5, llama_config
from conformance.rope_table import frequency_arguments
from engine.config import RopeConfig
from engine.errors import ConfigError
from engine.model_config.read import model_config_from_hf, summary
from ref.rope import rope_cos_sin, rope_inv_freq

LINEAR = {"type": "linear", "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def read(generation_config: dict[str, Any] | None = None, **overrides: Any):
    return model_config_from_hf(llama_config(**overrides), generation_config, "config.json")


def refusal(generation_config: dict[str, Any] | None = None, **overrides: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read(generation_config, **overrides)
    assert "config.json" in str(caught.value)
    return str(caught.value)


def without(key: str) -> dict[str, Any]:
    config = llama_config()
    del config[key]
    return config


def test_sizes_and_constants():
    config = read(num_hidden_layers=3, head_dim=48, attention_bias=True, torch_dtype="bfloat16", sliding_window=7)
    assert (config.n_layers, config.n_heads, config.n_kv_heads, config.head_dim) == (3, 4, 2, 48)
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (128, 256, 1000)
    assert (config.norm_eps, config.max_position_embeddings, config.dtype) == (1e-5, 2048, "bfloat16")
    assert (config.qkv_bias, config.o_bias) == (True, True)
    assert not config.mlp_bias
    assert config.windows == (None,) * 3  # Llama has none, whatever its config.json says


def test_what_is_absent_or_null_follows_transformers():
    config = llama_config(head_dim=None)
    for key in (
        "num_key_value_heads",
        "tie_word_embeddings",
        "attention_bias",
        "mlp_bias",
        "rope_theta",
        "torch_dtype",
    ):
        del config[key]
    read_config = model_config_from_hf(config, None, "config.json")
    assert (read_config.n_kv_heads, read_config.head_dim) == (4, 32)
    assert (read_config.tie_word_embeddings, read_config.qkv_bias, read_config.mlp_bias) == (False,) * 3
    assert read_config.rope == RopeConfig("default", 10000.0)
    assert read_config.dtype == "float32"


def test_mistral_window_and_its_default():
    mistral = {"architectures": ["MistralForCausalLM"]}
    assert set(read(**mistral, sliding_window=64).windows) == {64}
    assert set(read(**mistral, sliding_window=None).windows) == {None}
    assert set(read(**mistral).windows) == {4096}  # transformers' default where the key is absent
    assert "sliding_window must be an integer of at least 1, found 0" in refusal(**mistral, sliding_window=0)


QWEN2: dict[str, Any] = {"architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 3}
QWEN3: dict[str, Any] = {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 3}
WINDOW: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 8}


def test_qwen_biases_and_norms() -> None:
    """Qwen2 has a bias on q, k and v whatever the file says; Qwen3 has norms, and biases only if it says so."""
    two, three = read(**QWEN2), read(**QWEN3)
    assert (two.qkv_bias, two.o_bias, two.qk_norm) == (True, False, False)
    assert (three.qkv_bias, three.o_bias, three.qk_norm) == (False, False, True)
    biased = read(**QWEN3, attention_bias=True)
    assert (biased.qkv_bias, biased.o_bias) == (True, True)
    config = llama_config(**QWEN3)
    assert model_config_from_hf(config, None, "config.json").head_dim == 128  # transformers' default


def test_qwen_windows_by_layer() -> None:
    assert read(**QWEN2, sliding_window=8).windows == (None,) * 3  # off unless use_sliding_window says so
    assert read(**QWEN2, **WINDOW).windows == (None,) * 3  # max_window_layers is 28
    assert read(**QWEN2, **WINDOW, max_window_layers=1).windows == (None, 8, 8)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert read(**QWEN3, **WINDOW, layer_types=kinds).windows == (8, None, 8)
    for wrong in (kinds[:2], ["full", "full", "full"], "full_attention"):
        assert "layer_types must name" in refusal(**QWEN3, **WINDOW, layer_types=wrong)


@pytest.mark.parametrize("scaling", [None, LINEAR, {"type": "dynamic", "factor": 2.0}, LLAMA3])
def test_both_forms_of_config_json_mean_the_same(scaling: dict[str, Any] | None):
    config = llama_config(rope_theta=5e5, rope_scaling=scaling, torch_dtype="float16")
    old = model_config_from_hf(config, None, "config.json")
    new = model_config_from_hf(config_v5(config), None, "config.json")
    assert old == new
    assert old.rope.theta == 5e5
    assert old.rope.kind == ("default" if scaling is None else scaling.get("type", scaling.get("rope_type")))


def test_ldr_08_equal_meanings_give_the_same_table():
    """LDR-08: base at top level or inside, kind as type or rope_type or both."""
    spellings = [
        {"rope_theta": 5e5, "rope_scaling": LINEAR},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 4}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 4.0}},
        {"rope_theta": None, "rope_scaling": None, "rope_parameters": {"rope_theta": 5e5, **LINEAR}},
        {"rope_theta": 5e5, "rope_scaling": None, "rope_parameters": LINEAR},
        {"rope_theta": 5e5, "rope_scaling": LINEAR, "rope_parameters": {"rope_theta": 5e5, **LINEAR}},
    ]
    tables = []
    for spelling in spellings:
        config = read(**spelling)
        assert config.rope == RopeConfig("linear", 5e5, 4.0)
        inv_freq = rope_inv_freq(head_dim=config.head_dim, **frequency_arguments(config.rope))
        tables.append(rope_cos_sin(inv_freq, np.arange(8)))
    assert all(np.array_equal(table, tables[0]) for table in tables)
    # at factor 4 position 4 turns the first pair by one radian
    np.testing.assert_allclose(np.arccos(np.ravel(tables[0][4])[0]), 1.0, rtol=1e-6)


@pytest.mark.parametrize(
    ("scaling", "says"),
    [
        ({"type": "linear", "rope_type": "dynamic", "factor": 2.0}, "rope type is 'linear' but rope_type is 'dynamic'"),
        ({"rope_type": "made_up", "factor": 2.0}, "'made_up' is not supported; supported are default, linear"),
        ({"rope_type": "mrope", "factor": 2.0}, "'mrope' is not supported"),
        ({"rope_type": "default", "mrope_section": [8, 12, 12]}, "does not take mrope_section"),
        ({"type": "linear"}, "factor of rope_type 'linear' is missing"),
        ({"type": "linear", "factor": None}, "factor of rope_type 'linear' is missing"),
        ({"type": "linear", "factor": "4"}, "factor of rope_type 'linear' must be a number, found '4'"),
        ({"type": "linear", "factor": True}, "factor of rope_type 'linear' must be a number, found True"),
        ({"type": "linear", "factor": 0.5}, "must be at least 1, found 0.5"),
        ({"type": "linear", "factor": 4.0, "attention_factor": 2.0}, "does not take attention_factor"),
        ({"factor": 4.0}, "rope_type is missing beside factor"),
        ("linear", "rope_scaling must be an object, found 'linear'"),
        ({**LLAMA3, "original_max_position_embeddings": None}, "original_max_position_embeddings is missing"),
        ({**LLAMA3, "original_max_position_embeddings": 32.5}, "must be an integer of at least 1, found 32.5"),
        ({**LLAMA3, "high_freq_factor": None}, "high_freq_factor of rope_type 'llama3' is missing"),
        ({**LLAMA3, "low_freq_factor": 4.0}, "low_freq_factor must be below high_freq_factor"),
    ],
)
def test_ldr_08_unknown_or_incomplete_scaling_is_refused(scaling: Any, says: str):
    """LDR-08: nothing about rope is guessed. KRN-05: nor are positions on several axes taken for plain ones."""
    assert says in refusal(rope_scaling=scaling)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 1e4}}},
            "rope_parameters has a table for each layer type (full_attention, sliding_attention)",
        ),
        (
            {"rope_parameters": {"rope_theta": 5e5}},
            "rope_theta is 10000.0 in one place and 500000.0 in rope_parameters",
        ),
        ({"rope_theta": "10000"}, "rope_theta must be a number, found '10000'"),
        ({"rope_theta": -1.0}, "rope_theta must be finite and above 0, found -1.0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5 is not supported"),
    ],
)
def test_ldr_08_contradictions_and_layer_types_are_refused(keys: dict[str, Any], says: str):
    """LDR-08: a base said twice in two ways, a table a layer type."""
    assert says in refusal(**keys)


def test_ldr_08_the_summary_shows_what_was_understood():
    """LDR-08: base, kind, factor, original length and limit are printed at start."""
    text = summary(read(rope_theta=5e5, rope_scaling=LLAMA3))
    assert "rope llama3, base 500000, factor 8, original length 32, limit 2048" in text
    assert "rope default, base 10000, limit 2048" in summary(read())


def test_dynamic_ntk_begins_at_the_limit_of_the_config():
    rope = read(rope_scaling={"type": "dynamic", "factor": 2.0}, max_position_embeddings=32).rope
    assert rope == RopeConfig("dynamic", 10000.0, 2.0, original_max_position_embeddings=32)


def test_unknown_architecture_is_named_with_the_known_ones():
    text = refusal(architectures=["BloomForCausalLM"])
    assert "BloomForCausalLM" in text
    assert "LlamaForCausalLM, MistralForCausalLM" in text
    for wrong in (None, [], "LlamaForCausalLM", [7], ["LlamaForCausalLM", "X"]):
        assert "architectures is" in refusal(architectures=wrong)


@pytest.mark.parametrize(
    "key",
    ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
     "max_position_embeddings", "rms_norm_eps"],
)  # fmt: skip
def test_required_keys(key: str):
    with pytest.raises(ConfigError, match=f"{key} is missing"):
        model_config_from_hf(without(key), None, "config.json")
    for wrong in (0, -1, "8", [8]):
        assert f"{key} must be" in refusal(**{key: wrong})


def test_ldr_10_all_problems_are_listed_at_once():
    """LDR-10: a config that cannot be served says everything that is wrong with it."""
    text = refusal(
        vocab_size=0, num_attention_heads=3, num_key_value_heads=2, max_position_embeddings=0, hidden_act="gelu",
        quantization_config={"quant_method": "squeeze", "bits": 4}, rms_norm_eps=float("nan"),
    )  # fmt: skip
    for part in (
        "vocab_size must be an integer of at least 1, found 0",
        "num_attention_heads (3) must be a multiple of num_key_value_heads (2)",
        "hidden_size (128) must be a multiple of num_attention_heads (3)",
        "max_position_embeddings must be an integer of at least 1, found 0",
        "hidden_act 'gelu' is not supported",
        "quant_method 'squeeze'",
        "rms_norm_eps must be finite",
    ):
        assert part in text


def test_odd_head_dim():
    assert "head_dim is 33" in refusal(head_dim=33)
    assert "head_dim is 5" in refusal(hidden_size=20, num_attention_heads=4)


def test_numbers_beyond_a_float_are_refused_not_a_traceback():
    assert "rms_norm_eps must be finite" in refusal(rms_norm_eps=10**400)
    assert "rope_theta must be finite" in refusal(rope_theta=float("inf"))


def test_dtype_names():
    assert read(torch_dtype="torch.bfloat16").dtype == "bfloat16"
    assert read(torch_dtype=None, dtype="float16").dtype == "float16"
    assert "torch_dtype is 'float32' but dtype is 'float16'" in refusal(dtype="float16")
    assert "the dtype 'int8' is not supported" in refusal(torch_dtype="int8")


def test_end_of_sequence_ids_of_both_files_are_united():
    assert read(eos_token_id=2).eos_token_ids == (2,)
    assert read(eos_token_id=None).eos_token_ids == ()
    assert read({"eos_token_id": [7, 2, 9]}, eos_token_id=2).eos_token_ids == (2, 7, 9)
    assert read({}, eos_token_id=[3, 2]).eos_token_ids == (3, 2)


def test_ldr_10_eos_beyond_the_vocabulary():
    """LDR-10: an id that can never be sampled would make every answer run to its limit."""
    assert "eos_token_id 1000 is outside the vocabulary of 1000 ids" in refusal(eos_token_id=1000)
    assert "generation_config.json: eos_token_id 1001" in refusal({"eos_token_id": [2, 1001]})
    assert "eos_token_id -1 is outside" in refusal(eos_token_id=[-1])
    assert "bos_token_id 1000 is outside" in refusal(bos_token_id=1000)
    assert "eos_token_id must be an id or a list of ids, found '2'" in refusal(eos_token_id="2")


SAMPLING = {"temperature": 0.6, "top_k": 50, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2}


def test_sampling_defaults_of_generation_config():
    assert read({**SAMPLING, "do_sample": True, "max_length": 99}).default_sampling == SAMPLING
    assert read(dict(SAMPLING)).default_sampling == SAMPLING
    assert read({**SAMPLING, "top_k": None}).default_sampling == {k: v for k, v in SAMPLING.items() if k != "top_k"}
    assert read({**SAMPLING, "do_sample": False}).default_sampling == {"repetition_penalty": 1.2}
    assert read().default_sampling == {}


def test_sampling_defaults_out_of_range():
    text = refusal({"temperature": -1, "top_p": 1.5})
    assert "generation_config.json: temperature must be" in text
    assert "generation_config.json: top_p must be" in text


def test_config_survives_json():
    """What json gives (lists, ints for floats) is what is read."""
    text = json.dumps(llama_config(rope_theta=10000, rope_scaling={"type": "linear", "factor": 4}))
    assert model_config_from_hf(json.loads(text), None, "config.json").rope == RopeConfig("linear", 10000.0, 4.0)


@pytest.mark.parametrize(
    "key",
    [
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "hidden_size",
        "intermediate_size",
        "vocab_size",
        "max_position_embeddings",
    ],
)
def test_sizes_beyond_all_models_are_refused_by_name(key: str):
    """Before: a weight map of a billion layers, built until memory ran out."""
    for value in (10**9, 10**30):
        assert f"{key} must be at most" in refusal(**{key: value})


def test_windows_of_a_wrong_kind_are_refused_by_name():
    qwen = {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True}
    assert "max_window_layers must be an integer" in refusal(**qwen, max_window_layers="x")
    assert "sliding_window must be at most" in refusal(**qwen, sliding_window=10**30)


def test_token_ids_and_sampling_defaults_that_no_message_can_carry():
    assert "top_k" in refusal({"top_k": 10**30})
    assert "temperature" in refusal({"temperature": 1e300})
    assert "temperature" in refusal({"temperature": 10**400})
