"""Where a case's inputs lie while a candidate runs: in NumPy's arrays as they are, or in the memory of a device.

A device's fresh memory is poison with a border of poison on both sides, so that an element of an answer that is never
written is NaN, and a write past an answer's end is seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from conformance.inputs import poisoned_allocations
from engine.kernels.device import Argument, Device, Dims, Instance

Array = Any  # of a device
Inputs = dict[str, Any]

DTYPES = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16)}
DTYPES |= {"bfloat16": np.dtype(ml_dtypes.bfloat16)}
BORDER_BYTES = 256  # on either side of fresh memory; a multiple of every alignment that a kernel asks for
POISON = 0xFF  # of every byte: NaN in all floating types, −1 in integers


class Memory(Protocol):
    """What check needs of the place where a candidate runs."""

    def place(self, inputs: Inputs, dtypes: Mapping[str, np.dtype[Any]], run: int) -> Inputs:
        """The inputs as the candidate gets them, floating ones in these types; views stay views of equal form.

        run counts how often a case has been run, from 0; a device may take its freedom of order from it.
        """
        ...

    def bring_back(self) -> list[str]:
        """Copies what the candidate made of its inputs over those given to place; what is wrong with fresh memory."""
        ...

    def fetch(self, array: Array) -> NDArray[Any]:
        """A copy of an output."""
        ...

    def poisoned(self) -> AbstractContextManager[None] | None:
        """Within it fresh memory is poison; None if it always is."""
        ...


class NumpyMemory:
    """For the CPU's op table: candidates work in float32 on the very inputs."""

    def place(self, inputs: Inputs, dtypes: Mapping[str, np.dtype[Any]], run: int) -> Inputs:
        return inputs

    def bring_back(self) -> list[str]:
        return []

    def fetch(self, array: Array) -> NDArray[Any]:
        return np.array(array)

    def poisoned(self) -> AbstractContextManager[None]:
        return poisoned_allocations()


class BorderedDevice:
    """A device like the one given, whose fresh memory is poison and has borders."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.num_sms = device.num_sms
        self.max_shared_bytes = device.max_shared_bytes
        self.has_wgmma, self.has_fp8 = device.has_wgmma, device.has_fp8
        self.counters = device.counters
        self._fresh: list[tuple[Array, int]] = []  # with its borders, and bytes between them

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        dtype = np.dtype(dtype)
        size = math.prod(shape)
        border = BORDER_BYTES // dtype.itemsize
        whole = self._device.empty((size + 2 * border,), dtype)
        whole.view(np.uint8)[...] = POISON
        self._fresh.append((whole, size * dtype.itemsize))
        return whole[border : border + size].reshape(shape)

    def to_device(self, array: NDArray[Any], out: Array) -> None:
        self._device.to_device(array, out)

    def to_host(self, array: Array) -> NDArray[Any]:
        return self._device.to_host(array)

    def start_copy(self, array: Array) -> Callable[[], NDArray[Any]]:
        return self._device.start_copy(array)

    def launch(
        self, instance: Instance, grid: Dims, block: Dims, arguments: Sequence[Argument], shared_bytes: int = 0
    ) -> None:
        self._device.launch(instance, grid, block, arguments, shared_bytes)

    def matmul(self, x: Array, weight: Array, out: Array) -> None:
        self._device.matmul(x, weight, out)

    def forget(self) -> None:
        """Ends the watch over all memory that was given so far."""
        self._fresh.clear()

    def overrun(self) -> list[str]:
        """Which memory, by the order in which it was given, was written past an end; and counters that were left."""
        found = []
        if bool(self.counters.any()):
            found.append("the device's counters are not left at zero")
            self.counters[...] = 0
        for number, (whole, size) in enumerate(self._fresh):
            data = whole.view(np.uint8)
            for where, part in (("before", data[:BORDER_BYTES]), ("after", data[BORDER_BYTES + size :])):
                if not bool((part == POISON).all()):
                    found.append(f"the memory {where} the array number {number} that was allocated was written")
        return found


class DeviceMemory:
    """For op tables of kernels.

    Args:
        device: the one that the op table runs on.
        to_device, to_host: copies of a whole array that lies without gaps, and of any array.
        view: an array of this shape, dtype and strides [bytes] in a whole array, from a byte offset on.
        on_run: told the number of each run before it.
    """

    def __init__(
        self,
        device: BorderedDevice,
        to_device: Callable[[NDArray[Any]], Array],
        to_host: Callable[[Array], NDArray[Any]],
        view: Callable[[Array, tuple[int, ...], np.dtype[Any], int, tuple[int, ...]], Array],
        on_run: Callable[[int], None] = lambda run: None,
    ) -> None:
        self._device, self._to_device, self._to_host = device, to_device, to_host
        self._view, self._on_run = view, on_run
        self._pairs: list[tuple[NDArray[Any], Array]] = []  # whole inputs, and their copies on the device

    def place(self, inputs: Inputs, dtypes: Mapping[str, np.dtype[Any]], run: int) -> Inputs:
        self._device.forget()
        self._on_run(run)
        self._pairs = []
        copies: dict[int, Array] = {}  # by the identity of the whole array
        placed = dict(inputs)
        for name, value in inputs.items():
            if isinstance(value, np.ndarray):
                whole, dtype = whole_of(value), dtypes.get(name, value.dtype)
                if id(whole) not in copies:
                    copies[id(whole)] = self._to_device(cast(whole, dtype))
                    self._pairs.append((whole, copies[id(whole)]))
                offset = (value.ctypes.data - whole.ctypes.data) // value.itemsize * dtype.itemsize
                strides = tuple(stride // value.itemsize * dtype.itemsize for stride in value.strides)
                placed[name] = self._view(copies[id(whole)], value.shape, dtype, offset, strides)
        return placed

    def bring_back(self) -> list[str]:
        for whole, copy in self._pairs:
            whole[...] = self._to_host(copy).astype(whole.dtype)
        return self._device.overrun()

    def fetch(self, array: Array) -> NDArray[Any]:
        return self._to_host(array)

    def poisoned(self) -> None:
        return None


def whole_of(array: NDArray[Any]) -> NDArray[Any]:
    """The array that a view is a part of."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def cast(array: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """A copy in another type; what it cannot hold becomes infinite."""
    with np.errstate(over="ignore"):
        return array.astype(dtype)


def host_view(
    whole: NDArray[Any], shape: tuple[int, ...], dtype: np.dtype[Any], offset: int, strides: tuple[int, ...]
) -> NDArray[Any]:
    """DeviceMemory's view for NumPy arrays."""
    data = whole.reshape(-1).view(np.uint8)
    return np.ndarray(shape, dtype, data, offset, strides) if data.size else np.ndarray(shape, dtype)
