"""ref.quant.compressed_tensors and its config: layouts by hand, which module is what, and what is refused."""

from copy import deepcopy
from typing import Any

import numpy as np
import pytest

from ref.quant.coded import dequantize_weight, quantized_linear
from ref.quant.compressed_tensors import ct_coded, ct_pack, ct_unpack
from ref.quant.compressed_tensors_config import CtScheme, ct_scheme, parse_ct_config
from ref.quant.fp8 import fp8_linear, fp8_quantize
from ref.quant.fp8_block import fp8_block_linear, fp8_block_quantize
from ref.quant.groups import GroupedInt, grouped_dequantize, grouped_quantize
from ref.quant.int8 import int8_linear, int8_quantize

GROUP = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
TOKEN_INT8 = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
CHANNEL_INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
BASE: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": GROUP, "input_activations": None}},
    "ignore": ["lm_head", "re:.*mlp[.]gate$"],
}


def changed(path: str, value: Any) -> dict[str, Any]:
    """BASE with one key, given by its dotted path, set to value."""
    config = deepcopy(BASE)
    *parents, last = path.split(".")
    place = config
    for key in parents:
        place = place[key]
    place[last] = value
    return config


def test_a_packed_row_by_hand() -> None:
    """Values −8 to −1 are stored as 0 to 7, the first in the lowest nibble; scale 2."""
    scheme = CtScheme("pack-quantized", "int", 4, "channel")
    tensors = {
        "weight_packed": np.array([[0x76543210]], np.int32),
        "weight_scale": np.array([[2.0]]),
        "weight_shape": np.array([1, 8]),
    }
    assert grouped_dequantize(ct_unpack(tensors, scheme)).tolist() == [[-16, -14, -12, -10, -8, -6, -4, -2]]


def test_zero_points_are_packed_along_out() -> None:
    """Output o has zero o: eight outputs share the one word of their group."""
    q = np.full((8, 8), 9, np.uint8)
    weight = GroupedInt(4, q, np.ones((8, 1)), np.arange(8, dtype=np.uint8)[:, None], np.zeros(8, np.int64))
    tensors = ct_pack(weight, symmetric=False)
    assert tensors["weight_zero_point"].tolist() == [[0x76543210]]
    found = ct_unpack(tensors, CtScheme("pack-quantized", "int", 4, "channel", symmetric=False))
    assert grouped_dequantize(found)[:, 0].tolist() == [9, 8, 7, 6, 5, 4, 3, 2]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [32, -1])
@pytest.mark.parametrize("act_order", [True, False])
def test_pack_and_unpack(bits: int, symmetric: bool, group_size: int, act_order: bool) -> None:
    """13 outputs fill no whole word; the padding is cut off again."""
    rng = np.random.default_rng(bits)
    weight = grouped_quantize(rng.standard_normal((13, 64)), bits, group_size, symmetric=symmetric)
    if act_order:
        weight = GroupedInt(bits, weight.q, weight.scales, weight.zeros, rng.permutation(weight.g_idx))
    strategy = "group" if group_size > 0 else "channel"
    has_list = act_order and group_size > 0  # one group has no order
    scheme = CtScheme("pack-quantized", "int", bits, strategy, symmetric, group_size, act_order=has_list)
    found = ct_unpack(ct_pack(weight, symmetric=symmetric), scheme)
    for field in ("q", "scales", "zeros", "g_idx"):
        np.testing.assert_array_equal(getattr(found, field), getattr(weight, field))


def test_inputs_that_fill_no_word_are_cut_to_weight_shape() -> None:
    weight = grouped_quantize(np.ones((2, 12)), 4, -1, symmetric=True)
    tensors = ct_pack(weight, symmetric=True)
    assert tensors["weight_packed"].shape == (2, 2)
    assert np.array_equal(ct_unpack(tensors, CtScheme("pack-quantized", "int", 4, "channel")).q, weight.q)


