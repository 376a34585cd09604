"""engine.models.mla: weights, cache and memory of latent attention (LDR-04, KVM-04)."""

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from conformance.golden_families import FAMILY_GOLDENS, family_model, family_tensors
from engine.api import GenerationRequest, SamplingParams
from engine.build import build_engine
from engine.checkpoint.prepare import prepare_weights
from engine.config import EngineConfig
from engine.errors import CheckpointError
from engine.kv_cache import CacheSpec, make_kv_cache
from engine.loop import drain
from engine.model_config.read import model_config_from_hf
from engine.models.registry import ARCHITECTURES
from engine.ops import cpu_ops
from ref.config import parse_config
from ref.mla import mla_split_kv_b
from ref.model.registry import weight_shapes
from tests.engine.checkpoint.files import load

FAMILIES = ("deepseek_v2_lite", "deepseek_v2", "deepseek_v3", "minicpm3")


# ---- weights


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("bias", [False, True])
def test_the_weight_map_is_that_of_the_reference(name: str, bias: bool) -> None:
    config = FAMILY_GOLDENS[name] | {"attention_bias": bias}
    read = model_config_from_hf(config, None, "config.json")
    weight_map = ARCHITECTURES[read.architecture].weight_map(read)
    found = {array.name: array.shape for array in weight_map.arrays}
    for linear in weight_map.linears:
        for module, _, rows in linear.modules():
            found[f"{module}.weight"] = (rows.stop - rows.start, linear.in_features)
            if linear.bias:
                found[f"{module}.bias"] = (rows.stop - rows.start,)
    assert found == weight_shapes(parse_config(config))


def test_kv_b_is_split_once_and_nothing_of_it_is_kept_twice(tmp_path: Path) -> None:
    """Keys [n_heads, 12, 16] and, turned, values [n_heads, 16, 10] of each head."""
    folder = family_model(tmp_path, "deepseek_v2")
    stored = load_file(folder / "model.safetensors")["model.layers.1.self_attn.kv_b_proj.weight"]
    read = model_config_from_hf(FAMILY_GOLDENS["deepseek_v2"], None, "config.json")
    weights = prepare_weights(load(folder), ARCHITECTURES[read.architecture].weight_map(read), cpu_ops())
    tensors = weights.linears["layers.1.kv_b_proj"].tensors
    w_uk, w_uv = mla_split_kv_b(stored, 4, 12)
    assert tensors.keys() == {"w_uk", "w_uv"}
    np.testing.assert_array_equal(tensors["w_uk"], w_uk)
    np.testing.assert_array_equal(tensors["w_uv"], w_uv.swapaxes(1, 2))
    assert all(tensor.flags.c_contiguous and tensor.flags.owndata for tensor in tensors.values())
    num_numbers = sum(np.prod(shape) for shape in weight_shapes(parse_config(FAMILY_GOLDENS["deepseek_v2"])).values())
    assert weights.num_bytes == 4 * num_numbers


def test_layers_for_speculation_are_passed_over(tmp_path: Path) -> None:
    """LDR-04: as many as the config says, and no other layer behind the last."""
    folder = family_model(tmp_path, "deepseek_v3")
    tensors = load_file(folder / "model.safetensors")
    assert any(name.startswith("model.layers.2.eh_proj") for name in tensors)
    weights = load(folder)
    assert not any(".2." in dest for dest in [*weights.linears, *weights.arrays])
    save_file(tensors | {"model.layers.3.eh_proj.weight": np.zeros((1, 1), np.float32)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 tensors are unexpected: model\.layers\.3\.eh_proj\.weight"):
        load(folder)


def test_a_published_checkpoint_is_refused_where_it_lacks_a_layer_that_the_config_names(tmp_path: Path) -> None:
    folder = family_model(tmp_path, "minicpm3")
    tensors = family_tensors(FAMILY_GOLDENS["minicpm3"], 0)
    del tensors["model.layers.0.self_attn.q_a_layernorm.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 tensors are missing: model\.layers\.0\.self_attn\.q_a_layernorm"):
        load(folder)


# ---- cache


def test_the_cache_has_one_array_a_layer() -> None:
    spec = CacheSpec("latent", (0, 1, 2), n_kv_heads=1, head_dim=24)
    assert spec.bytes_per_block(block_size=4, itemsize=4) == 3 * 4 * 24 * 4
    cache = make_kv_cache((spec,), num_blocks=5, block_size=4)
    assert {array.shape for array in cache.latent_cache.values()} == {(5, 4, 24)}
    assert (sorted(cache.latent_cache), cache.k_cache, cache.v_cache) == ([0, 1, 2], {}, {})
    assert cache.num_bytes == 5 * spec.bytes_per_block(4, 4)


# ---- memory

CTX, VOCAB = 1024, 96
LATENT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "max_position_embeddings": CTX,
    "rope_scaling": None,
    "hidden_size": 32,
    "intermediate_size": 16,
}
SHAPES: dict[str, dict[str, Any]] = {  # each makes another array the largest
    "many heads": {"num_attention_heads": 24, "num_key_value_heads": 24},
    "a wide latent": {"kv_lora_rank": 256, "num_attention_heads": 2, "num_key_value_heads": 2},
    "wide heads": {"qk_nope_head_dim": 128, "v_head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": 2},
    "wide rotated heads": {"qk_rope_head_dim": 128, "num_attention_heads": 4, "num_key_value_heads": 4},
    "wide short queries": {"q_lora_rank": 1024, "num_attention_heads": 2, "num_key_value_heads": 2},
}
REQUESTS: dict[str, tuple[int, dict[str, Any]]] = {  # prompt length, sampling parameters
    "a long prompt": (CTX - 1, {"max_tokens": 1}),
    "many choices of a long prompt": (CTX - 4, {"max_tokens": 4, "n": 64, "seed": 1}),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_kvm_04_latent_attention_stays_within_the_plan(tmp_path: Path, shape: str) -> None:
    """KVM-04: default settings; the peak of all arrays and objects made while requests run is within the workspace."""
    folder = family_model(tmp_path, "deepseek_v2", **LATENT, **SHAPES[shape])
    peaks = []
    for num_prompt, params in REQUESTS.values():
        config = EngineConfig(model=str(folder), num_threads=1, load_format="dummy")
        built = build_engine(config, progress=False)
        prompt = tuple(3 + 7 * i % 90 for i in range(num_prompt))
        built.engine.add(GenerationRequest("a", prompt, SamplingParams(ignore_eos=True, **params)))
        tracemalloc.start()
        try:
            num_ends = sum(event.finish_reason == "length" for event in drain(built.engine))
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
        assert num_ends == params.get("n", 1)
    planned = built.memory.workspace
    assert max(peaks) <= planned, f"{max(peaks) / 1e6:.1f} MB of {planned / 1e6:.1f} MB planned"
    assert planned <= 3 * max(peaks), "a plan for what never comes"
