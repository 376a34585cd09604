"""Dense linear layers on a GPU: kernels of ours for few tokens, the vendor's library for many. Defined by ref.linear.

cuda/linear.cu streams the weights straight into registers; on Hopper linear_tiles_sm90.cu takes them and the tokens
through shared memory. Which of them, with which sizes, is a table of measurements (CHOICES).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.errors import KernelError
from engine.kernels.activation import FUNCTIONS, gate_up_act
from engine.kernels.check import ceil_div, is_aligned, require, require_aligned, require_contiguous, stride, type_name
from engine.kernels.device import Device, Instance
from engine.kernels.linear_gated import launch_gated, suits
from engine.kernels.linear_w4 import linear_w4, linear_w4_gate_up_act
from engine.kernels.linear_w8 import FORMATS as W8_FORMATS
from engine.kernels.linear_w8 import linear_w8, linear_w8_gate_up_act
from engine.weights import LinearWeight

Array = Any

SKINNY_ROWS, SKINNY_TOKENS = 16, 8  # of a tile of linear_skinny
STEP_BYTES = 128  # of a row in a step of linear_tiles_sm90
STEP = 64  # numbers in them


@dataclass(frozen=True, slots=True)
class Skinny:
    """Sizes of linear_skinny (cuda/linear.cu)."""

    row_tiles: int
    ahead: int
    warps: int


@dataclass(frozen=True, slots=True)
class Wgmma:
    """Sizes of linear_tiles_sm90 (cuda/linear_tiles_sm90.cu)."""

    tokens: int
    groups: int
    stages: int

    @property
    def rows(self) -> int:
        return 64 * self.groups

    @property
    def threads(self) -> int:
        return 128 * self.groups

    @property
    def shared_bytes(self) -> int:
        return self.stages * (self.tokens + self.rows) * STEP_BYTES + 1024

    @property
    def template(self) -> tuple[int, ...]:
        return self.tokens, self.groups, self.stages


Choice = Skinny | Wgmma | None  # None: the vendor's library

ANY = float("inf")

Choices = tuple[
    tuple[int, float, Choice], ...
]  # (most tokens, most KiB of the weight per SM, what is best up to there)

# As measured on an H200 over the shapes of an 8B model, in its decoding step and alone: one kernel's start lies under
# another's end, so that what is best in place need not be best alone. The first line that fits, and that the GPU can
# run, holds.
CHOICES: Choices = (
    (4, 640, Skinny(1, 3, 16)),
    (4, 1280, Skinny(2, 2, 16)),
    (4, ANY, None),
    (8, 320, Skinny(2, 2, 16)),
    (8, 640, Skinny(1, 4, 8)),
    (8, ANY, None),
    (16, 320, Skinny(2, 2, 16)),
    (16, 640, Wgmma(32, 2, 10)),
    (16, ANY, None),
    (32, 320, Wgmma(64, 1, 10)),
    (32, 640, Wgmma(32, 2, 10)),
    (32, 1280, Wgmma(64, 1, 10)),
    (32, 4000, None),
    (32, ANY, Wgmma(64, 4, 5)),
    (64, 640, None),
    (64, 1280, Wgmma(64, 1, 10)),
    (64, 4000, None),
    (64, ANY, Wgmma(64, 4, 5)),
)

# Of linear_gate_up_act, where cuBLAS and then the activation are what else there is.
GATED_CHOICES: Choices = (
    (8, ANY, Skinny(1, 3, 16)),
    (16, 320, Skinny(2, 2, 16)),
    (16, ANY, None),
    (32, ANY, None),
    (64, ANY, Wgmma(64, 4, 5)),
    (128, ANY, Wgmma(128, 4, 4)),
)


def linear(x: Array, weight: LinearWeight, *, device: Device) -> Array:
    """y = x Wᵀ + bias, [num_tokens, in_features] → [num_tokens, out_features], type of x."""
    return _linear("linear", x, weight, x.dtype, device)


def logits(x: Array, weight: LinearWeight, *, device: Device) -> Array:
    """linear, rounded to nothing: [num_rows, hidden_size] → [num_rows, vocab_size] float32."""
    return _linear("logits", x, weight, np.float32, device)


def _linear(kernel: str, x: Array, weight: LinearWeight, dtype: Any, device: Device) -> Array:
    if weight.format in W8_FORMATS:
        return linear_w8(x, weight, device=device, dtype=dtype)
    if weight.format != "dense":
        return linear_w4(x, weight, device=device, dtype=dtype)
    stored = weight.tensors["weight"]
    _check(kernel, x, weight)
    y = device.empty((x.shape[0], weight.out_features), dtype)
    if not y.size:
        return y
    choice = choose(x, weight.out_features, device)
    if choice is None:
        device.matmul(x, stored, y)
        if weight.bias is not None:
            y += weight.bias
    else:
        launch(choice, x, stored, weight.bias, y, device)
    return y


def linear_gate_up_act(x: Array, weight: LinearWeight, activation: str = "silu", *, device: Device) -> Array:
    """gate_up_act(linear(x, weight), activation), each product rounded, in one kernel where that is quicker.

    x [num_tokens, in_features], weight [2 · size, in_features] with the rows of gates first → [num_tokens, size].
    """
    kernel = "linear_gate_up_act"
    if weight.format in W8_FORMATS:
        return linear_w8_gate_up_act(x, weight, activation, device=device)
    if weight.format != "dense":
        return linear_w4_gate_up_act(x, weight, activation, device=device)
    stored = weight.tensors["weight"]
    _check(kernel, x, weight)
    choice = choose(x, weight.out_features, device, GATED_CHOICES)
    is_large = choice is None and suits(x, weight, device)
    if choice is None and not is_large:
        return gate_up_act(linear(x, weight, device=device), activation, device=device)
    if activation not in FUNCTIONS:
        raise KernelError(f"{kernel}: the activation {activation!r} has no kernel; there are {', '.join(FUNCTIONS)}")
    y = device.empty((x.shape[0], weight.out_features // 2), x.dtype)
    if choice is None:
        launch_gated(x, stored, y, FUNCTIONS[activation], device)
    elif y.size:
        launch(choice, x, stored, weight.bias, y, device, FUNCTIONS[activation])
    return y


def _check(kernel: str, x: Array, weight: LinearWeight) -> None:
    """Raises KernelError for arrays that do not fit each other."""
    stored = weight.tensors["weight"]
    require(kernel, "x", x, (None, weight.in_features), stored.dtype)
    require(kernel, "weight", stored, (weight.out_features, weight.in_features))
    require_contiguous(kernel, "weight", stored)
    if weight.bias is not None:
        require(kernel, "bias", weight.bias, (weight.out_features,), x.dtype)


def choose(x: Array, out_features: int, device: Device, choices: Choices = CHOICES) -> Choice:
    """The line of choices that holds.

    None too for what our kernels cannot read: float32, or rows of x that are not all at multiples of 16 bytes.
    """
    if x.dtype.name == "float32" or x.shape[1] % 8 or not is_aligned(x):
        return None
    size = 2 * out_features * x.shape[1] / 1024 / device.num_sms
    for most_tokens, most_size, choice in choices:
        if isinstance(choice, Wgmma) and not device.has_wgmma:
            continue
        if x.shape[0] <= most_tokens and size <= most_size:
            return choice
    return None


def launch(
    choice: Skinny | Wgmma,
    x: Array,
    weight: Array,
    bias: Array | None,
    y: Array,
    device: Device,
    activation: str = "kNone",
) -> None:
    """Starts one of our kernels: arrays of one 16-bit type, x in rows at multiples of 16 bytes; y may be float32.

    activation: of the gate that is the first half of the rows; kNone if there is none.
    """
    require_aligned("linear", "weight", weight)
    types = f"{type_name('linear', 'x', x)}, {type_name('linear', 'y', y)}, {activation}"
    num_tokens, (out_features, in_features) = x.shape[0], weight.shape
    sizes = (*map(np.int32, (num_tokens, out_features, in_features)), stride(x))
    if isinstance(choice, Skinny):
        token_tiles = next(tiles for tiles in (1, 2, 4) if SKINNY_TOKENS * tiles >= num_tokens)
        rows = SKINNY_ROWS * choice.row_tiles
        device.launch(
            Instance(
                "linear", f"linear_skinny<{types}, {choice.row_tiles}, {token_tiles}, {choice.ahead}, {choice.warps}>"
            ),
            (ceil_div(out_features, rows),),
            (32 * choice.warps,),
            [x, weight, bias, y, *sizes],
            shared_bytes=4 * choice.warps * SKINNY_TOKENS * token_tiles * (rows + 4),
        )
        return
    blocks = (ceil_div(num_tokens, choice.tokens), ceil_div(out_features, choice.rows))
    steps = ceil_div(in_features, STEP)
    splits = _splits(choice, blocks[0] * blocks[1], steps, device)
    device.launch(
        Instance("linear_tiles_sm90", f"linear_tiles_sm90<{types}, {', '.join(map(str, choice.template))}, {splits}>"),
        (*blocks, splits),
        (choice.threads,),
        [x, weight, bias, y, *sizes],
        shared_bytes=choice.shared_bytes,
    )


def _splits(choice: Wgmma, num_tiles: int, steps: int, device: Device) -> int:
    """As many as run at once, none shorter than the stages: a second round of blocks costs more than some idle SMs.

    Two of a tile can share any SMs; four come from one group of SMs, and a quarter of those may be left over.
    """
    room = {4: device.num_sms * 3 // 4, 2: device.num_sms}
    possible = (n for n in room if n * num_tiles <= room[n] and n * choice.stages <= steps)
    return next(possible, 1)
