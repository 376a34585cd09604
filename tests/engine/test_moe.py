"""engine.models.moe: weights, memory and arithmetic of layers with experts (KRN-06, KRN-07, LDR-04, LDR-10)."""

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from conformance.golden_families import FAMILY_GOLDENS, family_model
from engine.checkpoint.loader import load_weights
from engine.checkpoint.random_weights import DUMMY_STD
from engine.checkpoint.source import ModelSource
from engine.config import ModelConfig, MoeConfig, RopeConfig
from engine.errors import CheckpointError
from engine.memory import FLOAT32, mlp_numbers
from engine.model_config.read import model_config_from_hf
from engine.models.moe import MOE_NAMES, feed_forward, feed_forward_arrays, feed_forward_linears
from engine.models.registry import ARCHITECTURES
from engine.ops import OpTable, cpu_ops
from engine.weights import LinearWeight, WeightMap, Weights
from ref.activation import silu
from ref.config import parse_config
from ref.model.registry import weight_shapes
from tests.engine.checkpoint.files import load

FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_moe")


def moe_config(hidden_size: int, **moe: Any) -> ModelConfig:
    """One layer with experts and hardly any attention."""
    return ModelConfig(
        architecture="MixtralForCausalLM",
        n_layers=1,
        n_heads=1,
        n_kv_heads=1,
        head_dim=2,
        hidden_size=hidden_size,
        intermediate_size=8,
        vocab_size=8,
        max_position_embeddings=8,
        norm_eps=1e-6,
        rope=RopeConfig(),
        moe=MoeConfig(**({"layers": (True,), "renormalize": True} | moe)),
    )


def moe_weights(config: ModelConfig, ops: OpTable) -> Weights:
    weight_map = WeightMap(
        tuple(feed_forward_linears(config, 0, "model.layers.0", MOE_NAMES)),
        tuple(feed_forward_arrays(config, 0, "model.layers.0", MOE_NAMES)),
    )
    loaded = load_weights(ModelSource("folder", Path("none"), "none"), weight_map, load_format="dummy")
    return Weights({dest: ops.prepare(weight) for dest, weight in loaded.linears.items()}, loaded.arrays)


# ---- weights


@pytest.mark.parametrize("name", FAMILIES)
def test_the_weight_map_is_that_of_the_reference(name: str) -> None:
    config = FAMILY_GOLDENS[name]
    read = model_config_from_hf(config, None, "config.json")
    weight_map = ARCHITECTURES[read.architecture].weight_map(read)
    found = {array.name: array.shape for array in weight_map.arrays}
    for linear in weight_map.linears:
        for module, _, rows in linear.modules():
            found[f"{module}.weight"] = (rows.stop - rows.start, linear.in_features)
            if linear.bias:
                found[f"{module}.bias"] = (rows.stop - rows.start,)
    assert found == weight_shapes(parse_config(config))


def test_experts_are_stacked_in_their_order(tmp_path: Path) -> None:
    folder = family_model(tmp_path, "mixtral")
    stored, weights = load_file(folder / "model.safetensors"), load(folder)
    experts = weights.linears["layers.1.experts.gate_up_proj"]
    assert (experts.out_features, experts.in_features) == (2 * 64, 48)
    assert experts.tensors["weight"].shape == (5, 2 * 64, 48)
    for expert in range(5):
        name = f"model.layers.1.block_sparse_moe.experts.{expert}"
        parts = [stored[f"{name}.{part}.weight"] for part in ("w1", "w3")]
        np.testing.assert_array_equal(experts.tensors["weight"][expert], np.concatenate(parts))
        down = weights.linears["layers.1.experts.down_proj"].tensors["weight"][expert]
        np.testing.assert_array_equal(down, stored[f"{name}.w2.weight"])


def test_prepared_experts_lie_transposed_one_after_another(tmp_path: Path) -> None:
    experts = load(family_model(tmp_path, "mixtral")).linears["layers.1.experts.down_proj"]
    prepared = cpu_ops().prepare(experts)
    assert set(prepared.tensors) == {"weight_t"}
    weight_t = prepared.tensors["weight_t"]
    assert weight_t.flags.c_contiguous
    for expert in range(5):
        np.testing.assert_array_equal(weight_t[expert], experts.tensors["weight"][expert].T)


