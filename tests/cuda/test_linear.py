"""The linear kernel against ref, in shapes that fill no tile, and planted faults that these cases must see."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from conformance.compare import compare
from conformance.host import KernelFault
from conformance.host_build import CUDA
from conformance.host_device import HostDevice
from conformance.memory import DTYPES
from conformance.tolerance import RULE
from engine.errors import KernelError
from engine.kernels.activation import gate_up_act
from engine.kernels.device import Instance
from engine.kernels.linear import (
    CHOICES,
    GATED_CHOICES,
    Choices,
    Skinny,
    Wgmma,
    choose,
    launch,
    linear,
    linear_gate_up_act,
    logits,
)
from engine.kernels.notes import Notes
from engine.weights import LinearWeight
from ref.linear import linear as ref_linear
from ref.numerics import round_to
from tests.cuda.conftest import Verdict
from tests.cuda.isolated import planted

Array = NDArray[Any]

SKINNY = Skinny(1, 2, 2)
WIDE_SKINNY = Skinny(2, 1, 3)
ORDERS = (("in_step", 0), ("greedy", 0), ("random", 1))


@dataclass(frozen=True)
class Shape:
    num_tokens: int
    out_features: int
    in_features: int
    bias: bool = False


FEW = tuple(Shape(m, 17 + m, 8 * m, bias=m % 2 == 0) for m in range(1, 9))
SOME = tuple(Shape(m, 33, 8 * m + 400, bias=m % 2 == 1) for m in range(9, 18))
RUNS = {
    "skinny": (SKINNY, "bfloat16", (*FEW, *SOME)),
    "skinny-float16": (SKINNY, "float16", (Shape(8, 40, 72, True), Shape(3, 16, 264))),
    "wide-skinny": (WIDE_SKINNY, "bfloat16", (Shape(1, 32, 8), Shape(7, 65, 1000, True))),
}


@cache
def device(order: tuple[str, int] = ORDERS[0], sanitizer: str = "") -> HostDevice:
    return HostDevice(*order, sanitizer=sanitizer)


def normal(shape: Shape, storage: str) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return _inputs(shape, storage, lambda *size: rng.standard_normal(size, np.float32))


def integers(shape: Shape, storage: str) -> dict[str, Any]:
    """Of which every sum is exact in float32: what comes out has been rounded once, or it is wrong."""
    rng = np.random.default_rng(1)
    return _inputs(shape, storage, lambda *size: rng.integers(-4, 5, size))


def _inputs(shape: Shape, storage: str, make: Callable[..., Array]) -> dict[str, Any]:
    """x is a part of longer rows of NaN."""
    dtype: Any = DTYPES[storage]
    rows = np.full((shape.num_tokens, shape.in_features + 16), np.nan, dtype)
    x = rows[:, 8:-8]
    x[...] = make(*x.shape)
    weight = make(shape.out_features, shape.in_features).astype(x.dtype)
    return {"x": x, "weight": weight, "bias": make(shape.out_features).astype(x.dtype) if shape.bias else None}


def in_type(dtype: Any, x: Array, weight: Array, bias: Array | None) -> Array:
    return ref_linear(x.astype(dtype), weight.astype(dtype), None if bias is None else bias.astype(dtype))


def run(on: HostDevice, choice: Skinny, x: Array, weight: Array, bias: Array | None, dtype: Any = None) -> Array:
    y = np.full((len(x) + 2, len(weight)), np.nan, dtype or x.dtype)  # two rows more, which must stay as they are
    launch(choice, x, weight, bias, y[1:-1], on)
    assert np.isnan(y[[0, -1]].astype(np.float32)).all(), "wrote outside y"
    assert not on.counters.any(), "left a counter that is not zero"
    return y[1:-1]


def problems(on: HostDevice, choice: Skinny, shape: Shape, storage: str) -> list[str]:
    """What is wrong with normal numbers, within the tolerance, and with integers, to the bit."""
    given = normal(shape, storage)
    actual = run(on, choice, **given).astype(np.float32)
    yardstick = round_to(in_type(np.float32, **given), storage).astype(np.float32)
    found = [compare(actual, in_type(np.float64, **given), yardstick, RULE, storage).problem]
    given = integers(shape, storage)
    different = run(on, choice, **given).astype(np.float32) != round_to(in_type(np.float32, **given), storage)
    found.append(f"has {np.sum(different)} sums of integers that are not exact" if different.any() else "")
    return [f"y of {choice} for {shape} {problem}" for problem in found if problem]


@pytest.mark.parametrize(("choice", "storage", "shapes"), RUNS.values(), ids=RUNS)
def test_against_ref(choice: Skinny, storage: str, shapes: Sequence[Shape]) -> None:
    for number, shape in enumerate(shapes):
        assert problems(device(ORDERS[number % len(ORDERS)]), choice, shape, storage) == []


def test_float32_out() -> None:
    """Logits: float32 sums of 16-bit products, rounded to nothing."""
    given = normal(Shape(7, 45, 136, bias=True), "bfloat16")
    actual = run(device(), SKINNY, **given, dtype=np.float32)
    truth, yardstick = in_type(np.float64, **given), in_type(np.float32, **given)
    assert compare(actual, truth, yardstick, RULE, "float32").problem == ""


def test_nothing_outside_is_touched() -> None:
    """Under AddressSanitizer."""
    assert problems(device(sanitizer="address"), SKINNY, Shape(5, 35, 648, bias=True), "bfloat16") == []


@pytest.mark.parametrize("num_tokens", [1, 8, 9, 16, 17, 33, 64, 100, 128])
@pytest.mark.parametrize("out_features", [96, 4096, 28672, 128256])
def test_choices_fit_the_smallest_gpus(num_tokens: int, out_features: int) -> None:
    """KRN: what is chosen for GPUs that are not Hopper takes all tokens, in blocks that they can run."""
    choice = choose(np.empty((num_tokens, 64), DTYPES["bfloat16"]), out_features, Notes(num_sms=84))
    assert choice is None or (isinstance(choice, Skinny) and num_tokens <= 32 and choice.warps <= 32)


def test_what_only_hopper_has() -> None:
    """On a device that launches nothing; another GPU is never given it."""
    x, weight, y = (np.zeros(shape, DTYPES["bfloat16"]) for shape in ((100, 4096), (64, 4096), (100, 64)))
    hopper = Notes(num_sms=132, max_shared_bytes=227 << 10, has_wgmma=True)
    for in_features, splits in ((4096, 4), (512, 2), (256, 1)):  # as many as have as many steps as stages
        launch(Wgmma(128, 2, 4), x[:, :in_features], weight[:, :in_features].copy(), None, y, hopper)
        entry = f"linear_tiles_sm90<bf16, bf16, kNone, 128, 2, 4, {splits}>"
        assert list(hopper.instances)[-1] == Instance("linear_tiles_sm90", entry)
    for num_tokens in (24, 64):
        for out_features in (4096, 28672, 128256):
            for choices in (CHOICES, GATED_CHOICES):
                assert not isinstance(choose(x[:num_tokens], out_features, Notes(num_sms=132), choices), Wgmma)


@pytest.mark.parametrize("choices", [CHOICES, GATED_CHOICES], ids=["plain", "gated"])
def test_choices_are_in_order(choices: Choices) -> None:
    assert [line[:2] for line in choices] == sorted(line[:2] for line in choices)
    assert {line[0] for line in choices} == {line[0] for line in choices if line[1] == float("inf")}


def weight_of(shape: Shape, dtype: Any) -> tuple[Array, LinearWeight]:
    given = normal(shape, dtype)
    tensors = {"weight": given["weight"]}
    return given["x"], LinearWeight("dense", shape.out_features, shape.in_features, tensors, given["bias"])


@pytest.mark.parametrize("function", [linear, logits])
def test_wrapper(function: Callable[..., Array]) -> None:
    """Few tokens by a kernel, many by the library; the same answer within bfloat16."""
    for num_tokens, is_ours in ((3, True), (1000, False)):
        x, weight = weight_of(Shape(num_tokens, 24, 40, bias=True), "bfloat16")
        notes = Notes()
        function(x, weight, device=notes)
        assert bool(notes.instances) == is_ours
        y = function(x, weight, device=device())
        assert y.dtype == (x.dtype if function is linear else np.float32)
        truth = in_type(np.float64, x, weight.tensors["weight"], weight.bias)
        np.testing.assert_allclose(y.astype(np.float64), truth, atol=2**-8 * np.abs(truth).max() * 2)


@pytest.mark.parametrize(
    ("shape", "storage"), [(Shape(3, 24, 41), "bfloat16"), (Shape(3, 24, 40), "float32")], ids=["41", "float32"]
)
def test_what_the_kernels_cannot_read_goes_to_the_library(shape: Shape, storage: str) -> None:
    x, weight = weight_of(shape, storage)
    notes = Notes()
    linear(x, weight, device=notes)
    assert not notes.instances


def test_no_tokens() -> None:
    x, weight = weight_of(Shape(1, 24, 40), "bfloat16")
    assert linear(x[:0], weight, device=device()).shape == (0, 24)
    assert linear_gate_up_act(x[:0], weight, device=device()).shape == (0, 12)


GATED = {  # 8 · an odd number of features, and none of 8
    "skinny": (SKINNY, Shape(5, 2 * 40, 104, bias=True), "kSilu"),
    "wide-skinny": (WIDE_SKINNY, Shape(7, 2 * 27, 264), "kGeluTanh"),
}


@pytest.mark.parametrize(("choice", "shape", "activation"), GATED.values(), ids=GATED)
def test_gated_is_linear_and_then_the_activation(choice: Skinny, shape: Shape, activation: str) -> None:
    given = normal(shape, "bfloat16")
    names = {"kSilu": "silu", "kGeluTanh": "gelu_new"}
    expected = gate_up_act(run(device(), choice, **given), names[activation], device=device())
    y = np.full((shape.num_tokens + 2, shape.out_features // 2), np.nan, expected.dtype)
    launch(choice, **given, y=y[1:-1], device=device(), activation=activation)
    assert np.array_equal(y[1:-1], expected)
    assert np.isnan(y[[0, -1]].astype(np.float32)).all()


@pytest.mark.parametrize(
    ("num_tokens", "name"), [(8, "linear_skinny"), (64, "linear_tiles_sm90"), (128, "linear_tiles_sm90")]
)
def test_gated_has_choices_of_its_own(num_tokens: int, name: str) -> None:
    """Where a plain product of that size is cuBLAS's, since the activation would be a launch more."""
    hopper = Notes(num_sms=132, max_shared_bytes=227 << 10, has_wgmma=True)
    x, weight = (np.empty(shape, DTYPES["bfloat16"]) for shape in ((num_tokens, 4096), (28672, 4096)))
    linear_gate_up_act(x, LinearWeight("dense", 28672, 4096, {"weight": weight}, None), device=hopper)
    assert [instance.entry.partition("<")[0] for instance in hopper.instances] == [name]
    assert choose(x, 28672, hopper, CHOICES) != choose(x, 28672, hopper, GATED_CHOICES)


