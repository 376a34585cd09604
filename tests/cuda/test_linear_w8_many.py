"""Many tokens with weights of 8 bits, or of 4 with activations of 8, where the cases of conformance do not look."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from conformance.host_device import HostDevice
from engine.errors import KernelError
from engine.kernels.linear_w4 import linear_w4, linear_w4_gate_up_act
from engine.kernels.linear_w8_many import linear_w8_many, linear_w8_many_gate_up_act
from engine.kernels.notes import Notes
from engine.packed4 import PACKED, PACKED_GATED, blank4
from engine.weights import ActivationKind, LinearWeight, Weights, with_activations
from ref.quant.fp8 import fp8_linear, fp8_quantize
from ref.quant.int8 import int8_linear, int8_quantize

BF16 = np.dtype(ml_dtypes.bfloat16)
HOPPER = 132, 227 << 10, True  # SMs of an H200, shared memory of a block, and that it has wgmma
TOKENS, COLUMNS = 33, 144


def numbers(rows: int, seed: int) -> Any:
    return np.random.default_rng(seed).standard_normal((rows, COLUMNS)).astype(np.float32)


def blank(format: str, scale: tuple[int, ...], out: int = 2048, columns: int = 256) -> LinearWeight:
    dtype = np.int8 if format == "int8" else np.uint8
    return LinearWeight(
        format, out, columns, {"weight": np.zeros((out, columns), dtype), "scale": np.ones(scale, np.float32)}
    )


def entries(notes: Notes) -> list[str]:
    return [instance.entry for instance in notes.instances]


@pytest.mark.parametrize("out_features", [70, 72])
def test_integers_are_exact(out_features: int) -> None:
    """The vendor's integer product takes multiples of 4; 70 rows are multiplied as bfloat16, which holds 8 bits."""
    x, (codes, scale) = numbers(TOKENS, 0), int8_quantize(numbers(out_features, 1))
    xq, x_scale = int8_quantize(x)
    weight = LinearWeight("int8", out_features, COLUMNS, {"weight": codes, "scale": scale})
    y = linear_w8_many(xq, x_scale, weight, device=HostDevice(), dtype=np.float32)
    np.testing.assert_array_equal(y, int8_linear(x, codes, scale))


@pytest.mark.parametrize("axis", [None, -1])
def test_fp8_with_a_wide_answer(axis: int | None) -> None:
    """Sums of 144 products in float32, in any order: 2 · 144 roundings of the sum of magnitudes at most."""
    x, (codes, scale) = numbers(TOKENS, 0), fp8_quantize(numbers(72, 1), axis)
    xq, x_scale = fp8_quantize(x)
    weight = LinearWeight("fp8", 72, COLUMNS, {"weight": codes, "scale": np.atleast_1d(scale)})
    y = linear_w8_many(xq, x_scale, weight, device=HostDevice(), dtype=np.float32)
    wide = fp8_linear(x.astype(np.float64), codes, scale.astype(np.float64))
    np.testing.assert_allclose(y, wide, rtol=0, atol=2 * COLUMNS * 2.0**-24 * np.abs(x).sum(1).max() * 4)


@pytest.mark.parametrize(
    ("num_tokens", "tiles"),
    [(1, "1, 6"), (1000, "1, 6"), (1100, "2, 4")],  # 8 and 9 tiles of 128 tokens by 8 of 256 rows for 66 pairs of SMs
)
def test_tiles_go_by_idle_sms(num_tokens: int, tiles: str) -> None:
    notes, x = Notes(*HOPPER), np.zeros((num_tokens, 256), np.int8)
    linear_w8_many(x, np.ones(num_tokens, np.float32), blank("int8", (2048,)), device=notes, dtype=BF16)
    assert entries(notes) == [f"linear_w8_sm90<bf16, signed char, kOuter, kNone, {tiles}>"]