def test_dummy_weights_of_experts_differ_and_need_no_file(tmp_path: Path) -> None:
    config = model_config_from_hf(FAMILY_GOLDENS["qwen2_moe"], None, "config.json")
    weight_map = ARCHITECTURES[config.architecture].weight_map(config)
    weights = load_weights(ModelSource("folder", tmp_path, "none"), weight_map, load_format="dummy")
    experts = weights.linears["layers.1.experts.gate_up_proj"].tensors["weight"]
    assert experts.shape == (6, 2 * 24, 48)
    assert len({expert.tobytes() for expert in experts}) == 6
    # the spread of 6912 normal numbers is off by 1/√(2·6912) = 0.85 % in the mean; 5 times that never happens
    assert experts.std() == pytest.approx(DUMMY_STD, rel=0.05)


def changed(folder: Path, edit: Callable[[dict[str, np.ndarray]], Any]) -> str:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    return str(caught.value)


def test_ldr_04_one_expert_is_missing(tmp_path: Path) -> None:
    """LDR-04: each tensor of the expert is named; so is an expert too many, and a shared expert nobody asked for."""
    names = [f"model.layers.1.mlp.experts.4.{part}_proj.weight" for part in ("gate", "up", "down")]
    message = changed(family_model(tmp_path, "qwen2_moe"), lambda tensors: [tensors.pop(name) for name in names])
    assert "3 tensors are missing" in message
    assert all(name in message for name in names)


def test_ldr_10_another_number_of_experts(tmp_path: Path) -> None:
    """LDR-10: one expert fewer in the config: its tensors are unexpected and the router has another shape."""
    folder = family_model(tmp_path, "qwen2_moe")
    config = folder / "config.json"
    config.write_text(config.read_text(encoding="utf-8").replace('"num_experts": 6', '"num_experts": 5'))
    message = changed(folder, lambda tensors: None)
    assert "3 tensors are unexpected: model.layers.1.mlp.experts.5." in message
    assert "model.layers.1.mlp.gate.weight is [6, 48], wanted [5, 48]" in message


# ---- arithmetic


def dense(weight: Any) -> LinearWeight:
    stored = np.array(weight, np.float32)
    return LinearWeight("dense", stored.shape[-2], stored.shape[-1], {"weight": stored})


@pytest.mark.parametrize("gated", [False, True])
def test_a_layer_by_hand(gated: bool) -> None:
    """Two experts of width 1 on a hidden state of 2; the router sees its first element.

    x = (1, 0): router logits ±ln 3 / 2, so softmax gives 3/4 and 1/4. Expert e: gate x₀, up (e + 2)·x₀, down (1, e).
    The shared expert: gate x₀, up 5·x₀, down (0, 1), behind σ(0) = 1/2 if gated.
    """
    ops = cpu_ops()
    sizes = {"n_experts": 2, "n_experts_per_tok": 2, "intermediate_size": 1, "shared_intermediate_size": 1}
    config = moe_config(2, **sizes, shared_gate=gated)
    half = np.log(3) / 2
    linears = {
        "router": dense([[half, 0], [-half, 0]]),
        "experts.gate_up_proj": dense([[[1, 0], [2, 0]], [[1, 0], [3, 0]]]),
        "experts.down_proj": dense([[[1], [0]], [[1], [1]]]),
        "shared_expert.gate_up_proj": dense([[1, 0], [5, 0]]),
        "shared_expert.down_proj": dense([[0], [1]]),
        "shared_expert_gate": dense([[0, 7]]),
    }
    weights = Weights({f"layers.0.{dest}": ops.prepare(weight) for dest, weight in linears.items()}, {})
    x = np.array([[1, 0], [0, 1], [1, 0]], np.float32)
    out = feed_forward(config, weights, ops, 0)(x, None, None)  # type: ignore[arg-type]
    one = float(silu(np.float64(1)))
    shared = 5 * one * (0.5 if gated else 1)
    wanted = [0.75 * 2 * one + 0.25 * 3 * one, 0.25 * 3 * one + shared]
    np.testing.assert_allclose(out, [wanted, [0, 0], wanted], rtol=8 * 2**-24)


