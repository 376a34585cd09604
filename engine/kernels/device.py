"""What a kernel wrapper needs of the machine below it: memory, and a way to launch.

engine.kernels.gpu is the one for an NVIDIA GPU. Conformance has another that runs the same .cu files on a CPU, so the
wrappers, their grids and their checks are tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = Any  # of the device: its shape, dtype, strides, reshape and slices are those of NumPy
Dims = tuple[int, ...]  # one to three numbers

NUM_COUNTERS = 4096  # more blocks than any kernel shares work among


@dataclass(frozen=True, slots=True)
class Instance:
    """One kernel of a file with its template arguments: Instance("rmsnorm", "rmsnorm<bf16, 1>")."""

    stem: str
    entry: str


@dataclass(frozen=True, slots=True)
class Boxes:
    """An array of 16- or 8-bit numbers that a kernel copies in boxes (TensorMap in cuda/include/ptx_sm90.cuh).

    Its address and all strides but the last are multiples of 16 bytes.
    """

    array: Array
    box: tuple[int, ...]  # size along each axis; rows of 128 bytes, or 64, along the last


Argument = Array | np.generic | Boxes | None


class Device(Protocol):
    """A machine that runs kernels."""

    num_sms: int
    max_shared_bytes: int  # a block
    has_wgmma: bool  # runs the kernels whose stem ends with _sm90
    has_fp8: bool  # has tensor cores for it: sm_89 and later
    counters: Array  # [NUM_COUNTERS] uint32, zeros: a kernel may count in them and leaves zeros; of one stream

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """An array whose content is undefined."""
        ...

    def to_device(self, array: NDArray[Any], out: Array) -> None:
        """Copies a contiguous host array to one of the device, of the same shape and dtype."""
        ...

    def start_copy(self, array: Array) -> Callable[[], NDArray[Any]]:
        """Begins a copy to the host after what was launched before, and no later; what is given waits for it."""
        ...

    def to_host(self, array: Array) -> NDArray[Any]:
        """A copy on the host, when everything launched before has ended."""
        ...

    def launch(
        self, instance: Instance, grid: Dims, block: Dims, arguments: Sequence[Argument], shared_bytes: int = 0
    ) -> None:
        """Starts a kernel on the current stream. Arrays are passed as the address of their first element."""
        ...

    def matmul(self, x: Array, weight: Array, out: Array) -> None:
        """out [m, n] = x [m, k] · weightᵀ of [n, k], all of one 16-bit type or out float32, or int8 and
        out int32; the vendor's library."""
        ...
