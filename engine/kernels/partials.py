"""What the kernels that add up over ranks ask of their arrays."""

from __future__ import annotations

from typing import Any

from engine.errors import KernelError
from engine.kernels.check import require, require_aligned, require_contiguous, require_half

Array = Any

GROUP, GROUP_BYTES = 32, 34  # numbers that share a scale on an int8 wire; their codes and it


def require_partial(kernel: str, x: Array, residual: Array | None) -> None:
    """A rank's part x [num_tokens, hidden_size] of a sum, and the residual it is added to, of the same shape and type.

    Raises:
        KernelError: they are not; they have gaps, or begin between pieces of 16 bytes.
    """
    require(kernel, "x", x, (None, None))
    require_whole(kernel, "x", x)
    if residual is not None:
        require(kernel, "residual", residual, x.shape, x.dtype)
        require_whole(kernel, "residual", residual)


def require_groups(kernel: str, x: Array) -> None:
    """Rows of 16-bit numbers in whole groups.

    Raises:
        KernelError: they are float32, or no whole groups.
    """
    require_half(kernel, "x", x)
    if x.shape[1] % GROUP:
        raise KernelError(f"{kernel}: rows of {x.shape[1]} are no whole groups of {GROUP}")


def require_whole(kernel: str, name: str, array: Array) -> None:
    """One run of bytes that begins at a multiple of 16.

    Raises:
        KernelError: it has gaps, or does not.
    """
    require_contiguous(kernel, name, array)
    require_aligned(kernel, name, array.reshape(-1))
