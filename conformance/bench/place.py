"""Where rows run: memory of a device filled with numbers, and a record of what the wrappers launch.

The record is what is timed. So copies of small arrays from the host, which an op like sampling begins with, are left
out of its time, and the very kernels, grids and buffers of an answer that was found right are launched again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from engine.kernels.device import Instance
from engine.kernels.sampling import KernelSampling
from engine.kernels.table import kernel_ops
from engine.ops import OpTable

Array = Any  # of a device
Numbers = NDArray[Any]  # of the host

LIBRARY = "cuBLAS"
MAX_ROWS = 256  # of logits
POOL = (1 << 22) + 3  # different numbers; odd, so that rows of an array that is longer differ


@dataclass(frozen=True, slots=True)
class Launch:
    kernel: Instance | None  # None: the vendor's library
    again: Callable[[], None]


class Recorder:
    """A device like the one given that keeps what it launches.

    has_wgmma: None = as that device has it.
    """

    def __init__(self, device: Any, has_wgmma: bool | None = None) -> None:
        self._device = device
        self.has_wgmma: bool = device.has_wgmma if has_wgmma is None else has_wgmma
        self.launches: list[Launch] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def launch(self, instance: Instance, *args: Any, **kwargs: Any) -> None:
        self._keep(instance, partial(self._device.launch, instance, *args, **kwargs))

    def matmul(self, *args: Any) -> None:
        self._keep(None, partial(self._device.matmul, *args))

    def _keep(self, kernel: Instance | None, again: Callable[[], None]) -> None:
        self.launches.append(Launch(kernel, again))
        again()


class Place:
    """A device to run rows on.

    Args:
        ops: in place of the kernels of the device.
        dtype: storage type of weights and activations.
        dry: memory is left as it is, since nothing is launched anyway.
        has_wgmma: None = as the device has it.
    """

    def __init__(
        self,
        device: Any,
        ops: OpTable | None = None,
        dtype: Any = ml_dtypes.bfloat16,
        dry: bool = False,
        has_wgmma: bool | None = None,
    ) -> None:
        self.device = Recorder(device, has_wgmma)
        self.ops = kernel_ops(self.device, KernelSampling(self.device, MAX_ROWS)) if ops is None else ops
        self.dtype = np.dtype(dtype)
        self.rng = np.random.default_rng(0)
        self._dry = dry
        self._pools: dict[np.dtype[Any], Array] = {}
        self._shared: dict[str, Array] = {}
        self._next = 0

    @property
    def storage(self) -> str:
        return self.dtype.name

    def shared(self, name: str, make: Callable[[], Array]) -> Array:
        """What all calls of a row read a small part of."""
        if name not in self._shared:
            self._shared[name] = make()
        return self._shared[name]

    def normal(self, *shape: int, dtype: Any = None) -> Array:
        """Normally distributed numbers, others at every call."""
        dtype = self.dtype if dtype is None else np.dtype(dtype)
        if dtype not in self._pools:
            size = 1 if self._dry else POOL
            self._pools[dtype] = self.put(np.random.default_rng(1).standard_normal(size, np.float32).astype(dtype))
        return self.repeated(self._pools[dtype], *shape)

    def repeated(self, source: Array, *shape: int) -> Array:
        """The numbers of source [size] over and over, from another one on at every call."""
        out = self.device.empty(shape, source.dtype)
        flat, size = out.reshape(-1), math.prod(shape)
        if self._dry:
            return out
        self._next = (self._next + 7919) % (len(source) // 2)
        done = min(size, len(source) - self._next)
        flat[:done] = source[self._next : self._next + done]
        while done < size:
            more = min(done, size - done)
            flat[done : done + more] = flat[:more]
            done += more
        return out

    def put(self, array: Numbers) -> Array:
        """A copy on the device."""
        out = self.device.empty(array.shape, array.dtype)
        if array.dtype.itemsize == 2:  # bfloat16 by its bits: not all that copies knows it
            self.device.to_device(array.view(np.uint16), out.view(np.uint16))
        else:
            self.device.to_device(array, out)
        return out

    def get(self, array: Array) -> Numbers:
        """A copy on the host, floating numbers in float32."""
        if array.dtype == self.dtype and array.itemsize == 2:
            bits: Numbers = self.device.to_host(array.view(np.uint16))
            return bits.view(self.dtype).astype(np.float32)
        found: Numbers = self.device.to_host(array)
        return found

    def get_rows(self, array: Array, rows: list[int]) -> Numbers:
        return np.concatenate([self.get(array[row : row + 1]) for row in rows])


def spread(size: int) -> list[int]:
    """The first, the last and one in between: rows that an answer is looked at in."""
    return sorted({0, size // 2, size - 1})
