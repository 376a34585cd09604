"""Runs a kernel and its ref function on the same inputs and says what is wrong with the kernel's outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from conformance.compare import compare
from conformance.tolerance import RULE, Tolerance
from ref.numerics import round_to
from tests.cuda.launchers import margin_is_written

Array = NDArray[Any]
Outputs = Mapping[str, Array]

STORAGES = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def is_floating(value: object) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind in "fV"


def stored(inputs: Mapping[str, Any], storage: str, wide: tuple[str, ...] = ()) -> dict[str, Any]:
    """Inputs as the kernel gets them: floating arrays in the storage type, those in `wide` float32; views stay so."""
    converted = dict(inputs)
    for name, value in inputs.items():
        if is_floating(value) and name not in wide:
            rounded = value.astype(STORAGES[storage])
            converted[name] = rounded if value.flags.c_contiguous else framed(rounded)
    return converted


def framed(array: Array) -> Array:
    """An equal view into a larger array of NaN: no two rows are neighbours."""
    whole = np.full([n + 2 for n in array.shape], np.nan, array.dtype)
    view = whole[tuple(slice(1, -1) for _ in array.shape)]
    view[...] = array
    return view


def problems(
    kernel: Callable[..., Outputs],
    reference: Callable[..., Outputs],
    inputs: Mapping[str, Any],
    storage: str,
    wide: tuple[str, ...] = (),
    tolerance: Tolerance = RULE,
) -> list[str]:
    """What is wrong, a line an output; [] = all within the tolerance.

    Args:
        kernel, reference: the same inputs by name, the same outputs by name; reference also takes `storage`.
    """
    given = stored(inputs, storage, wide)
    copies = {
        dtype: {n: np.array(v, dtype) if is_floating(v) else v for n, v in given.items()}
        for dtype in (np.float64, np.float32)
    }
    truth = reference(**copies[np.float64], storage=None)
    yardstick = reference(**copies[np.float32], storage=storage)
    found = []
    for name, value in kernel(**given).items():
        if not any(value is one for one in given.values()) and margin_is_written(value):
            found.append(f"{name} was written beside its ends")
        actual = np.array(value, np.float32)
        expected = round_to(yardstick[name], storage).astype(np.float32)
        problem = compare(actual, truth[name].astype(np.float64), expected, tolerance, storage).problem
        if problem:
            found.append(f"{name} {problem}")
    return found