def test_gated_wrapper() -> None:
    """The same bits for few tokens and for many; an unknown activation is named."""
    for num_tokens in (3, 1000):
        x, weight = weight_of(Shape(num_tokens, 48, 40, bias=True), "bfloat16")
        y = linear_gate_up_act(x, weight, device=device())
        expected = gate_up_act(linear(x, weight, device=device()), device=device())
        assert np.array_equal(y, expected)
    with pytest.raises(KernelError, match="linear_gate_up_act: the activation 'tan' has no kernel; there are silu"):
        linear_gate_up_act(x[:3], weight, "tan", device=device())


def test_wrong_arguments() -> None:
    """A wrong shape or type raises before anything is launched, and names the argument."""
    x, weight = weight_of(Shape(3, 24, 40), "bfloat16")
    with pytest.raises(KernelError, match=r"linear: x has shape \[3, 39\]; expected \[any, 40\]"):
        linear(x[:, 1:], weight, device=device())
    with pytest.raises(KernelError, match="linear: x is float16; expected bfloat16"):
        linear(x.astype(np.float16), weight, device=device())
    with pytest.raises(KernelError, match="logits: the last axis of x has gaps"):
        logits(np.repeat(x, 2, axis=1)[:, ::2], weight, device=device())


MUTANTS = {  # fault: text found once in cuda/linear.cu, what replaces it
    "a warp's last step lost": ("kWarps - 1 - warp) / kWarps", "0 - warp) / kWarps"),
    "x read behind its row": ("= k < in_features ? load16", "= k < in_features + 8 ? load16"),
    "x of another step": ("(first + u + kAhead, v[u])", "(first + u + kAhead, v[kAhead - 1 - u])"),
    "warps added up too early": ("  __syncthreads();\n", ""),
    "a warp's sums lost": ("other < kWarps; ++other", "other < kWarps - 1; ++other"),
    "bias of another row": ("bias[row_of(row)]", "bias[row]"),
    "numbers of a step swapped": ("{v[u][t].z, v[u][t].w}", "{v[u][t].w, v[u][t].z}"),
    "rows behind the last written": ("first_row + out >= size || ", ""),
    "rounded before the bias": ("? sum : sum +", "? sum : to_float(from_float<T>(sum)) +"),
}


def judge(fault: str, folder: Path) -> str:
    shutil.copytree(CUDA / "include", folder / "include")
    (folder / "host").symlink_to(CUDA / "host")
    (folder / "linear.cu").write_text(planted((CUDA / "linear.cu").read_text("utf-8"), *MUTANTS[fault]), "utf-8")
    for order in ORDERS:
        mutated = HostDevice(*order, sanitizer="address" if "behind" in fault else "", folder=folder)
        try:
            if seen := problems(mutated, SKINNY, Shape(5, 75, 1016, True), "bfloat16"):
                return seen[0]
        except (KernelFault, AssertionError) as fault_:
            return f"{type(fault_).__name__} {fault_}"
    return ""


@pytest.mark.parametrize("fault", MUTANTS)
def test_planted_fault_is_seen(fault: str, verdict: Verdict) -> None:
    assert verdict(judge), "nothing is noticed"
