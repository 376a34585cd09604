"""ref.quant.kv: scales per token and head, pages in any order, and attention over what was rounded."""

import numpy as np
import pytest

from ref.attention import attention_dense
from ref.numerics import relative_error
from ref.quant.kv import kv_dequantize, kv_quantize, kv_quantize_static, kv_quantized_gather, kv_quantized_write


def test_a_token_by_hand() -> None:
    """Two heads with their own steps: 254 / 127 = 2 and 1; in fp8 the largest becomes 448."""
    k = np.array([[[254.0, -3], [127, 1]]])
    codes, scales = kv_quantize(k, "int8")
    assert codes.tolist() == [[[127, -2], [127, 1]]]
    assert scales.tolist() == [[2, 1]]
    codes, scales = kv_quantize(np.array([[[896.0, -1], [448, 1]]]), "fp8")
    assert codes.tolist() == [[[0x7E, 0xB0], [0x7E, 0x38]]]
    assert scales.tolist() == [[2, 1]]
    assert kv_dequantize(codes, scales).tolist() == [[[896, -1], [448, 1]]]


@pytest.mark.parametrize(("kind", "dtype", "bound"), [("int8", np.int8, 0.5 / 127), ("fp8", np.uint8, 1 / 16)])
def test_pages_come_back_in_order(kind: str, dtype: type, bound: float) -> None:
    """Blocks out of order, a padding token, and garbage in all that was not written."""
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 6, 2, 16))
    caches = [np.full((4, 4, 2, 16), 77, dtype) for _ in range(2)]
    scales = [np.full((4, 4, 2), np.nan, np.float32) for _ in range(2)]
    slots = np.array([12, 13, 14, 15, 4, -1])  # block 3, then block 1
    kv_quantized_write(k, v, slots, *caches, *scales)
    for x, cache, scale in zip((k, v), caches, scales, strict=True):
        found = kv_quantized_gather(cache, scale, np.array([3, 1, 0]), 5)
        largest = np.abs(x[:5]).max(-1, keepdims=True)
        assert np.all(np.abs(found - x[:5]) <= largest * bound * 1.00001)
        assert np.isnan(scale).sum() == (16 - 5) * 2


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_chunks_do_not_matter(kind: str) -> None:
    k = np.random.default_rng(1).standard_normal((5, 2, 8)).astype(np.float32)
    whole = kv_quantize(k, kind)
    parts = [kv_quantize(k[i : i + 2], kind) for i in (0, 2, 4)]
    for index in (0, 1):
        np.testing.assert_array_equal(np.concatenate([part[index] for part in parts]), whole[index])


@pytest.mark.parametrize(("kind", "bound"), [("int8", 0.02), ("fp8", 0.06)])
def test_attention_over_a_rounded_cache(kind: str, bound: float) -> None:
    """The error of an average of values is at most that of a value: rms 0.3 % (int8), 2.6 % (fp8), and the scores'."""
    q, k, v = np.random.default_rng(2).standard_normal((3, 40, 2, 32))
    rounded = [kv_dequantize(*kv_quantize(x, kind)).astype(np.float64) for x in (k, v)]
    error = relative_error(attention_dense(q, *rounded, 32**-0.5), attention_dense(q, k, v, 32**-0.5))
    assert 1e-4 < error < bound


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_qnt_09_heads_decide_about_themselves(kind: str) -> None:
    """QNT-09: zeros, tiny, inf and NaN in one head of one token."""
    k = np.ones((5, 2, 4), np.float32)
    k[0, 0], k[1, 0], k[2, 0, 1], k[3, 0, 1] = 0, 1e-8, np.inf, np.nan
    found = kv_dequantize(*kv_quantize(k, kind))
    np.testing.assert_allclose(found[:, 1], 1, rtol=1e-6)
    np.testing.assert_allclose(found[4], 1, rtol=1e-6)
    assert found[0, 0].tolist() == [0] * 4
    np.testing.assert_allclose(found[1, 0], 1e-8, rtol=1e-5)
    assert np.isnan(found[2:4, 0]).any(-1).all()


@pytest.mark.parametrize("scale", [0.0, -0.5, np.nan, np.inf])
def test_qnt_09_a_bad_static_scale_is_an_error(scale: float) -> None:
    """QNT-09: a KV scale of 0, NaN or below zero is never replaced by a guess."""
    with pytest.raises(ValueError, match="v_scale must be finite and positive"):
        kv_quantize_static(np.ones((1, 1, 2)), np.array(scale), "fp8", "v_scale")


def test_static_scales() -> None:
    x = np.array([[[1.0, -300]]])
    assert kv_quantize_static(x, np.array(0.5), "fp8").tolist() == [[[0x40, 0xFE]]]  # 2, and −600 saturates
    assert kv_quantize_static(x, np.array([0.5]), "int8").tolist() == [[[2, -127]]]


def test_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="of kind int8, fp8; found 'int4'"):
        kv_quantize(np.ones((1, 1, 2)), "int4")
