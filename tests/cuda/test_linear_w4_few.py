"""What linear_w4 launches for few tokens, on a device that only takes notes."""

from __future__ import annotations

import numpy as np
import pytest

from engine.kernels.device import Boxes
from engine.kernels.linear import linear
from engine.kernels.linear_w4 import CHOICES, CHOICES_SM90, Few, Line, Wgmma
from engine.kernels.linear_w4_many import NARROW, WIDE
from tests.cuda.test_linear_w4_many import Hopper, launched, packed


def test_bytes_by_hand() -> None:
    """A stage of two warpgroups of rows and two of steps, two steps each: x of 16 tokens, words, a scale a row."""
    sizes = Wgmma(16, 2, 2, 2, stages=3)
    stage = 4 * (16 * 256 + 128 * 64 + 128 * 2) + 2 * 8
    assert sizes.shared_bytes(16, groups=1, zeros=False) == 1024 + 3 * stage + 128 * 16 * 4 + 16
    more = sizes.shared_bytes(9, groups=2, zeros=True) - sizes.shared_bytes(9, groups=1, zeros=False)
    assert more == 3 * 4 * (128 * 2 + 128 * 2)
    assert (sizes.threads, sizes.rows) == (640, 128)
    assert (
        Few(4, 1, 1, 8, 1, stages=2).shared_bytes(3, 1, False) == 2 * 8 * (4096 + 128 + 3 * 256) + 8 * 8 * 68 * 4 + 16
    )


@pytest.mark.parametrize(
    ("num_tokens", "has_wgmma", "stem"),
    [
        (8, True, "linear_w4"),
        (9, True, "linear_w4_few_sm90"),
        (32, True, "linear_w4_few_sm90"),
        (9, False, "linear_w4"),
    ],
)
def test_wgmma_from_nine_tokens_on(num_tokens: int, has_wgmma: bool, stem: str) -> None:
    device = Hopper(has_wgmma=has_wgmma)
    x, *_ = launched(num_tokens, packed(1024, 2048), device)
    assert [instance.stem for instance in device.instances] == [stem]
    if stem != "linear_w4":
        assert isinstance(x, Boxes)
        assert x.box == (16 if num_tokens <= 16 else 32, 64)
        assert max(launch.shared_bytes for launch in device.launches) <= device.max_shared_bytes


@pytest.mark.parametrize(
    ("num_tokens", "rows", "in_features", "stems"),
    [  # narrow tiles take 29.7 µs of 4096 columns, 104 of 14336; 32 tokens 6 µs, and 0.168 for a million numbers
        (33, 2560, 4096, ["linear_w4_few_sm90", "linear_w4"]),
        (64, 2560, 4096, ["linear_w4_few_sm90"]),
        (96, 2560, 4096, ["linear_w4_few_sm90"]),
        (128, 2560, 4096, [NARROW.stem]),  # 31.0 µs
        (128, 2560, 14336, ["linear_w4_few_sm90"]),  # 48.7 µs
        (129, 2560, 14336, [WIDE.stem]),
        (64, 2560, 1024, [NARROW.stem]),  # 12.9 and 7.4 µs
    ],
)
def test_few_tokens_at_a_time_where_tiles_are_few(
    num_tokens: int, rows: int, in_features: int, stems: list[str]
) -> None:
    device = Hopper()
    launched(num_tokens, packed(rows, in_features), device)
    assert list(dict.fromkeys(instance.stem for instance in device.instances)) == stems


@pytest.mark.parametrize("choices", [CHOICES, CHOICES_SM90], ids=["portable", "hopper"])
def test_choices_are_in_order_and_hold_their_tokens(choices: tuple[Line, ...]) -> None:
    assert [most for most, *_ in choices] == sorted(most for most, *_ in choices)
    for most, whole, shared in choices:
        assert all(sizes.tokens >= most for sizes in (*(sizes for sizes, *_ in whole), *shared))


@pytest.mark.parametrize("num_tokens", [1, 8, 16, 32])
@pytest.mark.parametrize("group_size", [32, 128])
def test_every_line_has_sizes_for_a_common_card(num_tokens: int, group_size: int) -> None:
    """99 KiB a block."""
    device = Hopper(has_wgmma=False)
    device.max_shared_bytes = 99 << 10
    launched(num_tokens, packed(1024, 2048, group_size), device)
    assert max(launch.shared_bytes for launch in device.launches) <= 99 << 10


@pytest.mark.parametrize(
    ("num_tokens", "num_tiles", "template", "num_blocks"),
    [
        (1, 21, "4, 1, 1, 8,", 21),
        (1, 42, "4, 1, 1, 8,", 21),  # two each
        (8, 20, "4, 1, 1, 8,", 20),  # one SM has nothing: 8/21 of a tile of 8 steps more than it might be
        (1, 32, "4, 1, 1, 8,", 16),  # five SMs have nothing: 16 - 12.2 steps
        (16, 20, "16, 1, 4, 2,", 20),
        (16, 42, "16, 2, 2, 2,", 21),  # all share 21 tiles of 128 rows
        (32, 20, "32, 2, 2, 2,", 21),
    ],
)
def test_whole_tiles_where_sharing_gains_little(
    num_tokens: int, num_tiles: int, template: str, num_blocks: int
) -> None:
    """21 SMs; tiles of 64 rows, and 1024 columns, which are 8 steps."""
    device = Hopper()
    launched(num_tokens, packed(64 * num_tiles, 1024), device)
    assert f"false, 1, {template}" in device.instances[-1].entry
    assert device.grid == (num_blocks,)


def test_shared_tiles_where_some_sms_would_have_much_more() -> None:
    """Tiles of 64 rows and 64 steps on 21 SMs: 22 are 128 steps for one, or 67 for all if they share them; 12 are 64 or
    37; and 10 are 64 or 30, but 32 where a block has one of 32 rows."""
    for num_tiles, template, num_blocks in (
        (22, "4, 1, 2, 2,", 4 * 21),
        (12, "4, 1, 2, 2,", 4 * 21),
        (10, "2, 1, 1, 16,", 20),
    ):
        device = Hopper()
        launched(1, packed(64 * num_tiles, 8192), device)
        assert f"false, 1, {template}" in device.instances[-1].entry
        assert device.grid == (num_blocks,)


def test_no_tokens_start_nothing() -> None:
    device = Hopper()
    assert linear(np.zeros((0, 256), np.float16), packed(64, 256), device=device).shape == (0, 64)
    assert device.instances == ()
