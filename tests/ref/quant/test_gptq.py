"""ref.quant.gptq: the file layout by hand, zeros of both formats, act-order, and what is refused."""

from typing import Any

import numpy as np
import pytest

from ref.quant.gptq import GptqConfig, gptq_pack, gptq_unpack, parse_gptq_config, parse_gptq_overrides
from ref.quant.groups import GroupedInt, grouped_dequantize, grouped_quantize, grouped_round, pack_words

BASE = {"quant_method": "gptq", "bits": 4, "group_size": 32}


def half_scaled(seed: int, bits: int, group_size: int, symmetric: bool, out: int = 16, n: int = 128) -> GroupedInt:
    """A random weight whose scales are float16, as files hold them."""
    weight = np.random.default_rng(seed).standard_normal((out, n))
    rounded = grouped_quantize(weight, bits, group_size, symmetric=symmetric)
    return grouped_round(weight, bits, rounded.scales.astype(np.float16), rounded.zeros, rounded.g_idx)


def test_a_module_by_hand() -> None:
    """8 inputs, 8 outputs, one group: q[o, i] = i, zero o, scale 2. qweight[0, o] holds inputs 0 to 7 upwards."""
    q = np.tile(np.arange(8, dtype=np.uint8), (8, 1))
    zeros = np.arange(8, dtype=np.uint8)[:, None]
    weight = GroupedInt(4, q, np.full((8, 1), 2.0, np.float16), zeros, np.zeros(8, np.int64))
    v1, v2 = gptq_pack(weight, "gptq"), gptq_pack(weight, "gptq_v2")
    assert v1["qweight"].tolist() == [[0x76543210] * 8]
    assert v1["qzeros"].tolist() == [[0x6543210F]]  # zeros 0 to 7, one less: 15, 0, 1 …
    assert v2["qzeros"].tolist() == [[0x76543210]]
    for tensors, name in ((v1, "gptq"), (v2, "gptq_v2")):
        found = grouped_dequantize(gptq_unpack(tensors, GptqConfig(4, -1, checkpoint_format=name)))
        assert found[3].tolist() == [-6, -4, -2, 0, 2, 4, 6, 8]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("name", ["gptq", "gptq_v2"])
def test_pack_and_unpack(bits: int, group_size: int, symmetric: bool, name: str) -> None:
    weight = half_scaled(bits, bits, group_size, symmetric)
    config = GptqConfig(bits, group_size, checkpoint_format=name)
    tensors = gptq_pack(weight, name)
    found = gptq_unpack(tensors, config)
    for field in ("q", "scales", "zeros", "g_idx"):
        np.testing.assert_array_equal(getattr(found, field), getattr(weight, field))
    without = {key: value for key, value in tensors.items() if key != "g_idx"}
    np.testing.assert_array_equal(gptq_unpack(without, config).g_idx, weight.g_idx)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [32, -1])
