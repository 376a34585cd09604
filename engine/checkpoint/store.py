"""Where weights are put when they are loaded: in which memory, in which type."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.checkpoint.stored_tensor import StoredTensor, map_bytes, read_into
from engine.checkpoint.stored_words import StoredWords, pack_words

Array = Any


class Store(Protocol):
    """Memory for weights of one type; arrays behave like NumPy's."""

    itemsize: int  # bytes of a number

    def empty(self, shape: tuple[int, ...], dtype: Any = None) -> Array:
        """An array whose content is undefined, of the store's type or another. Raises MemoryError."""
        ...

    def read(self, tensor: StoredTensor, target: Array) -> None:
        """Fills target, a part of an array of this store or such a part seen transposed, with a tensor of its shape.

        What is not of the store's type is of the tensor's, with codes of e4m3 in bytes.
        """
        ...

    def write(self, values: NDArray[np.float32], target: Array) -> None:
        """Fills target, a contiguous part of an array of this store, with numbers that are rounded to its type."""
        ...

    def put(self, array: NDArray[Any]) -> Array:
        """The array as it is, in this store's memory. Raises MemoryError."""
        ...

    def repack(self, stored: StoredWords) -> dict[str, Array]:
        """The tensors of a layer of 4-bit integers, as pack_words makes them. Raises MemoryError."""
        ...

    def random_words(self, shape: tuple[int, ...], seed: tuple[int, int]) -> Array:
        """An array of uint32 of which every bit is random, the same for the same seed. Raises MemoryError."""
        ...

    def flush(self) -> None:
        """What was asked for is there, for all that is done after this. Before it only what `empty` gives is."""
        ...

    def fill_normally(self, array: Array, seed: tuple[int, int], std: float) -> None:
        """Fills an array with normal numbers of this standard deviation, the same for the same seed."""
        ...


class HostStore:
    """float32 in this process's memory."""

    itemsize = 4

    def empty(self, shape: tuple[int, ...], dtype: Any = np.float32) -> NDArray[Any]:
        return np.empty(shape, dtype)

    def read(self, tensor: StoredTensor, target: NDArray[Any]) -> None:
        if target.dtype != np.float32:
            target[...] = map_bytes(tensor).view(target.dtype).reshape(target.shape)
            return
        if target.flags.c_contiguous:
            read_into(tensor, target)
            return
        stored = np.empty(target.shape, np.float32)
        read_into(tensor, stored)
        target[...] = stored

    def write(self, values: NDArray[np.float32], target: NDArray[np.float32]) -> None:
        target[...] = values

    def put(self, array: NDArray[Any]) -> NDArray[Any]:
        return array

    def repack(self, stored: StoredWords) -> dict[str, Array]:
        return pack_words(stored)

    def random_words(self, shape: tuple[int, ...], seed: tuple[int, int]) -> NDArray[np.uint32]:
        return np.random.default_rng(seed).integers(0, 2**32, shape, np.uint32)

    def flush(self) -> None:
        """It is there."""

    def fill_normally(self, array: NDArray[np.float32], seed: tuple[int, int], std: float) -> None:
        np.random.default_rng(seed).standard_normal(out=array, dtype=np.float32)
        array *= np.float32(std)
