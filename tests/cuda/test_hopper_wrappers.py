"""What wrappers launch on Hopper, on a device that only takes notes, and how arrays are described to the driver."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from engine.errors import KernelError
from engine.kernels import tensor_map as maps
from engine.kernels.attention import attention_prefill
from engine.kernels.device import Argument, Boxes, Dims, Instance
from engine.kernels.linear import linear_gate_up_act
from engine.kernels.notes import Notes
from engine.weights import LinearWeight

Array = NDArray[Any]
BF16: Any = ml_dtypes.bfloat16


class Hopper(Notes):
    """Keeps the arguments of the last launch too."""

    arguments: Sequence[Argument] = ()
    grid: Dims = ()

    def __init__(self, has_wgmma: bool = True) -> None:
        super().__init__(num_sms=5, max_shared_bytes=227 << 10, has_wgmma=has_wgmma)

    def launch(
        self, instance: Instance, grid: Dims, block: Dims, arguments: Sequence[Argument], shared_bytes: int = 0
    ) -> None:
        self.arguments, self.grid = arguments, grid
        super().launch(instance, grid, block, arguments, shared_bytes)

    def matmul(self, x: Array, weight: Array, out: Array) -> None:
        pass


def gated(
    num_tokens: int, size: int, device: Hopper, dtype: Any = BF16, bias: bool = False, in_features: int = 16
) -> str:
    """The stem of the last kernel."""
    weight = np.zeros((2 * size, in_features), dtype)
    biases = np.zeros(2 * size, dtype) if bias else None
    stored = LinearWeight("dense", 2 * size, in_features, {"weight": weight}, biases)
    y = linear_gate_up_act(np.zeros((num_tokens, in_features), dtype), stored, device=device)
    assert y.shape == (num_tokens, size)
    return device.instances[-1].stem


def test_products_with_an_activation_of_many_tokens() -> None:
    """Two pairs of SMs, work for 27 tiles of 256 tokens and 128 numbers each: from there on it is one kernel."""
    device = Hopper()
    assert gated(27 * 256, 128, device) == "linear_gated_sm90"
    assert device.instances == (Instance("linear_gated_sm90", "linear_gated_sm90<bf16, kSilu, 3>"),)
    assert device.grid == (4,)
    x, weight, *_ = device.arguments
    assert isinstance(x, Boxes)
    assert isinstance(weight, Boxes)
    assert (x.array.shape, weight.array.shape, x.box) == ((27 * 256, 16), (256, 16), (128, 64))
    assert gated(27 * 256 - 1, 128, Hopper()) == "activation"
    assert gated(256, 27 * 128, Hopper()) == "linear_gated_sm90"


@pytest.mark.parametrize(
    "other",
    [
        {"device": Hopper(has_wgmma=False)},
        {"bias": True},
        {"dtype": np.float32},
        {"size": 8 * 16 + 4},
        {"in_features": 20},
    ],
    ids=["another-gpu", "bias", "float32", "odd-size", "odd-rows"],
)
def test_products_that_the_kernel_cannot_do(other: dict[str, Any]) -> None:
    assert gated(**{"num_tokens": 9000, "size": 128, "device": Hopper(), **other}) == "activation"


@pytest.mark.parametrize(("block_size", "box"), [(16, 16), (256, 16), (3, 3)])
def test_attention_takes_the_caches_in_boxes(block_size: int, box: int) -> None:
    device, cache = Hopper(), np.zeros((4, block_size, 2, 128), BF16)
    bounds, lens = np.array([0, 3], np.int32), np.array([3], np.int32)
    table = np.zeros((1, 4), np.int32)
    attention_prefill(np.zeros((3, 4, 128), BF16), cache, cache, table, bounds, lens, 0.1, device=device)
    assert device.instances[-1].stem == "attention_prefill_sm90"
    boxes = [one for one in device.arguments if isinstance(one, Boxes)]
    assert [(one.array.shape, one.box) for one in boxes] == 2 * [((4, block_size, 2, 128), (1, box, 1, 64))]


class Driver:
    """Writes down what it is asked for, and gives a map of ones."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.asked: list[Any] = []

    def cuTensorMapEncodeTiled(self, place: Any, *asked: Any) -> int:
        assert place.value % 64 == 0
        ctypes.memset(place, 1, 128)
        self.asked += [list(one) if hasattr(one, "__len__") else one for one in asked]
        return self.status


class OnDevice:
    """As much of an array as is described."""

    def __init__(self, address: int) -> None:
        self.data = type("Memory", (), {"ptr": address})
        self.dtype, self.shape, self.strides = np.dtype(BF16), (5, 16, 2, 128), (8192, 512, 256, 2)
        self.itemsize = self.dtype.itemsize


def test_the_driver_is_told_the_last_axis_first(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr(maps, "_library", lambda: driver)
    found = maps.tensor_map(Boxes(OnDevice(0x7000), (1, 16, 1, 64)))
    assert found.raw == bytes([1]) * 128
    kind, rank, address, sizes, strides, box, steps, *rest = driver.asked
    assert (kind, rank.value, address.value) == (9, 4, 0x7000)
    assert (sizes, strides[:3], box, steps) == ([128, 2, 16, 5], [256, 512, 8192], [64, 1, 16, 1], [1, 1, 1, 1])
    assert rest == [0, 3, 2, 0]
    assert maps.tensor_map(Boxes(OnDevice(0x7000), (1, 16, 1, 64))) is found, "the same array is described once"


def test_a_row_of_a_box_says_how_it_is_swizzled(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr(maps, "_library", lambda: driver)
    maps.tensor_map(Boxes(OnDevice(0x7000), (1, 16, 1, 32)))
    assert driver.asked[-4:] == [0, 2, 2, 0]


def test_what_the_driver_refuses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maps, "_library", lambda: Driver(status=1))
    with pytest.raises(KernelError, match=r"refuses an array \[5, 16, 2, 128\] of bfloat16 .* at 0x7008 .* CUresult 1"):
        maps.tensor_map(Boxes(OnDevice(0x7008), (1, 16, 1, 64)))
