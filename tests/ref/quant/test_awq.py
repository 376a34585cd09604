"""ref.quant.awq: the order of nibbles, for weights and zeros alike."""

from typing import Any

import numpy as np
import pytest

from ref.quant.awq import AwqConfig, awq_pack, awq_unpack, parse_awq_config
from ref.quant.groups import GroupedInt, grouped_dequantize, grouped_linear, grouped_quantize


def test_a_word_by_hand() -> None:
    """Outputs 0 to 7 hold their own number: read upwards a word is 0, 2, 4, 6, 1, 3, 5, 7."""
    q = np.arange(8, dtype=np.uint8)[:, None]
    tensors = awq_pack(GroupedInt(4, q, np.ones((8, 1)), q, np.zeros(1, np.int64)))
    assert tensors["qweight"].tolist() == tensors["qzeros"].tolist() == [[0x75316420]]


@pytest.mark.parametrize("group_size", [32, 64, -1])
def test_qnt_04_columns_keep_their_own_zero_and_scale(group_size: int) -> None:
    """QNT-04: output j holds j mod 16, zero (j + 3) mod 16, scale 1 + j / 1024 (exact in float16 to j < 1024)."""
    out, n = 64, 128
    j = np.arange(out)
    num_groups = 1 if group_size == -1 else n // group_size
    q = np.tile((j % 16).astype(np.uint8)[:, None], (1, n))
    zeros = np.tile(((j + 3) % 16).astype(np.uint8)[:, None], (1, num_groups))
    scales = np.tile((1 + j / 1024).astype(np.float16)[:, None], (1, num_groups))
    weight = GroupedInt(4, q, scales, zeros, np.arange(n) // (n // num_groups))
    found = awq_unpack(awq_pack(weight), AwqConfig(group_size))
    for field in ("q", "scales", "zeros", "g_idx"):
        np.testing.assert_array_equal(getattr(found, field), getattr(weight, field))
    expected = (j % 16 - (j + 3) % 16) * (1 + j / 1024)
    y = grouped_linear(np.eye(n), found)  # a unit vector picks one input of every output
    np.testing.assert_array_equal(y, np.tile(expected, (n, 1)))


def test_a_random_weight_comes_back() -> None:
    weight = np.random.default_rng(0).standard_normal((24, 96)).astype(np.float32)
    packed = grouped_quantize(weight, 4, 32, symmetric=False)
    tensors = awq_pack(packed)
    assert tensors["qweight"].shape == (96, 3)
    assert tensors["qzeros"].shape == (3, 3)
    found = awq_unpack(tensors, AwqConfig(32))
    np.testing.assert_array_equal(found.q, packed.q)
    np.testing.assert_allclose(grouped_dequantize(found), grouped_dequantize(packed), rtol=2**-11)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"bits": 8, "group_size": 32}, "bits is 8; AWQ has 4"),
        ({"bits": 4, "group_size": 32, "version": "gemv"}, "version 'gemv' is not supported"),
        ({"bits": 4, "group_size": 32, "zero_point": False}, "zero_point is false"),
        ({"bits": 4}, "group_size must be -1 or a positive integer, found None"),
    ],
)
def test_what_is_not_known_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_awq_config(config)


def test_the_names_of_both_writers() -> None:
    assert parse_awq_config({"w_bit": 4, "q_group_size": 64, "version": "GEMM"}) == AwqConfig(64)


def test_tensors_that_do_not_fit_are_refused() -> None:
    tensors = awq_pack(grouped_quantize(np.ones((8, 64)), 4, 32, symmetric=False))
    with pytest.raises(ValueError, match=r"qzeros has shape \[2, 1\]; group_size 64 .* asks for \[1, 1\]"):
        awq_unpack(tensors, AwqConfig(64))
    with pytest.raises(ValueError, match="scales is missing"):
        awq_unpack({"qweight": tensors["qweight"], "qzeros": tensors["qzeros"]}, AwqConfig(32))
    with pytest.raises(ValueError, match="9 values of 4 bits fill no whole int32"):
        awq_pack(grouped_quantize(np.ones((9, 64)), 4, 32, symmetric=False))
