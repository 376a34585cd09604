"""Command-R, MiniCPM, Qwen 1, CPM-1, DeepSeek-VL: what their config.json means, and which tensors are theirs (KRN-08).

That their logits are those of ref is conformance's business (conformance/end_to_end.py).
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from conformance.end_to_end import VARIANTS
from conformance.golden_families import FAMILY_GOLDENS, family_tensors
from conformance.golden_models import GOLDEN_SEED, write_checkpoint
from engine.checkpoint.loader import load_model_config, load_weights
from engine.checkpoint.source import ModelSource
from engine.config import ModelConfig, RopeConfig
from engine.errors import CheckpointError, ConfigError
from engine.model_config.read import model_config_from_hf, summary
from engine.models.registry import ARCHITECTURES
from engine.rope_table import RopeTable
from engine.weights import Weights

CONFIGS = FAMILY_GOLDENS | VARIANTS


def read(name: str, *absent: str, **changes: Any) -> ModelConfig:
    """The golden config of a family with changes; a key of `absent` is left out."""
    config = {key: value for key, value in (CONFIGS[name] | changes).items() if key not in absent}
    return model_config_from_hf(config, None, "config.json")


def refusal(name: str, *absent: str, **changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read(name, *absent, **changes)
    return str(caught.value)


def checkpoint(folder: Path, name: str) -> Path:
    return write_checkpoint(folder, CONFIGS[name], family_tensors(CONFIGS[name], GOLDEN_SEED))


def load(folder: Path, load_format: Any = "auto") -> Weights:
    source = ModelSource("folder", folder, "model")
    config = load_model_config(source)
    weight_map = ARCHITECTURES[config.architecture].weight_map(config)
    return load_weights(source, weight_map, progress=False, load_format=load_format)


# ---- configs


def test_command_r() -> None:
    config = read("command_r")
    assert (config.norm, config.norm_eps, config.rope_interleaved) == ("layernorm", 1e-5, True)
    assert (config.logit_scale, config.qk_norm, config.qkv_bias, config.o_bias) == (0.25, False, False, False)
    plus = read("command_r_plus")
    assert (plus.qk_norm, plus.qkv_bias, plus.o_bias, plus.tie_word_embeddings) == (True, True, True, False)


def test_what_command_r_leaves_out_follows_transformers() -> None:
    silent = ("layer_norm_eps", "logit_scale", "tie_word_embeddings", "rope_theta", "max_position_embeddings")
    config = read("command_r", *silent)
    assert (config.norm_eps, config.logit_scale, config.tie_word_embeddings) == (1e-5, 0.0625, True)
    assert (config.rope.theta, config.max_position_embeddings) == (500000.0, 8192)
    assert (
        read("command_r", "rope_theta", rope_parameters={"rope_type": "default", "rope_theta": 8e6}).rope.theta == 8e6
    )


def test_command_r_serves_up_to_model_max_length() -> None:
    assert read("command_r", max_position_embeddings=8192, model_max_length=131072).max_position_embeddings == 131072
    assert "model_max_length must be an integer" in refusal("command_r", model_max_length="long")


def test_messages_name_the_key_of_the_family() -> None:
    assert "layer_norm_eps must be a number, found 'x'" in refusal("command_r", layer_norm_eps="x")
    assert "n_embd (50) must be a multiple of n_head (4)" in refusal("cpm1", n_embd=50)
    assert "n_layer is missing" in refusal("cpm1", "n_layer")
    assert "layer_norm_epsilon must be finite and above 0" in refusal("qwen1", layer_norm_epsilon=0)
    assert "rotary_emb_base must be a number" in refusal("qwen1", rotary_emb_base="10k")
    assert "rotary_pct 0.5 is not supported" in refusal("qwen1", rotary_pct=0.5)
    assert "kv_channels is 7; rotary" in refusal("qwen1", kv_channels=7)
    assert "text_config: hidden_size must be an integer" in refusal("deepseek_vl", text_config={"hidden_size": "x"})


def test_minicpm_scales() -> None:
    config = read("minicpm", num_hidden_layers=4, scale_depth=1.4, dim_model_base=12, hidden_size=48)
    assert config.embedding_scale == 12
    assert config.residual_scale == pytest.approx(1.4 / 2)
    assert config.logit_scale == pytest.approx(12 / 48)
    assert config.moe is None
    assert "scale_emb is missing" in refusal("minicpm", "scale_emb")
    moe = read("minicpm_moe").moe
    assert moe is not None
    assert (moe.n_experts, moe.n_experts_per_tok, moe.intermediate_size, moe.renormalize) == (5, 2, 64, True)


def test_qwen1() -> None:
    config = read("qwen1", bf16=True)
    assert config.intermediate_size == 32  # of config.json's 64 one half is w1, the other w2
    assert (config.qkv_bias, config.o_bias, config.mlp_bias, config.dtype) == (True, False, False, "bfloat16")
    assert config.rope == RopeConfig("ntk_alpha", 10000.0, original_max_position_embeddings=64)
    assert config.logn_length == 64
    plain = read("qwen1", use_dynamic_ntk=False, use_logn_attn=False, no_bias=False, fp16=True)
    assert (plain.rope.kind, plain.logn_length, plain.o_bias, plain.dtype) == ("default", 0, True, "float16")
    assert read("qwen1", "max_position_embeddings", seq_length=48).max_position_embeddings == 48


def test_null_for_a_size_that_follows_from_nothing_is_a_missing_size() -> None:
    assert "num_hidden_layers is missing" in refusal("cpm_ant", num_hidden_layers=None)
    assert "hidden_size is missing" in refusal("cpm_ant", hidden_size=None)
    assert "n_positions is missing" in refusal("cpm1", n_positions=None)
    assert read("cpm1", n_inner=None).intermediate_size == 4 * read("cpm1").hidden_size


def test_qwen1_refusals() -> None:
    assert "intermediate_size (65) counts w1 and w2, so it must be even" in refusal("qwen1", intermediate_size=65)
    assert "kv_channels (16) times num_attention_heads (4) must be hidden_size" in refusal("qwen1", kv_channels=16)
    assert "seq_length is missing" in refusal("qwen1", "seq_length")
    assert "scale_attn_weights false is not supported" in refusal("qwen1", scale_attn_weights=False)
    scaling = {"type": "linear", "factor": 2.0}
    assert "rope_scaling is not read by this architecture" in refusal("qwen1", rope_scaling=scaling)


def test_qwen1_prompts_with_as_many_doublings_share_a_table() -> None:
    table = RopeTable(RopeConfig("ntk_alpha", original_max_position_embeddings=8), 4, max_model_len=40)
    assert [table.rope_len(n) for n in (1, 8, 9, 16, 17, 32, 33)] == [0, 0, 16, 16, 32, 32, 64]
    # alpha is 3 after one doubling, and the base 10000 · 3^(4/2) = 90000; pair 1 turns by base^(-2/4) = 1/300
    row = table.rows(np.array([30], np.int32), np.array([16], np.int32))[0]
    np.testing.assert_allclose(row, [np.cos(30), np.cos(0.1), np.sin(30), np.sin(0.1)], rtol=1e-6)


def test_cpm1() -> None:
    config = read("cpm1")
    assert (config.n_layers, config.n_heads, config.hidden_size, config.max_position_embeddings) == (2, 4, 48, 64)
    assert (config.intermediate_size, config.hidden_act, config.norm) == (4 * 48, "gelu_new", "layernorm")
    assert (config.rope.kind, config.rotary_dim, config.tie_word_embeddings) == ("none", 0, True)
    assert read("cpm1", n_inner=100, activation_function="relu").intermediate_size == 100
    assert read("cpm1", n_embd=20).head_dim == 5  # nothing rotates, so it may be odd
    assert "activation_function 'mish' is not supported; supported are 'gelu_new'" in refusal(
        "cpm1", activation_function="mish"
    )
    assert "scale_attn_by_inverse_layer_idx is not supported" in refusal("cpm1", scale_attn_by_inverse_layer_idx=True)


def test_summaries() -> None:
    assert "no rope, limit 64" in summary(read("cpm1"))
    assert "rope ntk_alpha, base 10000, original length 64, limit 64" in summary(read("qwen1"))


def test_deepseek_vl_reads_its_language_part() -> None:
    config = read("deepseek_vl_published", language_config={"num_hidden_layers": 30, "vocab_size": 102400})
    assert (config.n_layers, config.hidden_size, config.intermediate_size, config.n_heads) == (30, 4096, 11008, 32)
    assert (config.norm_eps, config.max_position_embeddings, config.rope.theta) == (1e-6, 2048, 10000.0)
    assert "needs language_config, its language part's config, found None" in refusal(
        "deepseek_vl_published", "language_config"
    )
    quantized = {"quant_method": "squeeze"}
    assert "quant_method 'squeeze'" in refusal("deepseek_vl", quantization_config=quantized)


# ---- weights


def test_transposed_weights_are_turned(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, "cpm1")
    stored = load_file(folder / "model.safetensors")["transformer.h.1.mlp.c_fc.weight"]
    assert stored.shape == (48, 192)
    weight = load(folder).linears["layers.1.up_proj"].tensors["weight"]
    np.testing.assert_array_equal(weight, stored.T)
    assert weight.flags.c_contiguous


def test_a_weight_that_is_not_transposed_is_refused(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, "cpm1")
    tensors = load_file(folder / "model.safetensors")
    name = "transformer.h.0.attn.c_attn.weight"
    save_file(tensors | {name: np.ascontiguousarray(tensors[name].T)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert f"{name} is [144, 48], wanted [48, 144]" in str(caught.value)


def test_w2_is_the_gate_of_qwen1(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, "qwen1")
    stored = load_file(folder / "model.safetensors")
    gate, up = (stored[f"transformer.h.0.mlp.{name}.weight"] for name in ("w2", "w1"))
    weight = load(folder).linears["layers.0.gate_up_proj"].tensors["weight"]
    np.testing.assert_array_equal(weight, np.concatenate([gate, up]))


@pytest.mark.parametrize(
    ("name", "spare"),
    [
        ("deepseek_vl", ["model.vision_model.embeddings.patch_embedding.bias", "model.aligner.linear1.weight"]),
        ("deepseek_vl", ["model.high_res_vision_model.neck.conv1.weight", "lm_head.weight"]),
        ("deepseek_vl_published", ["vision_model.vision_tower_low.x", "aligner.layers.1.bias"]),
        ("cpm1", ["transformer.h.0.attn.bias", "transformer.h.1.attn.masked_bias", "lm_head.weight"]),
    ],
)
def test_what_is_not_read_is_ignored_by_name(name: str, spare: list[str], tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, name)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {spare_name: np.ones(3, np.float32) for spare_name in spare}, folder / "model.safetensors")
    load(folder)
    save_file(tensors | {"model.language_model.layers.0.extra": np.ones(3, np.float32)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="1 tensors are unexpected"):
        load(folder)


def test_random_weights_have_norms_of_one(tmp_path: Path) -> None:
    """Also where a norm has a row a head (Command-R+); biases of norms are 0 (CPM-1)."""
    plus = load(checkpoint(tmp_path / "plus", "command_r_plus"), "dummy").arrays
    assert plus["layers.0.q_norm"].shape == (4, 12)
    assert (plus["layers.0.q_norm"] == 1).all()
    cpm1 = load(checkpoint(tmp_path / "cpm1", "cpm1"), "dummy").arrays
    assert (cpm1["norm"] == 1).all()
    assert (cpm1["norm.bias"] == 0).all()
    assert cpm1["embed_positions"].std() > 0
