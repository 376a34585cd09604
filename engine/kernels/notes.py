"""A device that launches nothing and takes notes: which kernels a piece of work needs, and with how much of a block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.kernels.device import NUM_COUNTERS, Argument, Dims, Instance

Array = NDArray[Any]

FEW_SMS = 4  # so that small sizes meet every choice that a wrapper makes by the number of blocks
LEAST_SHARED_BYTES = 99 << 10  # of a block of sm_86, sm_89 and sm_120


@dataclass(frozen=True, slots=True)
class Launch:
    """What a launch asks of a GPU, whatever the size of its grid."""

    instance: Instance
    threads: int  # of a block
    shared_bytes: int  # of a block, dynamic


class Notes:
    """See engine.kernels.device.Device; arrays are NumPy's, and what kernels would write is zeros."""

    def __init__(
        self,
        num_sms: int = FEW_SMS,
        max_shared_bytes: int = LEAST_SHARED_BYTES,
        has_wgmma: bool = False,
        has_fp8: bool = True,
    ) -> None:
        self.num_sms, self.max_shared_bytes = num_sms, max_shared_bytes
        self.has_wgmma, self.has_fp8 = has_wgmma, has_fp8
        self.counters = np.zeros(NUM_COUNTERS, np.uint32)
        self.launches: dict[Launch, None] = {}  # in the order of their first launch

    @property
    def instances(self) -> tuple[Instance, ...]:
        """Each once."""
        return tuple(dict.fromkeys(launch.instance for launch in self.launches))

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        return np.zeros(shape, dtype)

    def to_device(self, array: Array, out: Array) -> None:
        out[...] = array

    def to_host(self, array: Array) -> Array:
        return np.array(array)

    def start_copy(self, array: Array) -> Callable[[], Array]:
        copy = np.array(array)
        return lambda: copy

    def launch(
        self, instance: Instance, grid: Dims, block: Dims, arguments: Sequence[Argument], shared_bytes: int = 0
    ) -> None:
        self.launches[Launch(instance, prod(block), shared_bytes)] = None

    def matmul(self, x: Array, weight: Array, out: Array) -> None:
        pass
