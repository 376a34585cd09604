"""The record that everything reads: pytest, `python -m conformance`, and the benchmark.

A Case says what is computed (reference, a function of ref), what must agree with it (candidate, the same function of
an op table) and on which inputs. It knows nothing of the target: a candidate takes the op table as its first
argument, so the CPU's table, a GPU's, and one with a fault planted in it run through the same cases.

Inputs are made in float32 from the seed and rounded to the storage type; truth is ref in float64 on the rounded inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.tolerance import RULE, Tolerance

Inputs = dict[str, Any]  # by parameter name
Outputs = dict[str, NDArray[Any]]  # by name: what is returned, and what is changed in place
Kept = dict[str, Any]  # output name → index of the part that must stay the same

HALVES = ("bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One op on one set of shapes."""

    stem: str  # name of the ref or .cu file, and of the file here that makes the case
    name: str  # unique within the stem, without spaces
    axes: Mapping[str, Any]  # shapes and settings by their names in the vocabulary
    make_inputs: Callable[[int], Inputs]  # of a seed; every call gives arrays of its own, equal for equal seeds
    reference: Callable[..., Outputs]
    """Of the inputs, floating arrays being float64 or float32; of a case with `storages` of `storage` too: the type to
    which ref rounds what it says under Numerics, or None."""
    candidate: Callable[..., Outputs]  # of the op table and the inputs
    storages: tuple[str, ...] = ()  # in which the kernels run it, as a case for each; () = there is no kernel for it
    storage: str = "float32"  # what inputs and outputs are stored as
    wide: tuple[str, ...] = ()  # inputs and outputs that are float32 whatever the storage type
    tolerance: Tolerance = RULE
    undecided: int | None = None  # integer that says in an output of ref: two answers are too close to tell here
    changes: tuple[str, ...] = ()  # inputs that the candidate may write
    disturb: Callable[[Inputs, np.random.Generator], Kept] | None = None
    """Changes the inputs in place, shapes apart, and says which outputs must not change by a bit."""
    skip: Mapping[str, str] = field(default_factory=dict)  # target, or "sanitizer" → why it does not run this case

    def stored_as(self, storage: str) -> Case:
        """The same case in one of its storage types, which its name ends with."""
        return replace(self, name=f"{self.name}-{storage}", storage=storage)


@dataclass(frozen=True, slots=True)
class Result:
    """What came of one case. error and tolerance are those of the output that is nearest to its limit, or past it."""

    stem: str
    case: str
    status: str  # "ok", "FAIL" or "skip"
    error: float
    tolerance: float
    problems: tuple[str, ...] = ()  # of a skip: the reason