def test_the_bias_chooses_and_does_not_weigh() -> None:
    """KRN-07: without the bias expert 0 has the higher score; with it expert 1 is chosen, weighed by its own score."""
    ops = cpu_ops()
    sizes = {"n_experts": 2, "n_experts_per_tok": 1, "intermediate_size": 1}
    config = moe_config(1, **sizes, scoring="sigmoid", selection_bias=True, renormalize=False, scaling_factor=4.0)
    linears = {
        "router": dense([[1], [0]]),
        "experts.gate_up_proj": dense([[[1], [2]], [[1], [3]]]),
        "experts.down_proj": dense([[[1]], [[1]]]),
    }
    prepared = {f"layers.0.{dest}": ops.prepare(weight) for dest, weight in linears.items()}
    x, one = np.ones((1, 1), np.float32), float(silu(np.float64(1)))
    for bias, up, score in ((0, 2, 1 / (1 + np.exp(-1))), (1, 3, 0.5)):
        weights = Weights(prepared, {"layers.0.selection_bias": np.array([0, bias], np.float32)})
        out = feed_forward(config, weights, ops, 0)(x, None, None)  # type: ignore[arg-type]
        assert out[0, 0] == pytest.approx(4 * score * up * one, rel=8 * 2**-24)


@pytest.mark.parametrize("num_tokens", [1, 2, 15, 16, 17])
def test_krn_06_a_row_does_not_depend_on_where_others_go(num_tokens: int) -> None:
    """KRN-06: among any others a token has the numbers that it has alone, to rounding."""
    ops = cpu_ops()
    sizes = {"n_experts": 8, "n_experts_per_tok": 2, "intermediate_size": 16, "shared_intermediate_size": 8}
    config = moe_config(24, **sizes, shared_gate=True)
    forward = feed_forward(config, moe_weights(config, ops), ops, 0)
    x = np.random.default_rng(num_tokens).standard_normal((num_tokens, 24), np.float32)
    together = forward(x, None, None)  # type: ignore[arg-type]
    for row in range(num_tokens):
        alone = forward(x[row : row + 1], None, None)  # type: ignore[arg-type]
        # sums of 24 and of 16 products in another order
        np.testing.assert_allclose(together[row], alone[0], rtol=0, atol=64 * 2**-24 * np.abs(alone).max())


# ---- memory

GROUPS = {"scoring": "sigmoid", "n_group": 8, "topk_group": 4, "group_best": 2, "selection_bias": True}
MANY = {"hidden_size": 16, "n_experts": 512, "n_experts_per_tok": 2, "intermediate_size": 4}
FEW = {"hidden_size": 32, "n_experts": 2, "n_experts_per_tok": 1, "intermediate_size": 8}
SIZES: dict[str, dict[str, Any]] = {
    "choices": {"hidden_size": 256, "n_experts": 16, "n_experts_per_tok": 16, "intermediate_size": 8},
    "experts": MANY,
    "experts in groups": MANY | GROUPS,
    "a wide expert that has all": FEW | {"n_experts": 1, "intermediate_size": 1024},
    "a wide shared one": FEW | {"shared_intermediate_size": 1024, "shared_gate": True},
    "a wide hidden state": FEW | {"hidden_size": 1024, "shared_intermediate_size": 8},
}


@pytest.mark.parametrize("name", SIZES)
def test_kvm_04_experts_stay_within_the_plan(name: str) -> None:
    """KVM-04: the peak of the arrays made for 512 rows is within what the memory plan counts for them."""
    config = moe_config(**SIZES[name])
    ops = cpu_ops()
    forward = feed_forward(config, moe_weights(config, ops), ops, 0)
    x = np.random.default_rng(0).standard_normal((512, config.hidden_size), np.float32)
    forward(x, None, None)  # type: ignore[arg-type]
    tracemalloc.start()
    try:
        forward(x, None, None)  # type: ignore[arg-type]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= FLOAT32 * 512 * mlp_numbers(config)
