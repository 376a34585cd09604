"""Linear layers whose weights are of 4 bits in groups. Defined by grouped_linear of ref/quant/groups.py.

cuda/linear_w4.cu streams the weights for few tokens, and linear_w4_few_sm90.cu for some more on Hopper;
engine/kernels/linear_w4_many.py is for many.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from engine.errors import KernelError
from engine.kernels.activation import FUNCTIONS
from engine.kernels.check import ceil_div, literal, require, require_contiguous, require_half, stride, type_name
from engine.kernels.device import Argument, Boxes, Device, Instance
from engine.kernels.gather_columns import gather_columns
from engine.kernels.linear_w4_many import (
    NARROW_TOKENS,
    linear_w4_many,
    linear_w4_many_gate_up_act,
    narrow_microseconds,
    step_groups,
)
from engine.kernels.linear_w4a8 import is_worth_it, linear_w4a8, linear_w4a8_gate_up_act
from engine.packed4 import COLUMNS, PACKED, PACKED_GATED, ROWS, is_group_size
from engine.weights import LinearWeight

Array = Any

STEP = 128  # columns of a step of linear_w4


@dataclass(frozen=True, slots=True)
class Few:
    """Sizes of linear_w4 (cuda/linear_w4.cu)."""

    row_tiles: int
    token_tiles: int
    row_warps: int
    step_warps: int
    blocks_per_sm: int
    stages: int = 9  # as many of them as there is shared memory for
    stem: ClassVar[str] = "linear_w4"

    @property
    def tokens(self) -> int:
        return 8 * self.token_tiles

    @property
    def rows(self) -> int:
        """Of a tile."""
        return 16 * self.row_tiles * self.row_warps

    @property
    def threads(self) -> int:
        return 32 * self.row_warps * self.step_warps

    def argument(self, x: Array) -> Argument:
        """x as the kernel takes it."""
        return x

    @property
    def template(self) -> str:
        sizes = (self.row_tiles, self.token_tiles, self.row_warps, self.step_warps, self.stages, self.blocks_per_sm)
        return ", ".join(map(str, sizes))

    def shared_bytes(self, num_tokens: int, groups: int, zeros: bool) -> int:
        """The stages of weights, scales and x, and the sums of 8 tokens."""
        scales = 8 * groups * self.row_tiles * (6 if zeros else 4)
        weights = self.row_warps * (1024 * self.row_tiles + scales)
        sums = self.step_warps * 8 * (self.rows + 4) * 4
        return self.stages * self.step_warps * (weights + num_tokens * 2 * STEP) + sums + 16


@dataclass(frozen=True, slots=True)
class Wgmma:
    """Sizes of linear_w4_few_sm90 (cuda/linear_w4_few_sm90.cu)."""

    tokens: int
    row_groups: int
    step_groups: int
    depth: int
    stages: int = 9  # as many of them as there is shared memory for
    blocks_per_sm: int = 1
    stem: ClassVar[str] = "linear_w4_few_sm90"

    @property
    def rows(self) -> int:
        """Of a tile."""
        return 64 * self.row_groups

    @property
    def threads(self) -> int:
        """Of a warpgroup and the warp that brings its weights, for each 64 rows of a step."""
        return 160 * self.row_groups * self.step_groups

    @property
    def template(self) -> str:
        sizes = (self.tokens, self.row_groups, self.step_groups, self.depth, self.stages, self.blocks_per_sm)
        return ", ".join(map(str, sizes))

    def argument(self, x: Array) -> Argument:
        """x as the kernel takes it."""
        return Boxes(x, (self.tokens, 64))

    def shared_bytes(self, num_tokens: int, groups: int, zeros: bool) -> int:
        """The stages of x, weights and scales with two barriers each, and the sums that are handed over."""
        step = 2 * STEP * self.tokens + self.row_groups * (64 * STEP // 2 + groups * (192 if zeros else 128))
        sums = (self.step_groups - 1) * self.rows * self.tokens * 4
        return 1024 + self.stages * (self.step_groups * self.depth * step + 16) + sums + 16


Sizes = Few | Wgmma
# Sizes where blocks have whole tiles, which spares the sums of parts; how much longer than others an SM may then work,
# in steps of 64 rows; most tiles of a block.
Whole = tuple[Sizes, int, float]
# Most tokens; sizes for whole tiles in order; sizes where blocks share tiles, the second for the 99 KiB that a block
# has on most cards. As timed on an H200 over shapes of 72B and 8B models.
Line = tuple[int, tuple[Whole, ...], tuple[Sizes, ...]]
ANY = float("inf")
WHOLE = ((Few(4, 1, 1, 8, 1), 8, ANY), (Few(2, 1, 1, 8, 2), 20, ANY), (Few(2, 1, 1, 16, 1), 10, ANY))
FEWEST: tuple[Line, ...] = (
    (2, WHOLE, (Few(4, 1, 2, 2, 4),)),
    (8, WHOLE, (Few(2, 1, 1, 8, 2), Few(4, 1, 2, 2, 4))),
)
CHOICES: tuple[Line, ...] = (
    *FEWEST,
    (16, ((Few(4, 2, 1, 8, 1), 20, ANY), (Few(2, 2, 1, 16, 1), 10, ANY)), (Few(4, 2, 2, 4, 1), Few(2, 2, 2, 4, 1))),
    (32, ((Few(2, 4, 1, 4, 2), 20, ANY), (Few(2, 4, 1, 8, 1), 10, ANY)), (Few(2, 4, 2, 2, 2),)),
)
CHOICES_SM90: tuple[Line, ...] = (
    *FEWEST,
    (16, ((Wgmma(16, 1, 4, 2), 32, 1),), (Wgmma(16, 2, 2, 2),)),
    (32, (), (Wgmma(32, 2, 2, 2),)),
)
FEW_TOKENS, FEW_AT_ONCE = 64, 32  # on other GPUs up to 64 tokens, 32 at a time
# Microseconds on an H200: of 32 tokens here, beside those for each number of the weight. 33 to 128 tokens are taken 32
# at a time where the kernel that takes them at once (narrow_microseconds) has too few tiles to be quicker.
AT_ONCE, OF_NUMBER = 6.0, 0.168e-6


def linear_w4(x: Array, weight: LinearWeight, *, device: Device, dtype: Any = None) -> Array:
    """y = x Wᵀ + bias, [num_tokens, in_features] → [num_tokens, out_features], type of x or dtype."""
    kernel = "linear_w4"
    _check(kernel, x, weight, PACKED)
    x = _in_order(x, weight, device)
    y = device.empty((x.shape[0], weight.out_features), x.dtype if dtype is None else dtype)
    if is_worth_it(x, weight, device):
        linear_w4a8(kernel, x, weight, y, device)
    elif not _is_few(x, weight, device):
        linear_w4_many(kernel, x, weight, y, device)
    elif y.size:
        _run(kernel, x, weight, "kNone", y, device)
    return y


def linear_w4_gate_up_act(x: Array, weight: LinearWeight, activation: str, *, device: Device) -> Array:
    """gate_up_act(linear_w4(x, weight), activation), each product rounded.

    [num_tokens, in_features] → [num_tokens, size] with size = out_features / 2.
    """
    kernel = "linear_w4_gate_up_act"
    _check(kernel, x, weight, PACKED_GATED)
    if activation not in FUNCTIONS:
        raise KernelError(f"{kernel}: the activation {activation!r} has no kernel; there are {', '.join(FUNCTIONS)}")
    x = _in_order(x, weight, device)
    if is_worth_it(x, weight, device):
        return linear_w4a8_gate_up_act(kernel, x, weight, activation, device=device)
    if not _is_few(x, weight, device):
        return linear_w4_many_gate_up_act(kernel, x, weight, activation, device=device)
    y = device.empty((x.shape[0], weight.out_features // 2), x.dtype)
    if y.size:
        _run(kernel, x, weight, FUNCTIONS[activation], y, device)
    return y


def _in_order(x: Array, weight: LinearWeight, device: Device) -> Array:
    """x with its columns as the weight has them."""
    order = weight.tensors.get("order")
    return x if order is None else gather_columns(x, order, device=device)


def _is_few(x: Array, weight: LinearWeight, device: Device) -> bool:
    """Whether linear_w4 itself takes these tokens."""
    num_tokens = x.shape[0]
    if not device.has_wgmma:
        return bool(num_tokens <= FEW_TOKENS)
    if num_tokens <= FEW_AT_ONCE:
        return True
    microseconds = AT_ONCE + OF_NUMBER * weight.out_features * weight.in_features
    return num_tokens <= NARROW_TOKENS and ceil_div(num_tokens, FEW_AT_ONCE) * microseconds < narrow_microseconds(
        weight, device
    )


def _run(kernel: str, x: Array, weight: LinearWeight, activation: str, y: Array, device: Device) -> None:
    choices = CHOICES_SM90 if device.has_wgmma else CHOICES
    most = choices[-1][0]
    for first in range(0, x.shape[0], most):
        rows = slice(first, min(first + most, x.shape[0]))
        line = next(line for line in choices if len(x[rows]) <= line[0])
        _launch(kernel, x[rows], weight, activation, y[rows], line, device)


def _launch(kernel: str, x: Array, weight: LinearWeight, activation: str, y: Array, line: Line, device: Device) -> None:
    """Starts the kernel that the line has for this weight."""
    tensors, num_tokens = weight.tensors, x.shape[0]
    groups, shift = step_groups(weight, STEP)
    zeros = "zeros" in tensors
    row_tiles, steps = tensors["weight"].shape[0], tensors["weight"].shape[1] // 2
    few, num_blocks = _choose(line, groups, zeros, row_tiles, steps, device)
    types = f"{type_name(kernel, 'x', x)}, {type_name(kernel, 'y', y)}, {activation}, {literal(zeros)}"
    partials = device.empty((num_blocks, 2, few.tokens, few.rows), np.float32)
    sizes = map(np.int32, (num_tokens, weight.out_features, weight.in_features, shift))
    device.launch(
        Instance(few.stem, f"{few.stem}<{types}, {groups}, {few.template}>"),
        (num_blocks,),
        (few.threads,),
        [
            *(few.argument(x), tensors["weight"], tensors["scales"], tensors.get("zeros"), weight.bias, y, partials),
            *(device.counters, *sizes, *([stride(x)] if isinstance(few, Few) else [])),
        ],
        shared_bytes=few.shared_bytes(num_tokens, groups, zeros),
    )


def _choose(line: Line, groups: int, zeros: bool, row_tiles: int, steps: int, device: Device) -> tuple[Sizes, int]:
    """Sizes, and the number of blocks."""
    most, whole, shared = line
    for sizes, idle, most_tiles in whole:
        few = _fitting(sizes, most, groups, zeros, device)
        if few is None:
            continue
        num_tiles, most_blocks = ceil_div(16 * row_tiles, few.rows), few.blocks_per_sm * device.num_sms
        of_block = ceil_div(num_tiles, most_blocks)
        longest = of_block * few.blocks_per_sm * few.rows / 64 - row_tiles / 4 / device.num_sms
        if num_tiles % of_block == 0 and of_block <= most_tiles and longest * steps <= idle:
            return few, num_tiles // of_block
    fitting = (_fitting(sizes, most, groups, zeros, device) for sizes in shared)
    few = next(few for few in fitting if few is not None)
    return few, min(few.blocks_per_sm * device.num_sms, ceil_div(16 * row_tiles, few.rows) * steps)


def _fitting(few: Sizes, num_tokens: int, groups: int, zeros: bool, device: Device) -> Sizes | None:
    """With fewer stages, and where that is not enough with fewer blocks an SM, if there is too little shared memory.

    An SM has 1 KiB more than a block can have, and each block takes 1 KiB of it. None: a block has too little.
    """
    for blocks in range(few.blocks_per_sm, 0, -1):
        room = (device.max_shared_bytes + 1024) // blocks - 1024
        for stages in range(few.stages, 1, -1):
            found = replace(few, stages=stages, blocks_per_sm=blocks)
            if found.shared_bytes(num_tokens, groups, zeros) <= room:
                return found
    return None


def _check(kernel: str, x: Array, weight: LinearWeight, format: str) -> None:
    """Raises KernelError for arrays that do not fit each other."""
    if weight.format != format:
        raise KernelError(f"{kernel}: the weight is {weight.format}; expected {format}")
    out_features, in_features = weight.out_features, weight.in_features
    require(kernel, "x", x, (None, None if "order" in weight.tensors else in_features))
    require_half(kernel, "x", x)
    if in_features % 8 or int(stride(x)) % 8:
        raise KernelError(f"{kernel}: rows of x are {in_features} numbers, {stride(x)} apart; expected multiples of 8")
    packed, scales, zeros = (weight.tensors.get(name) for name in ("weight", "scales", "zeros"))
    if packed is None or scales is None:
        raise KernelError(f"{kernel}: the weight has {', '.join(weight.tensors)}; expected weight and scales")
    quads, steps = ceil_div(out_features, ROWS), ceil_div(in_features, COLUMNS) * 2
    require(kernel, "weight", packed, (4 * quads, steps, 32, 4), np.uint32)
    require(kernel, "scales", scales, (None, quads, 8, 4, 2), np.float16)
    group_size = ceil_div(in_features, scales.shape[0])
    if not is_group_size(group_size, in_features):
        raise KernelError(
            f"{kernel}: groups of {group_size} columns; expected 32, 64, 128 times a power of two, or one"
        )
    if zeros is not None:
        require(kernel, "zeros", zeros, scales.shape, np.uint8)
        require_contiguous(kernel, "zeros", zeros)
    require_contiguous(kernel, "weight", packed)
    require_contiguous(kernel, "scales", scales)
    if weight.bias is not None:
        require(kernel, "bias", weight.bias, (out_features,), x.dtype)
