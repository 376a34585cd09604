"""What a rank has rounded off a sum of a step, and adds to what it brings to the next: ref.int8_feedback."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from engine.kernels.check import require
from engine.kernels.partials import require_whole

Array = Any

CARRIED = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True, slots=True)
class Carried:
    """errors: [num_tokens, hidden_size] bfloat16, of rotated groups, which a kernel reads and writes anew; is_new:
    nothing is carried yet, whatever stands there."""

    errors: Array
    is_new: bool


def carried_arguments(kernel: str, x: Array, carried: Carried | None) -> tuple[Array | None, np.int32]:
    """What a kernel that sums x gets of it: the errors, and whether they are to be read.

    Raises:
        KernelError: they do not belong to x.
    """
    if carried is None:
        return None, np.int32(0)
    require(kernel, "carried", carried.errors, x.shape, CARRIED)
    require_whole(kernel, "carried", carried.errors)
    return carried.errors, np.int32(not carried.is_new)