@pytest.mark.parametrize(("out", "fused"), [(256, True), (144, False)])
def test_gates_in_blocks(out: int, fused: bool) -> None:
    """A tile of 64 gates has one scale, and so have those of the second half, only if the halves are of whole 64s."""
    notes, weight = Notes(*HOPPER), blank("fp8", (-(-out // 128), 2), out)
    x, x_scale = np.zeros((40, 256), np.uint8), np.ones((40, 2), np.float32)
    linear_w8_many_gate_up_act(x, x_scale, weight, "silu", device=notes, dtype=BF16)
    activation = "kSilu" if fused else "kNone"
    assert entries(notes)[0] == f"linear_w8_sm90<bf16, e4m3, kBlocks, {activation}, 1, 6>"
    assert len(entries(notes)) == (1 if fused else 2)


@pytest.mark.parametrize(
    ("x", "x_scale", "weight", "message"),
    [
        (np.zeros((3, 256), np.uint8), np.ones(3, np.float32), blank("int8", (2048,)), "x is uint8; expected int8"),
        (np.zeros((3, 128), np.int8), np.ones(3, np.float32), blank("int8", (2048,)), "x has shape"),
        (np.zeros((3, 256), np.int8), np.ones(2, np.float32), blank("int8", (2048,)), "x_scale has shape"),
        (np.zeros((3, 256), np.uint8), np.ones(3, np.float32), blank("fp8", (16, 2)), "x_scale has shape"),
        (np.zeros((3, 256), np.uint8), np.ones(3, np.float32), blank("fp8", (7,)), "scale has shape"),
        (np.zeros((3, 256), np.uint8), np.ones((3, 2), np.float32), blank("fp8", (15, 2)), "scale has shape"),
    ],
)
def test_refusals(x: Any, x_scale: Any, weight: LinearWeight, message: str) -> None:
    with pytest.raises(KernelError, match=f"linear_w8_many: {message}"):
        linear_w8_many(x, x_scale, weight, device=Notes(*HOPPER), dtype=BF16)


@pytest.mark.parametrize(
    ("num_tokens", "kind", "group_size", "wanted"),
    [
        (255, "int8", 128, ["linear_w4_sm90<bf16, kNone, true, 1, 5>"]),
        (256, "", 128, ["linear_w4_sm90<bf16, kNone, true, 1, 5>"]),
        (
            256,
            "int8",
            128,
            [
                "quantize<signed char, false, bf16, 1, true>",
                "linear_w4a8_sm90<bf16, signed char, kNone, true, 1, 1, 6>",
            ],
        ),
        (
            256,
            "fp8",
            32,
            ["quantize<e4m3, false, bf16, 1, true>", "linear_w4a8_sm90<bf16, e4m3, kNone, true, 4, 1, 6>"],
        ),
    ],
)
def test_when_activations_of_packed_weights_are_quantized(
    num_tokens: int, kind: ActivationKind, group_size: int, wanted: list[str]
) -> None:
    notes, packed = Notes(*HOPPER), LinearWeight(PACKED, 128, 256, blank4(128, 256, group_size, True))
    weight = with_activations(Weights({"layer": packed}, {}), kind).linears["layer"]
    linear_w4(np.zeros((num_tokens, 256), BF16), weight, device=notes)
    assert entries(notes) == wanted


@pytest.mark.parametrize(
    ("kind", "num_tokens", "rows", "columns", "kernel"),
    [  # what was quickest on an H200: layers of 72B, one of its halves, one of 8B
        ("int8", 256, 10240, 8192, "kNone, false, 1, 2, 4"),  # 75 µs, 86 with 16 bits, 97 with one product
        ("int8", 384, 10240, 8192, "kNone, false, 1, 1, 6"),  # 98, 119, 148 with two
        ("int8", 512, 10240, 8192, "linear_w4_sm90"),  # 124, 138 and 149 with codes
        ("fp8", 512, 10240, 8192, "linear_w4_sm90"),
        ("fp8", 256, 8192, 8192, "linear_w4_sm90"),  # 56 and 59
        ("int8", 256, 8192, 29568, "linear_w4_sm90"),  # 170 and 177
        ("fp8", 2048, 8192, 29568, "kNone, false, 1, 2, 4"),  # 1019 and 1277
        ("fp8", 1024, 5120, 8192, "linear_w4_sm90"),  # 124 and 140
        ("int8", 512, 4096, 4096, "kNone, false, 1, 1, 6"),  # 29 and 34
    ],
)
def test_activations_are_quantized_where_that_is_quicker(
    kind: ActivationKind, num_tokens: int, rows: int, columns: int, kernel: str
) -> None:
    notes, weight = Notes(*HOPPER), LinearWeight(PACKED, rows, columns, blank4(rows, columns, 128, False), None, kind)
    linear_w4(np.zeros((num_tokens, columns), BF16), weight, device=notes)
    assert kernel in entries(notes)[-1]


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_other_gpus_round_activations_from_the_same_number_on(kind: ActivationKind) -> None:
    weight = LinearWeight(PACKED, 64, 8192, blank4(64, 8192, 128, False), None, kind)
    names = []
    for num_tokens in (255, 256):
        notes = Notes()
        linear_w4(np.zeros((num_tokens, 8192), BF16), weight, device=notes)
        names.append("quantize" in [instance.stem for instance in notes.instances])
    assert names == [False, True]


def test_gated_packed_weights_too() -> None:
    notes = Notes(*HOPPER)
    weight = LinearWeight(PACKED_GATED, 128, 256, blank4(128, 256, 128, False), None, "fp8")
    y = linear_w4_gate_up_act(np.zeros((300, 256), BF16), weight, "silu", device=notes)
    assert y.shape == (300, 64)
    assert entries(notes)[-1] == "linear_w4a8_sm90<bf16, e4m3, kSilu, false, 1, 1, 6>"


@pytest.mark.parametrize(
    ("num_tokens", "rows", "products"), [(256, 8448, 1), (256, 8456, 2), (512, 4096, 1), (512, 4352, 2)]
)
def test_a_product_more_where_tiles_are_enough_for_half_of_the_sms(num_tokens: int, rows: int, products: int) -> None:
    """Of 256 tokens by 256 rows, for 66 pairs of SMs."""
    notes = Notes(*HOPPER)
    weight = LinearWeight(PACKED, rows, 256, blank4(rows, 256, 128, False), None, "int8")
    linear_w4(np.zeros((num_tokens, 256), BF16), weight, device=notes)
    assert entries(notes)[-1].endswith(f"false, 1, {products}, {6 if products == 1 else 4}>")


def test_weights_of_other_formats_stay_as_they_are() -> None:
    dense = LinearWeight("dense", 8, 8, {"weight": np.zeros((8, 8), BF16)})
    assert with_activations(Weights({"head": dense}, {}), "int8").linears["head"] is dense
