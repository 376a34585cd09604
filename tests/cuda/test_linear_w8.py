"""Linear layers with weights of 8 bits where the cases of conformance do not look: who quantizes, and without FP8."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from conformance.host_device import HostDevice
from engine.coded8 import CodedActivations
from engine.errors import KernelError
from engine.kernels import quantize
from engine.kernels.activation import gate_up_act
from engine.kernels.linear_w8 import CHOICES, Few, linear_w8, linear_w8_gate_up_act
from engine.kernels.notes import Notes
from engine.kernels.quantize import add_norm_quant, norm_quant, quantize_activations
from engine.kernels.rmsnorm import add_rmsnorm, rmsnorm
from engine.weights import LinearWeight
from ref.quant.coded import CodedWeight, dequantize_weight
from ref.quant.fp8 import fp8_quantize
from ref.quant.fp8_block import fp8_block_quantize
from ref.quant.int8 import int8_quantize

Array = NDArray[Any]

IN, OUT = 400, 40
BF16 = np.dtype(ml_dtypes.bfloat16)
QUANTIZED = (("int8", 0.0), ("int8", 0.013), ("fp8", 0.0), ("fp8", 0.013), ("fp8_block", 0.0))  # kind, fixed scale
DECODED = (("fp8", BF16), ("fp8", np.dtype(np.float16)), ("fp8_block", BF16))


def weight_of(kind: str, input_scale: float = 0.0, out_features: int = OUT) -> LinearWeight:
    numbers = np.random.default_rng(0).standard_normal((out_features, IN), np.float32)
    codes: Array
    if kind == "int8":
        codes, scale = int8_quantize(numbers)
    else:
        codes, scale = fp8_quantize(numbers) if kind == "fp8" else fp8_block_quantize(numbers)
    fixed = {"input_scale": np.array([input_scale], np.float32)} if input_scale else {}
    format = "int8" if kind == "int8" else "fp8"
    bias = np.linspace(-3, 3, out_features, dtype=np.float32).astype(BF16)
    return LinearWeight(format, out_features, IN, {"weight": codes, "scale": scale, **fixed}, bias)


def tokens(num_tokens: int) -> Array:
    return np.random.default_rng(1).standard_normal((num_tokens, IN), np.float32).astype(BF16)


@pytest.mark.parametrize(("kind", "fixed"), QUANTIZED)
def test_who_quantizes_makes_no_difference(kind: str, fixed: float) -> None:
    check_quantized(kind, fixed, HostDevice())


def check_quantized(kind: str, fixed: float, device: HostDevice) -> None:
    weight = weight_of(kind, fixed)
    assert weight.bias is not None
    x = tokens(2)
    x[1, 5] = 7e4  # past what the fixed scale holds
    with patch.multiple(quantize, OWN_TOKENS=2):
        own = linear_w8(x, weight, device=device, dtype=np.float32)
    with patch.multiple(quantize, OWN_TOKENS=0):
        given = linear_w8(x, weight, device=device, dtype=np.float32)
    np.testing.assert_array_equal(own, given)
    assert np.isfinite(own).all()
    codes, scales = quantize_activations(x, kind, device=device, input_scale=weight.tensors.get("input_scale"))
    coded = codes.astype(np.float64) if kind == "int8" else codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    by_number = scales.repeat(128, 1)[:, :IN] if scales.ndim == 2 else scales[:, None]
    stored = CodedWeight(weight.tensors["weight"], weight.tensors["scale"], (128, 128) if kind == "fp8_block" else None)
    expected = (coded * by_number) @ dequantize_weight(stored).T + weight.bias.astype(np.float64)
    size = np.abs(coded * by_number) @ np.abs(dequantize_weight(stored)).T
    assert (np.abs(own - expected) <= size * IN * 2.0**-24).all()


def test_infinity_and_nan_are_a_token_s_own() -> None:
    x = tokens(4)
    x[1, 3], x[2, 7] = np.inf, np.nan
    y = linear_w8(x, weight_of("int8"), device=HostDevice(), dtype=np.float32)
    assert np.isnan(y[1:3]).all()
    others = linear_w8(tokens(4), weight_of("int8"), device=HostDevice(), dtype=np.float32)
    np.testing.assert_array_equal(y[[0, 3]], others[[0, 3]])


@pytest.mark.parametrize(("kind", "storage"), DECODED, ids=str)
def test_without_fp8_cores_weights_are_decoded(kind: str, storage: np.dtype[Any]) -> None:
    check_decoded(kind, storage, HostDevice(has_fp8=False))


def check_decoded(kind: str, storage: np.dtype[Any], device: HostDevice) -> None:
    """Every code but NaN is among the weights; x is not rounded to codes, and activations' own scales are not used."""
    weight = weight_of(kind, 0.0 if kind == "fp8_block" else 2.0)
    assert weight.bias is not None
    codes = weight.tensors["weight"]
    codes[:2, :127] = np.arange(127, dtype=np.uint8)
    codes[1, :127] += 128
    x = tokens(9).astype(storage)
    bias = weight.bias.astype(storage)
    weight = LinearWeight("fp8", OUT, IN, weight.tensors, bias)
    block = (128, 128) if kind == "fp8_block" else None
    numbers = dequantize_weight(CodedWeight(codes, weight.tensors["scale"], block))
    y = linear_w8(x, weight, device=device, dtype=np.float32)
    expected = x.astype(np.float64) @ numbers.T + bias.astype(np.float64)
    size = np.abs(x.astype(np.float64)) @ np.abs(numbers).T + 3
    assert (np.abs(y - expected) <= size * IN * 2.0**-24).all()