def test_qnt_03_zeros_of_both_formats(bits: int, group_size: int) -> None:
    """QNT-03: v1 zeros stored as 7, 15 and 0, and their meaning in v2, give the same floats and spoil no neighbour."""
    top = 2**bits - 1
    weight = half_scaled(7, bits, group_size, False)
    groups = weight.zeros.shape[1]
    stored = np.tile(np.array([top // 2, top, 0, top, top, 5, top, 1], np.uint8), 2)[:, None].repeat(groups, 1)
    meant = np.tile(np.array([top // 2 + 1, 0, 1, 0, 0, 6, 0, 2], np.uint8), 2)[:, None].repeat(groups, 1)
    v1 = gptq_pack(weight) | {"qzeros": pack_words(stored.T, bits, axis=1)}
    v2 = gptq_pack(weight) | {"qzeros": pack_words(meant.T, bits, axis=1)}
    from_v1 = gptq_unpack(v1, GptqConfig(bits, group_size, checkpoint_format="gptq"))
    from_v2 = gptq_unpack(v2, GptqConfig(bits, group_size, checkpoint_format="gptq_v2"))
    assert np.array_equal(from_v1.zeros, meant)
    np.testing.assert_array_equal(grouped_dequantize(from_v1), grouped_dequantize(from_v2))
    by_formula = (weight.q - meant[:, weight.g_idx].astype(float)) * weight.scales.astype(float)[:, weight.g_idx]
    np.testing.assert_array_equal(grouped_dequantize(from_v1), by_formula)


@pytest.mark.parametrize("group_size", [32, -1])
def test_act_order_is_the_permuted_weight(group_size: int) -> None:
    """Quantize with inputs in another order, put them back: g_idx says which scale belongs to which input."""
    order = np.random.default_rng(3).permutation(128)
    sorted_weight = half_scaled(3, 4, group_size, False)
    back = np.argsort(order)
    shuffled = GroupedInt(
        4, sorted_weight.q[:, back], sorted_weight.scales, sorted_weight.zeros, sorted_weight.g_idx[back]
    )
    found = gptq_unpack(gptq_pack(shuffled), GptqConfig(4, group_size, desc_act=True))
    np.testing.assert_array_equal(grouped_dequantize(found)[:, order], grouped_dequantize(sorted_weight))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 3}, "bits is 3"),
        ({"bits": None}, "bits is None"),
        ({"group_size": None}, "group_size must be -1 or a positive integer, found None"),
        ({"group_size": 0}, "found 0"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not supported; known are .*gptq_v2"),
        ({"pack_dtype": "int16"}, "only 'int32'"),
    ],
)
def test_qnt_03_08_what_is_not_known_is_refused(change: dict[str, Any], message: str) -> None:
    """QNT-03: an unknown format is an error. QNT-08: so is a config without group_size."""
    with pytest.raises(ValueError, match=message):
        parse_gptq_config({**BASE, **change})


def test_overrides_of_some_modules() -> None:
    """In their order; what is left out is in floating point."""
    dynamic = {r"-:.*\.0\.mlp": {}, r"+:.*\.up": {"bits": 8, "group_size": 64, "mse": 2.4}, r".*\.down": {"sym": True}}
    assert parse_gptq_overrides({**BASE, "dynamic": dynamic}) == (
        (r".*\.0\.mlp", None),
        (r".*\.up", GptqConfig(8, 64, False, "gptq")),
        (r".*\.down", GptqConfig(4, 32, False, "gptq", symmetric=True)),
    )
    assert parse_gptq_overrides(BASE) == ()


@pytest.mark.parametrize(
    ("dynamic", "message"),
    [
        ({"+:.*": {"bits": 2}}, r"bits is 2; .* \(dynamic\.\+:\.\*\)"),
        ({"+:(": {}}, "'\\+:\\(' is no regular expression"),
        ({".*": {"rank": 4}}, r"dynamic\.\.\*: rank cannot be changed"),
        ({".*": 4}, "must be an object, found 4"),
        ([], None),
        (["-:.*"], "dynamic must be an object"),
    ],
)
def test_overrides_that_are_not_known_are_refused(dynamic: Any, message: str | None) -> None:
    if message is None:
        assert parse_gptq_overrides({**BASE, "dynamic": dynamic}) == ()
        return
    with pytest.raises(ValueError, match=message):
        parse_gptq_overrides({**BASE, "dynamic": dynamic})


def test_config_by_keys() -> None:
    assert parse_gptq_config(BASE) == GptqConfig(4, 32, False, "gptq")
    assert parse_gptq_config(
        {**BASE, "checkpoint_format": "gptq_v2", "desc_act": True, "group_size": -1}
    ) == GptqConfig(4, -1, True, "gptq_v2")


def test_tensors_that_do_not_fit_are_refused() -> None:
    tensors, config = gptq_pack(half_scaled(1, 4, 32, True)), GptqConfig(4, 32)
    with pytest.raises(ValueError, match="qzeros is missing"):
        gptq_unpack({"qweight": tensors["qweight"], "scales": tensors["scales"]}, config)
    with pytest.raises(ValueError, match=r"qzeros has shape \[4, 2\]; bits 4 and group_size 64 .* ask for \[2, 2\]"):
        gptq_unpack(tensors, GptqConfig(4, 64))
    with pytest.raises(ValueError, match=r"group_size 48 does not divide 128 inputs; possible are .*32, 64, 128"):
        gptq_unpack(tensors, GptqConfig(4, 48))
    for wrong in (-1, 4):
        g_idx = tensors["g_idx"].copy()
        g_idx[5] = wrong
        with pytest.raises(ValueError, match="g_idx must hold 128 numbers from 0 to 3"):
            gptq_unpack(tensors | {"g_idx": g_idx}, config)
    del tensors["g_idx"]
    with pytest.raises(ValueError, match="desc_act is true but the module has no g_idx"):
        gptq_unpack(tensors, GptqConfig(4, 32, desc_act=True))
