"""Every family beside Llama against the stored logits of transformers, and what each of them refuses."""

import functools
import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import conformance.golden_families as families
from conformance.golden_families import FAMILY_GOLDENS
from conformance.golden_models import GOLDEN_SEED, config_v5, llama_config, llama_tensors
from ref.checkpoint import read_checkpoint
from ref.config import parse_config, read_config
from ref.generate import forward_chunk, generate
from ref.model.cache import Cache
from ref.model.deepseek import DeepseekConfig
from ref.model.deepseek_mtp import deepseek_mtp
from ref.model.fields import ModelConfig
from ref.model.registry import forward
from ref.numerics import relative_error

FOLDER = Path(families.__file__).parent / "golden"
MANIFEST = json.loads((FOLDER / "manifest.json").read_text())["models"]
TOLERANCE = 1e-5  # as in tests/ref/test_golden.py


def golden(name: str) -> dict[str, np.ndarray]:
    with np.load(FOLDER / f"{name}.npz") as file:
        return dict(file)


@functools.cache
def model(name: str) -> tuple[ModelConfig, dict[str, np.ndarray], str]:
    """Config, float64 weights and sha256 of a golden checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        families.family_model(folder, name)
        digest = hashlib.sha256((Path(folder) / "model.safetensors").read_bytes()).hexdigest()
        return read_config(folder), read_checkpoint(folder, np.float64), digest


@pytest.mark.parametrize("name", FAMILY_GOLDENS)
def test_checkpoint_and_file_are_those_of_the_manifest(name: str) -> None:
    file = FOLDER / f"{name}.npz"
    assert hashlib.sha256(file.read_bytes()).hexdigest() == MANIFEST[name]["sha256"]
    assert model(name)[2] == MANIFEST[name]["checkpoint_sha256"]


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("name", FAMILY_GOLDENS)
def test_logits(name: str, dtype: type) -> None:
    config, weights, _ = model(name)
    weights = {key: weight.astype(dtype) for key, weight in weights.items()}
    for i, prompt in enumerate(families.family_prompts(name)):
        logits, expected = forward(config, weights, prompt), golden(name)[f"logits{i}"]
        assert logits.dtype == dtype
        assert logits.shape == expected.shape
        assert relative_error(logits, expected) <= TOLERANCE


@pytest.mark.parametrize("name", FAMILY_GOLDENS)
def test_outputs_of_every_layer(name: str) -> None:
    """After attention, after the MLP, the residual stream, what is cached, and who was chosen; of the first prompt."""
    config, weights, _ = model(name)
    seen: dict[str, np.ndarray] = {}
    forward(config, weights, families.family_prompts(name)[0], trace=seen.__setitem__)
    for key in [key for key in seen if key.endswith("expert_ids")]:  # layers.N.mlp.expert_ids, or of block_sparse_moe
        seen[f"layers.{key.split('.')[1]}.expert_ids"] = np.sort(seen[key])
    stored = {key: array for key, array in golden(name).items() if key.startswith("layers.")}
    assert {key.split(".")[1] for key in stored} == {str(layer) for layer in range(config.n_layers)}
    for key, expected in stored.items():
        if key.endswith("expert_ids"):
            np.testing.assert_array_equal(seen[key], expected, err_msg=key)
        else:
            assert relative_error(seen[key], expected) <= TOLERANCE, key


@pytest.mark.parametrize("name", [name for name in FAMILY_GOLDENS if name not in families.CHANGES_UNDER_WAY])
def test_greedy_ids_through_the_paged_cache(name: str) -> None:
    config, weights, _ = model(name)
    for i, prompt in enumerate(families.family_prompts(name)):
        new_ids = generate(config, weights, prompt, 16, ignore_eos=True, block_size=3)
        logits = forward(config, weights, prompt + new_ids)[len(prompt) - 1 : -1]
        best_two = np.sort(logits, axis=-1)[:, -2:]
        assert (best_two[:, 1] - best_two[:, 0]).min() > 1e-3, "a near tie: choose another prompt for the golden"
        assert new_ids == golden(name)[f"greedy{i}"].tolist()


@pytest.mark.parametrize("name", [name for name in FAMILY_GOLDENS if name != "cpm_ant"])
def test_chunks_give_the_logits_of_the_whole(name: str) -> None:
    """Two chunks and a token alone between them: latents are expanded for chunks, absorbed for the token."""
    config, weights, _ = model(name)
    prompt = families.family_prompts(name)[1]
    cache = Cache(len(prompt), 4, table_tokens=len(prompt))
    chunks = [prompt[:9], prompt[9:10], prompt[10:]]
    logits = np.concatenate([forward_chunk(config, weights, chunk, cache) for chunk in chunks])
    # float64 end to end: two orders of summation differ by far less than this
    np.testing.assert_allclose(logits, forward(config, weights, prompt), rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", [name for name, config in FAMILY_GOLDENS.items() if "rope_scaling" in config])
def test_both_forms_of_the_config_mean_the_same(name: str) -> None:
    assert parse_config(config_v5(FAMILY_GOLDENS[name])) == parse_config(FAMILY_GOLDENS[name])


@pytest.mark.parametrize("name", [name for name, config in FAMILY_GOLDENS.items() if "rope_scaling" in config])
def test_an_unknown_activation_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"hidden_act is 'mish'; supported here: 'silu'"):
        parse_config({**FAMILY_GOLDENS[name], "hidden_act": "mish"})


@pytest.mark.parametrize("name", FAMILY_GOLDENS)
def test_no_tokens(name: str) -> None:
    config, weights, _ = model(name)
    assert forward(config, weights, []).shape == (0, config.vocab_size)


@pytest.mark.parametrize("name", FAMILY_GOLDENS)
def test_every_layer_shows_what_it_puts_out(name: str) -> None:
    """The same names for all families: python -m ref --layers goes by them."""
    config, weights, _ = model(name)
    seen: dict[str, np.ndarray] = {}
    forward(config, weights, [5, 6, 7], trace=seen.__setitem__)
    for layer in range(config.n_layers):
        total = seen[f"layers.{layer}.residual"] - seen[f"layers.{layer}.attn_out"] * config.residual_scale
        before = total - seen[f"layers.{layer}.mlp_out"] * config.residual_scale
        if layer > 0:
            np.testing.assert_allclose(before, seen[f"layers.{layer - 1}.residual"], rtol=0, atol=1e-9)
    if name != "cpm_ant":  # which caches nothing
        cached = {key.rsplit(".", 1)[1] for key in seen if key.endswith("_cached")}
        assert cached in ({"k_cached", "v_cached"}, {"latent_cached"})


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("qwen2_yarn", {"rope_scaling": None}),
    ("qwen2_yarn", {"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}}),
    ("qwen2_window", {"sliding_window": 9}),
    ("qwen2_window", {"max_window_layers": 2}),
    ("qwen2_window", {"use_sliding_window": False}),
    ("qwen3_bias", {"attention_bias": False}),
    ("mixtral", {"sliding_window": None}),
    ("mixtral", {"num_experts_per_tok": 3}),
    ("qwen2_moe", {"norm_topk_prob": True}),
    ("qwen3_moe", {"norm_topk_prob": False}),
    ("deepseek_moe", {"norm_topk_prob": True}),
    ("deepseek_v2_lite", {"routed_scaling_factor": 1.0}),
    ("deepseek_v2_lite", {"rope_scaling": {**FAMILY_GOLDENS["deepseek_v2"]["rope_scaling"], "mscale_all_dim": 0.9}}),
    ("deepseek_v2", {"topk_method": "greedy"}),
    ("deepseek_v2", {"topk_group": 3}),
    ("deepseek_v3", {"norm_topk_prob": False}),
    ("deepseek_v3", {"n_group": 2}),
    ("deepseek_v3", {"rope_interleave": False}),
    ("qwen1", {"rotary_emb_base": 5000}),
    ("qwen1", {"layer_norm_epsilon": 1e-2}),
    ("cpm1", {"activation_function": "relu"}),
    ("cpm1", {"layer_norm_epsilon": 1e-2}),
    ("cpm_ant", {"position_bias_max_distance": 19}),
    ("cpm_ant", {"prompt_types": 6, "prompt_length": 2}),
    ("command_r", {"logit_scale": 0.125}),
    ("command_r", {"layer_norm_eps": 1e-2}),
    ("command_r_plus", {"use_qk_norm": False}),
    ("minicpm", {"scale_emb": 11}),
    ("minicpm", {"scale_depth": 1.3}),
    ("minicpm", {"dim_model_base": 8}),
    ("minicpm3", {"scale_depth": 1.3}),
    ("minicpm3", {"rope_scaling": {**FAMILY_GOLDENS["minicpm3"]["rope_scaling"], "attention_factor": 1.0}}),
    (
        "minicpm3",
        {"rope_scaling": {**FAMILY_GOLDENS["minicpm3"]["rope_scaling"], "original_max_position_embeddings": 32}},
    ),
]


@pytest.mark.parametrize(("name", "change"), WRONG)
def test_the_goldens_see_a_wrong_formula(name: str, change: dict[str, Any]) -> None:
    wrong = {**FAMILY_GOLDENS[name], **change}
    config = parse_config(wrong)
    weights = families.family_tensors(FAMILY_GOLDENS[name], GOLDEN_SEED)
    assert config != parse_config(FAMILY_GOLDENS[name])
    logits = forward(config, weights, families.family_prompts(name)[1])
    assert relative_error(logits, golden(name)["logits1"]) > 100 * TOLERANCE


def test_mtp_layer_of_deepseek_v3() -> None:
    config, weights, _ = model("deepseek_v3")
    assert isinstance(config, DeepseekConfig)
    for i, prompt in enumerate(families.family_prompts("deepseek_v3")):
        assert relative_error(deepseek_mtp(config, weights, prompt), golden("deepseek_v3")[f"mtp{i}"]) <= TOLERANCE
    with pytest.raises(ValueError, match="found 1 tokens"):
        deepseek_mtp(config, weights, [5])
    without = parse_config({**FAMILY_GOLDENS["deepseek_v3"], "num_nextn_predict_layers": 0})
    assert isinstance(without, DeepseekConfig)
    with pytest.raises(ValueError, match="has no MTP layer"):
        deepseek_mtp(without, weights, [5, 6])


def test_text_of_deepseek_vl_is_that_of_its_llama() -> None:
    """In both layouts of names and configs."""
    text = llama_config(vocab_size=40, hidden_size=32, intermediate_size=48)
    tensors = llama_tensors(text, seed=5)
    expected = forward(parse_config(text), tensors, [1, 2, 3])
    layouts = [
        ("DeepseekVLForConditionalGeneration", "text_config", "model.language_model.", "lm_head."),
        ("MultiModalityCausalLM", "language_config", "language_model.model.", "language_model.lm_head."),
    ]
    for architecture, key, prefix, head in layouts:
        config = parse_config({"architectures": [architecture], key: text, "vision_config": {}})
        renamed = {
            name.replace("model.", prefix, 1) if name.startswith("model.") else f"{head}weight": t
            for name, t in tensors.items()
        }
        np.testing.assert_array_equal(forward(config, renamed, [1, 2, 3]), expected)
        bare = parse_config({"architectures": [architecture], key: {"num_hidden_layers": 30, "vocab_size": 102400}})
        assert (bare.hidden_size, bare.intermediate_size, bare.n_heads, bare.n_layers) == (4096, 11008, 32, 30)
        with pytest.raises(ValueError, match=f"{architecture} needs {key}"):
            parse_config({"architectures": [architecture]})
        with pytest.raises(ValueError, match=f"no tensor {prefix}embed_tokens.weight"):
            forward(config, {}, [1])