def test_coded_weights_and_their_matmuls() -> None:
    """Each strategy decodes to codes · scale and multiplies as its own kernel."""
    rng = np.random.default_rng(0)
    x, weight, bias = rng.standard_normal((3, 192)), rng.standard_normal((6, 192)), rng.standard_normal(6)
    q, scale = int8_quantize(weight)
    coded = ct_coded(
        {"weight": q, "weight_scale": scale[:, None]},
        CtScheme("int-quantized", "int", 8, "channel", activations="token"),
    )
    np.testing.assert_array_equal(dequantize_weight(coded), q * scale[:, None])
    np.testing.assert_array_equal(quantized_linear(x, coded, bias), int8_linear(x, q, scale, bias))

    codes, scale = fp8_quantize(weight, axis=None)
    scheme = CtScheme("float-quantized", "float", 8, "tensor", activations="static")
    fixed = np.array([0.01])
    coded = ct_coded({"weight": codes, "weight_scale": scale.reshape(1), "input_scale": fixed}, scheme)
    expected = fp8_linear(x, codes, scale, bias, input_scale=fixed)
    np.testing.assert_array_equal(quantized_linear(x, coded, bias), expected)

    codes, scale = fp8_block_quantize(weight)
    scheme = CtScheme("float-quantized", "float", 8, "block", activations="group")
    coded = ct_coded({"weight": codes, "weight_scale": scale}, scheme)
    np.testing.assert_array_equal(quantized_linear(x, coded, bias), fp8_block_linear(x, codes, scale, bias))
    assert dequantize_weight(coded).shape == (6, 192)


def test_static_int8_activations() -> None:
    """x / 0.5 = 3, −2.5 → −2; times weights 2, 4 with scale 1/127: (6 − 8) · 0.5 · scale."""
    codes = np.array([[2, 4]], np.int8)
    tensors = {"weight": codes, "weight_scale": np.array([0.25]), "input_scale": np.array([0.5])}
    coded = ct_coded(tensors, CtScheme("int-quantized", "int", 8, "tensor", activations="static"))
    assert quantized_linear(np.array([[1.5, -1.25]]), coded).tolist() == [[-0.25]]


def test_which_module_is_what() -> None:
    config = deepcopy(BASE)
    named = {**GROUP, "num_bits": 8, "strategy": "channel"}
    config["config_groups"]["group_1"] = {"targets": ["re:.*down_proj$", "model.head"], "weights": named}
    parsed = parse_ct_config(config)
    bits = {
        name: scheme.bits if (scheme := ct_scheme(parsed, name)) else None
        for name in ("model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj", "model.head", "lm_head")
    }
    assert list(bits.values()) == [4, 8, 8, None]
    assert ct_scheme(parsed, "model.layers.3.mlp.gate") is None
    assert ct_scheme(parsed, "model.layers.3.mlp.gate_proj") is not None


