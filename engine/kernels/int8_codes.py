"""Groups as codes to be copied to other ranks, and the sum of what all have copied: cuda/int8_codes.cu. Defined by
ref.int8_feedback, without owners.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.kernels.carried import Carried, carried_arguments
from engine.kernels.check import (
    ceil_div,
    literal,
    require,
    require_aligned,
    type_name,
)
from engine.kernels.device import Array, Device, Instance
from engine.kernels.partials import GROUP, GROUP_BYTES, require_groups, require_partial

THREADS, BLOCKS_AN_SM, PIECE = 256, 8, 8  # numbers of a thread at a time


def codes_bytes(size: int) -> int:
    """Of the codes of so many numbers, a multiple of 16: int8 codes, then bfloat16 scales."""
    return 16 * ceil_div(size // GROUP * GROUP_BYTES, 16)


def quantize_codes(
    x: Array, codes: Array, carried: Carried | None = None, *, rotate: bool = True, device: Device
) -> None:
    """Writes the codes of x [num_tokens, hidden_size], with what is carried, to codes [codes_bytes(x.size)] uint8.

    Raises:
        KernelError: x is float32, its rows are no whole groups, or codes or carried do not belong to it.
    """
    kernel = "quantize_codes"
    require_partial(kernel, x, None)
    require_groups(kernel, x)
    require(kernel, "codes", codes, (codes_bytes(int(x.size)),), np.uint8)
    require_aligned(kernel, "codes", codes)
    arguments = (x, *carried_arguments(kernel, x, carried), codes, np.int64(x.size))
    _launch(f"{kernel}<{type_name(kernel, 'x', x)}, {literal(rotate)}>", x, arguments, device)


def sum_codes(
    mine: Array,
    others: Array,
    rank: int,
    x: Array,
    residual: Array | None = None,
    *,
    rotate: bool = True,
    device: Device,
) -> Array:
    """The sum of what the ranks' codes stand for, in their order, plus the residual, rounded once.

    Args:
        mine: codes of this rank, as quantize_codes wrote them.
        others: [world_size − 1, codes_bytes(x.size)] uint8, those of the other ranks in their order.
        x: [num_tokens, hidden_size], whose codes these are; it is not read.
        residual: as x, which the answer is written over; where there is none it is new.
    Raises:
        KernelError: as of quantize_codes.
    """
    kernel = "sum_codes"
    require_partial(kernel, x, residual)
    require_groups(kernel, x)
    for name, array, shape in (("mine", mine, ()), ("others", others, (None,))):
        require(kernel, name, array, (*shape, codes_bytes(int(x.size))), np.uint8)
        require_aligned(kernel, name, array)
    y = device.empty(x.shape, x.dtype) if residual is None else residual
    entry = f"{kernel}<{type_name(kernel, 'x', x)}, {len(others) + 1}, {literal(rotate)}>"
    stride = np.int64(others.strides[0])
    _launch(entry, x, (mine, others, residual, y, np.int64(x.size), stride, np.int32(rank)), device)
    return y


def _launch(entry: str, x: Array, arguments: tuple[Any, ...], device: Device) -> None:
    if x.size:
        blocks = min(BLOCKS_AN_SM * device.num_sms, ceil_div(int(x.size), THREADS * PIECE))
        device.launch(Instance("int8_codes", entry), (blocks,), (THREADS,), arguments)