@pytest.mark.parametrize(("kind", "fixed"), QUANTIZED)
@pytest.mark.parametrize("num_tokens", [1, 3, 40])
def test_a_norm_in_codes_makes_no_difference(kind: str, fixed: float, num_tokens: int) -> None:
    """Bit by bit, and for one token as for many: what others a token comes with is of no account."""
    device, weight, x = HostDevice(), weight_of(kind, fixed), tokens(num_tokens)
    scale, residual = np.linspace(0.5, 2, IN).astype(BF16), tokens(num_tokens)[:, ::-1].copy()
    expected = linear_w8(rmsnorm(x, scale, 1e-5, device=device), weight, device=device)
    np.testing.assert_array_equal(
        linear_w8(norm_quant(x, scale, 1e-5, weight, device=device), weight, device=device), expected
    )
    normed, sums = add_rmsnorm(x, residual.copy(), scale, 1e-5, device=device)
    coded, same_sums = add_norm_quant(x, residual.copy(), scale, 1e-5, weight, device=device)
    assert isinstance(coded, CodedActivations) == (num_tokens > 1)
    np.testing.assert_array_equal(same_sums, sums)
    np.testing.assert_array_equal(linear_w8(coded, weight, device=device), linear_w8(normed, weight, device=device))


@pytest.mark.parametrize("num_tokens", [3, 40])
def test_a_norm_stays_in_numbers_without_fp8_cores(num_tokens: int) -> None:
    device, weight = HostDevice(has_fp8=False), weight_of("fp8")
    assert not isinstance(
        norm_quant(tokens(num_tokens), np.ones(IN, BF16), 1e-5, weight, device=device), CodedActivations
    )


def test_a_gate_in_one_block_with_its_other_half() -> None:
    """A tile of scales that holds gates and what they are multiplied by: the activation is a kernel of its own."""
    device, weight = HostDevice(), weight_of("fp8_block", out_features=OUT)
    x = tokens(3)
    y = linear_w8_gate_up_act(x, weight, "silu", device=device)
    np.testing.assert_array_equal(y, gate_up_act(linear_w8(x, weight, device=device), "silu", device=device))


@pytest.mark.parametrize("num_tokens", [1, 8, 16, 32])
@pytest.mark.parametrize("has_fp8", [False, True])
def test_every_choice_fits_a_common_card(num_tokens: int, has_fp8: bool) -> None:
    notes = Notes(has_fp8=has_fp8)
    wide = 28672
    tensors = {"weight": np.zeros((64, wide), np.uint8), "scale": np.ones((1, wide // 128), np.float32)}
    linear_w8(np.zeros((num_tokens, wide), BF16), LinearWeight("fp8", 64, wide, tensors), device=notes)
    for launch in notes.launches:
        assert launch.shared_bytes <= notes.max_shared_bytes


def test_a_common_card_has_fewer_stages_then_fewer_warps() -> None:
    """One token of 4096 columns: 12 warps of 4 stages take 204 KiB, of 2 stages 104, 8 warps of 2 stages 71."""
    entries = []
    for kibibytes in (227, 110, 99):
        notes = Notes(max_shared_bytes=kibibytes << 10)
        tensors = {"weight": np.zeros((64, 4096), np.int8), "scale": np.ones(64, np.float32)}
        linear_w8(np.zeros((1, 4096), BF16), LinearWeight("int8", 64, 4096, tensors), device=notes)
        entries += [instance.entry.removesuffix(">").split(", ")[-2:] for instance in notes.instances]
    assert entries == [["12", "4"], ["12", "2"], ["8", "2"]]


def test_choices_are_in_order() -> None:
    assert [most for most, _ in CHOICES] == sorted(most for most, _ in CHOICES)
    assert all(8 * few.token_tiles >= most for most, few in CHOICES)
    assert Few(2, 1, 8, 4).shared_bytes(1, 32, blocks=False, whole=False) == 8 * 4 * 33 * 128 + 2 * 8 * 36 * 4 + 16 + 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": np.zeros((OUT, IN), np.uint8)}, "weight is uint8; expected int8"),
        ({"weight": np.zeros((OUT, IN + 16), np.int8)}, r"weight has shape \[40, 416\]; expected \[40, 400\]"),
        ({"scale": np.ones(OUT - 1, np.float32)}, r"scale has shape \[39\]; expected \[40\]"),
        ({"scale": np.ones((1, 3), np.float32)}, r"scale has shape \[1, 3\]; expected \[1, 4\]"),
        ({"scale": np.ones(OUT, np.float16)}, "scale is float16; expected float32"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Array], message: str) -> None:
    weight = weight_of("int8")
    wrong = LinearWeight("int8", OUT, IN, {**weight.tensors, **change}, weight.bias)
    with pytest.raises(KernelError, match=f"linear_w8: {message}"):
        linear_w8(tokens(2), wrong, device=Notes())


def test_rows_that_are_no_multiple_of_16_are_refused() -> None:
    weight = LinearWeight("int8", 8, 24, {"weight": np.zeros((8, 24), np.int8), "scale": np.ones(8, np.float32)})
    with pytest.raises(KernelError, match="linear_w8: rows of the weight are 24 numbers; expected a multiple of 16"):
        linear_w8(np.zeros((1, 24), BF16), weight, device=Notes())


def test_float32_is_refused() -> None:
    with pytest.raises(KernelError, match="linear_w8: x is float32; expected bfloat16 or float16"):
        linear_w8(tokens(2).astype(np.float32), weight_of("int8"), device=Notes())
