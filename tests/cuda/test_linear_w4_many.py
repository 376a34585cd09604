"""What linear_w4 launches for many tokens, on a device that only takes notes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.errors import KernelError
from engine.kernels.device import Argument, Boxes, Dims, Instance
from engine.kernels.linear import linear, linear_gate_up_act
from engine.kernels.linear_w4_many import NARROW, WIDE
from engine.kernels.notes import Notes
from engine.packed4 import PACKED, PACKED_GATED, blank4
from engine.weights import LinearWeight

Array = NDArray[Any]


class Hopper(Notes):
    """Ten pairs of SMs; keeps the arguments of the last launch too."""

    def __init__(self, has_wgmma: bool = True) -> None:
        super().__init__(num_sms=21, max_shared_bytes=227 << 10, has_wgmma=has_wgmma)
        self.arguments: Sequence[Argument] = ()
        self.grid: Dims = ()
        self.products: list[Array] = []

    def launch(
        self, instance: Instance, grid: Dims, block: Dims, arguments: Sequence[Argument], shared_bytes: int = 0
    ) -> None:
        self.arguments, self.grid = arguments, grid
        super().launch(instance, grid, block, arguments, shared_bytes)

    def matmul(self, x: Array, weight: Array, out: Array) -> None:
        self.products.append(weight)


def packed(out_features: int, in_features: int, group_size: int = 128, gated: bool = False) -> LinearWeight:
    tensors = blank4(out_features, in_features, group_size, zeros=False)
    return LinearWeight(PACKED_GATED if gated else PACKED, out_features, in_features, tensors, None)


def launched(num_tokens: int, weight: LinearWeight, device: Hopper) -> Sequence[Argument]:
    linear(np.zeros((num_tokens, weight.in_features), np.float16), weight, device=device)
    return device.arguments


@pytest.mark.parametrize(("num_tokens", "stem"), [(128, NARROW.stem), (129, WIDE.stem)])
def test_narrow_tiles_for_no_more_tokens_than_one_has(num_tokens: int, stem: str) -> None:
    device = Hopper()
    x, *_ = launched(num_tokens, packed(1288, 256), device)
    assert [instance.stem for instance in device.instances] == [stem]
    assert device.grid == (20,)
    assert isinstance(x, Boxes)
    assert x.box == ((64, 64) if stem == NARROW.stem else (128, 64))


@pytest.mark.parametrize(
    ("group_size", "narrow", "wide"),
    [
        (32, (4, 0), (2, 0)),
        (64, (2, 0), (1, 0)),
        (128, (1, 0), (1, 1)),
        (512, (1, 2), (1, 3)),
        (2048, (1, 30), (1, 30)),
    ],
)
def test_groups_of_a_step(group_size: int, narrow: tuple[int, int], wide: tuple[int, int]) -> None:
    """A step has 128 columns in narrow tiles and 64 in wide ones."""
    for num_tokens, stages, (groups, shift), behind in ((100, 4, narrow, ()), (900, 5, wide, (1,))):
        device = Hopper()
        arguments = launched(num_tokens, packed(1024, 2048, group_size), device)
        assert tuple(arguments[-1 - len(behind) :]) == (shift, *behind)
        assert device.instances[-1].entry.endswith(f"sm90<fp16, kNone, false, {groups}, {stages}>")


@pytest.mark.parametrize(
    ("num_tokens", "rows", "in_features", "splits", "shared"),
    [
        (512, 256, 2048, 4, 2),  # two tiles, of which each gets four of the ten clusters
        (512, 256, 1984, 2, 2),  # 31 steps: eight for each of three
        (512, 256, 960, 1, 0),
        (512, 512, 2048, 2, 4),
        (512, 768, 2048, 1, 0),  # six tiles for ten clusters
        (512, 256 * 5, 2048, 1, 0),  # ten: none is left for a last round
        (512, 256 * 6, 2048, 4, 2),
    ],
)
def test_tiles_of_the_last_round_are_shared(
    num_tokens: int, rows: int, in_features: int, splits: int, shared: int
) -> None:
    device = Hopper()
    *_, partials, counters, _, _, _, _, found = launched(num_tokens, packed(rows, in_features, 64), device)
    assert found == splits
    assert isinstance(partials, np.ndarray)
    assert partials.shape == (shared * splits, 256 * 256)
    assert counters is device.counters


@pytest.mark.parametrize(("gated", "columns"), [(False, 64), (True, 32)])
def test_y_leaves_in_boxes_of_what_a_warpgroup_has(gated: bool, columns: int) -> None:
    device = Hopper()
    weight, x = packed(256 * 5, 256, gated=gated), np.zeros((512, 256), np.float16)
    y = linear_gate_up_act(x, weight, "silu", device=device) if gated else linear(x, weight, device=device)
    box = device.arguments[1]
    assert isinstance(box, Boxes)
    assert box.array is y
    assert box.box == (256, columns)


def test_what_wgmma_cannot_write_is_decoded() -> None:
    """Numbers of y that are no multiple of 8, and GPUs without it."""
    for weight, device in ((packed(516, 256), Hopper()), (packed(512, 256), Hopper(has_wgmma=False))):
        launched(300, weight, device)
        assert [instance.stem for instance in device.instances] == ["linear_w4_dequantize"]
        assert [product.shape for product in device.products] == [(weight.out_features, 256)]


def test_a_gated_weight_is_one_launch() -> None:
    device = Hopper()
    y = linear_gate_up_act(np.zeros((300, 256), np.float16), packed(512, 256, gated=True), "gelu", device=device)
    assert y.shape == (300, 256)
    assert [instance.entry for instance in device.instances] == ["linear_w4_sm90<fp16, kGelu, false, 1, 5>"]


@pytest.mark.parametrize("num_tokens", [1, 300])
def test_float32_is_refused(num_tokens: int) -> None:
    with pytest.raises(KernelError, match="linear_w4: x is float32; expected bfloat16 or float16"):
        linear(np.zeros((num_tokens, 256), np.float32), packed(64, 256), device=Hopper())
