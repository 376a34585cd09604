"""Linear layers whose weights are of 4 bits in groups. Defined by grouped_linear of ref/quant/groups.py.

cuda/linear_w4.cu streams the weights for few tokens; engine/kernels/linear_w4_many.py has more of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from engine.errors import KernelError
from engine.kernels.activation import FUNCTIONS
from engine.kernels.check import ceil_div, literal, require, require_contiguous, require_half, stride, type_name
from engine.kernels.device import Device, Instance
from engine.kernels.gather_columns import gather_columns
from engine.kernels.linear_w4_many import linear_w4_many, linear_w4_many_gate_up_act, step_groups
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

    @property
    def rows(self) -> int:
        """Of a tile."""
        return 16 * self.row_tiles * self.row_warps

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


# (most tokens, sizes where blocks have whole tiles or None, where they share tiles, and the same for the 99 KiB that a
# block has on most cards): the best of what was timed on an H200 over shapes of 72B and 8B models. Whole tiles spare
# the sums of parts, but leave SMs without work where they do not come out even.
CHOICES = (
    (2, Few(2, 1, 1, 8, 2), Few(4, 1, 2, 2, 4), Few(4, 1, 2, 2, 4)),
    (8, Few(2, 1, 1, 8, 2), Few(4, 1, 1, 8, 1), Few(4, 1, 2, 2, 4)),
    (16, None, Few(4, 2, 2, 4, 1), Few(2, 2, 2, 4, 1)),
    (32, None, Few(2, 4, 2, 2, 2), Few(2, 4, 2, 2, 2)),
)
BUSY = 0.7  # of a GPU that must have work for whole tiles
FEW_TOKENS, FEW_TOKENS_SM90 = 64, 32  # up to here 32 tokens at a time


def linear_w4(x: Array, weight: LinearWeight, *, device: Device, dtype: Any = None) -> Array:
    """y = x Wᵀ + bias, [num_tokens, in_features] → [num_tokens, out_features], type of x or dtype."""
    kernel = "linear_w4"
    _check(kernel, x, weight, PACKED)
    x = _in_order(x, weight, device)
    y = device.empty((x.shape[0], weight.out_features), x.dtype if dtype is None else dtype)
    if is_worth_it(x, weight):
        linear_w4a8(kernel, x, weight, y, device)
    elif not _is_few(x, device):
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
    if is_worth_it(x, weight):
        return linear_w4a8_gate_up_act(kernel, x, weight, activation, device=device)
    if not _is_few(x, device):
        return linear_w4_many_gate_up_act(kernel, x, weight, activation, device=device)
    y = device.empty((x.shape[0], weight.out_features // 2), x.dtype)
    if y.size:
        _run(kernel, x, weight, FUNCTIONS[activation], y, device)
    return y


def _in_order(x: Array, weight: LinearWeight, device: Device) -> Array:
    """x with its columns as the weight has them."""
    order = weight.tensors.get("order")
    return x if order is None else gather_columns(x, order, device=device)


def _is_few(x: Array, device: Device) -> bool:
    """Whether linear_w4 itself takes these tokens.

    64 of a layer of 72B, on an H200: twice 305 µs here, 562 with wgmma, 1050 with the weight decoded.
    """
    return bool(x.shape[0] <= (FEW_TOKENS_SM90 if device.has_wgmma else FEW_TOKENS))


def _run(kernel: str, x: Array, weight: LinearWeight, activation: str, y: Array, device: Device) -> None:
    most = CHOICES[-1][0]
    for first in range(0, x.shape[0], most):
        rows = slice(first, min(first + most, x.shape[0]))
        _launch_few(kernel, x[rows], weight, activation, y[rows], device)


def _launch_few(kernel: str, x: Array, weight: LinearWeight, activation: str, y: Array, device: Device) -> None:
    tensors, num_tokens = weight.tensors, x.shape[0]
    groups, shift = step_groups(weight, STEP)
    zeros = "zeros" in tensors
    row_tiles, steps = tensors["weight"].shape[0], tensors["weight"].shape[1] // 2
    most, *choices = next(line for line in CHOICES if num_tokens <= line[0])
    fitting = [few and _fitting(few, most, groups, zeros, device) for few in choices]
    few, num_blocks = _choose(fitting, row_tiles, steps, device)
    types = f"{type_name(kernel, 'x', x)}, {type_name(kernel, 'y', y)}, {activation}, {literal(zeros)}"
    partials = device.empty((num_blocks, 2, 8 * few.token_tiles, few.rows), np.float32)
    sizes = map(np.int32, (num_tokens, weight.out_features, weight.in_features, shift))
    device.launch(
        Instance("linear_w4", f"linear_w4<{types}, {groups}, {few.template}>"),
        (num_blocks,),
        (32 * few.row_warps * few.step_warps,),
        [
            *(x, tensors["weight"], tensors["scales"], tensors.get("zeros"), weight.bias, y, partials, device.counters),
            *(*sizes, stride(x)),
        ],
        shared_bytes=few.shared_bytes(num_tokens, groups, zeros),
    )


def _choose(fitting: Sequence[Few | None], row_tiles: int, steps: int, device: Device) -> tuple[Few, int]:
    """Sizes, of which the first are for whole tiles, and the number of blocks."""
    whole, *shared = fitting
    if whole is not None:
        num_tiles, most_blocks = ceil_div(16 * row_tiles, whole.rows), whole.blocks_per_sm * device.num_sms
        of_block = ceil_div(num_tiles, most_blocks)
        if num_tiles % of_block == 0 and num_tiles >= BUSY * of_block * most_blocks:
            return whole, num_tiles // of_block
    few = next(few for few in shared if few is not None)
    return few, min(few.blocks_per_sm * device.num_sms, ceil_div(16 * row_tiles, few.rows) * steps)


def _fitting(few: Few, num_tokens: int, groups: int, zeros: bool, device: Device) -> Few | None:
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
    require(kernel, "x", x, (None, in_features))
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