def test_a_group_may_have_a_format_of_its_own() -> None:
    config = deepcopy(BASE) | {"format": "mixed-precision"}
    config["config_groups"]["group_0"] |= {
        "format": "int-quantized", "weights": CHANNEL_INT8, "input_activations": TOKEN_INT8,
    }  # fmt: skip
    scheme = ct_scheme(parse_ct_config(config), "a.b")
    assert scheme == CtScheme("int-quantized", "int", 8, "channel", activations="token")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("format", "nvfp4-pack-quantized", "format 'nvfp4-pack-quantized' is not supported; known are pack-quantized"),
        ("format", None, "format None"),
        ("config_groups", {}, "config_groups must map names to groups"),
        ("kv_cache_scheme", {"num_bits": 8}, "kv_cache_scheme is not supported"),
        ("sparsity_config", {"format": "sparse-24"}, "sparsity_config is not supported"),
        ("transform_config", {"config_groups": {"a": 1}}, "transform_config is not supported"),
        ("quantization_status", "frozen", "quantization_status must be compressed"),
        ("config_groups.group_0.targets", ["Embedding"], "target 'Embedding' is not supported"),
        ("config_groups.group_0.weights.num_bits", 3, "num_bits 3 are not supported in format pack-quantized"),
        ("config_groups.group_0.weights.type", "float", "type 'float' with num_bits 4"),
        ("config_groups.group_0.weights.strategy", "tensor_group", "strategy 'tensor_group' is not supported"),
        ("config_groups.group_0.weights.group_size", None, "group_size must be a positive integer, found None"),
        ("config_groups.group_0.weights.actorder", "sideways", "actorder 'sideways'"),
        ("config_groups.group_0.input_activations", TOKEN_INT8, "are not supported in format pack-quantized"),
        ("config_groups.group_0.output_activations", TOKEN_INT8, "output_activations are not supported"),
        ("config_groups.group_0", {"targets": ["Linear"]}, "config_groups.group_0: 'weights'"),
        ("config_groups.group_0.weights", None, "config_groups.group_0: weights must be an object, found None"),
        ("config_groups.group_0.weights.block_structure", [128], "block_structure must be two positive integers"),
        ("config_groups.group_0.weights.block_structure", [0, 0], "block_structure must be two positive integers"),
        ("config_groups.group_0.targets", ["re:("], r"'re:\(' is no regular expression"),
        ("ignore", ["re:("], r"'re:\(' is no regular expression"),
        ("ignore", "lm_head", "ignore must be a list of modules, found 'lm_head'"),
    ],
)
def test_what_is_not_known_is_refused(path: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_ct_config(changed(path, value))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"strategy": "tensor"}, "strategy 'tensor' and dynamic True"),
        ({"dynamic": "local"}, "dynamic 'local'"),
        ({"num_bits": 4}, "are not supported in format int-quantized"),
        ({"symmetric": False}, "are not supported in format int-quantized"),
    ],
)
def test_activations_that_are_not_known_are_refused(change: dict[str, Any], message: str) -> None:
    group = {"targets": ["Linear"], "weights": CHANNEL_INT8, "input_activations": TOKEN_INT8 | change}
    with pytest.raises(ValueError, match=message):
        parse_ct_config({"format": "int-quantized", "config_groups": {"g": group}})


def test_tensors_that_do_not_fit_are_refused() -> None:
    scheme = CtScheme("pack-quantized", "int", 4, "group", True, 32)
    tensors = ct_pack(grouped_quantize(np.ones((8, 64)), 4, 32, symmetric=True), symmetric=True)
    with pytest.raises(ValueError, match="needs weight_packed, weight_scale, weight_shape; weight_scale is missing"):
        ct_unpack({key: tensors[key] for key in ("weight_packed", "weight_shape")}, scheme)
    with pytest.raises(ValueError, match=r"weight_scale has shape \[8, 2\]; .* ask for \[8, 1\]"):
        ct_unpack(tensors, CtScheme("pack-quantized", "int", 4, "group", True, 64))
    asymmetric = CtScheme("pack-quantized", "int", 4, "group", False, 32)
    with pytest.raises(ValueError, match="weight_zero_point is missing"):
        ct_unpack(tensors, asymmetric)
    channel = CtScheme("int-quantized", "int", 8, "channel")
    with pytest.raises(ValueError, match="must be stored as I8, as the config says; found uint8"):
        ct_coded({"weight": np.ones((2, 3), np.uint8), "weight_scale": np.ones(2)}, channel)
    with pytest.raises(ValueError, match=r"weight_scale has shape \[3\]; wanted are \[1\] or \[2, 1\]"):
        ct_coded({"weight": np.ones((2, 3), np.int8), "weight_scale": np.ones(3)}, channel)
    static = CtScheme("int-quantized", "int", 8, "channel", activations="static")
    with pytest.raises(ValueError, match="input_scale is missing"):
        ct_coded({"weight": np.ones((2, 3), np.int8), "weight_scale": np.ones(2)}, static)
