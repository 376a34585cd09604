"""An exercise: a function to write, the cases that judge it, and what is said of a wrong answer.

The judge is conformance.check, as for any kernel; here are the words. An answer that is wrong in a known way is
recognized: each Mistake is run on the case that failed, and if it gives the same numbers, the reader is told so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from conformance.case import Case, Inputs, Outputs
from conformance.check import check, in_dtype
from conformance.compare import compare, elementwise_error
from conformance.implementation import Function, ImplementationError, where_raised
from conformance.tolerance import WORST_FACTOR
from engine.ops import OpTable

Array = NDArray[Any]

SAME = 1e-3  # two answers that differ by less in every element may come from the same formula
NEARER = 10  # so many times nearer to a mistake than to the truth is the mistake
NUM_SHOWN = 6


@dataclass(frozen=True, slots=True)
class Mistake:
    """A wrong function that people write, and what it does, as the end of "this is what comes out if …"."""

    what: str
    function: Function


@dataclass(frozen=True, slots=True, kw_only=True)
class Exercise:
    """One of the twelve. The text is in ref/EXERCISES.md under the same number."""

    number: int
    function: str  # its name in the text; a solution may have another
    task: str  # in one line
    parameters: tuple[str, ...]
    outputs: Mapping[str, tuple[str, ...]]  # name of each array that is returned → what its axes count
    read: str  # files of ref
    cases: tuple[Case, ...]
    mistakes: tuple[Mistake, ...]

    @property
    def signature(self) -> str:
        return f"{self.function}({', '.join(self.parameters)})"


def make_cases(
    stem: str,
    outputs: Iterable[str],
    reference: Function,
    make: Callable[..., Inputs],
    shapes: Mapping[str, Mapping[str, Any]],
) -> tuple[Case, ...]:
    """A case for each entry of shapes.

    Args:
        stem: the file of ref.
        outputs: names of the arrays that reference returns, and a solution too.
        reference: what a solution must agree with, and is called as: by names.
        make: the inputs, of a random generator and the entry.
        shapes: by name of the case.
    """
    return tuple(
        Case(
            stem=stem,
            name=name,
            axes=axes,
            make_inputs=lambda seed, axes=axes: make(np.random.default_rng(seed), **axes),  # type: ignore[misc]
            reference=lambda **inputs: _named(reference(**inputs), outputs),
            candidate=lambda function, **inputs: _named(function(**inputs), outputs),
        )
        for name, axes in shapes.items()
    )


def borrow(case: Case, parameters: Iterable[str], outputs: Iterable[str], axes: Iterable[str]) -> Case:
    """A case of the engine's ops for a function that takes some of its inputs, and has some of its axes."""

    def candidate(function: Any, **inputs: Any) -> Outputs:
        return _named(function(**{name: inputs[name] for name in parameters}), outputs)

    return replace(case, candidate=candidate, axes={axis: case.axes[axis] for axis in axes})


def run_case(exercise: Exercise, case: Case, function: Function, seed: int) -> list[str]:
    """Nothing if the function passes, else what was expected and what was found, in a few lines."""
    with np.errstate(all="ignore"):  # an overflow shows in the answer
        result = check(case, cast(OpTable, function), seed)
        return _explain(exercise, case, function, seed, result.problems) if result.problems else []


def _named(returned: Any, outputs: Iterable[str]) -> Outputs:
    """What a function returned, by name. Raises ImplementationError if it is not that many arrays."""
    names = tuple(outputs)
    found = returned if isinstance(returned, tuple) else (returned,)
    if len(found) != len(names) or not all(isinstance(array, np.ndarray | np.generic) for array in found):
        wanted = "an array" if len(names) == 1 else f"a tuple of {len(names)} arrays ({', '.join(names)})"
        kinds = ", ".join(type(value).__name__ for value in found)
        raise ImplementationError(
            f"returned {f'a tuple of {kinds}' if isinstance(returned, tuple) else kinds}, wanted {wanted}"
        )
    return {name: np.asarray(array) for name, array in zip(names, found, strict=True)}


def _explain(exercise: Exercise, case: Case, function: Function, seed: int, problems: tuple[str, ...]) -> list[str]:
    try:
        outputs = case.candidate(function, **case.make_inputs(seed))
    except ImplementationError as error:
        return [str(error)]
    except Exception as error:  # whatever it raises is the finding
        place = where_raised(error, function)
        return [f"raised {type(error).__name__}: {error}{f' ({place})' if place else ''}"]
    truth = case.reference(**in_dtype(case.make_inputs(seed), np.dtype(np.float64)))
    yardstick = case.reference(**in_dtype(case.make_inputs(seed), np.dtype(np.float32)))
    for name, axes in exercise.outputs.items():
        lines = list(_difference(name, axes, outputs[name], truth[name], yardstick[name], case))
        if lines:
            return lines + (_recognized(exercise, case, seed, outputs, truth) or _nearly(outputs[name], truth[name]))
    return [_HINTS.get(problem.partition(" ")[0], "{}").format(problem) for problem in problems]


_HINTS = {  # by the first word of what check says of values that are right
    "input": "{}: work on a copy",
    "output": "{}: is a part of an np.empty array never set?",
}


def _difference(
    name: str, axes: tuple[str, ...], actual: Array, truth: Array, yardstick: Array, case: Case
) -> Iterator[str]:
    verdict = compare(actual, truth, yardstick, case.tolerance, case.storage)
    if not verdict.problem:
        return
    if actual.shape != truth.shape:
        counted = f" ({', '.join(f'{axis}s' for axis in axes)})" if actual.ndim != truth.ndim else ""
        yield f"{name} has shape {list(actual.shape)}, expected {list(truth.shape)}{counted}"
        return
    if actual.dtype != yardstick.dtype:
        yield f"{name} is {actual.dtype}, expected {yardstick.dtype}{_dtype_hint(actual, yardstick)}"
        return
    errors = elementwise_error(actual, truth)
    is_float = np.issubdtype(truth.dtype, np.floating)
    ref_error = float(elementwise_error(yardstick, truth).max())
    limit = WORST_FACTOR * case.tolerance.limit(ref_error, case.storage) if is_float else 0.0
    wrong = errors > limit if np.any(errors > limit) else errors == errors.max()
    first = np.argwhere(wrong)[0]
    place = ", ".join(f"{axis} {i}" for axis, i in zip(axes, first, strict=True))
    yield f"{name} first differs at {place}; {np.count_nonzero(wrong)} of {errors.size} elements differ"
    run: tuple[int | slice, ...] = (*(int(i) for i in first[:-1]), slice(int(first[-1]), int(first[-1]) + NUM_SHOWN))
    yield f"expected {_shown(truth[run])}"
    yield f"found    {_shown(actual[run])}"
    num_broken = np.count_nonzero(~np.isfinite(actual) & np.isfinite(truth)) if is_float else 0
    if num_broken:
        yield f"{num_broken} of them are NaN or infinite and should not be"


def _nearly(actual: Array, truth: Array) -> list[str]:
    """Of an answer that no known mistake gives and that is off by little."""
    if actual.dtype != np.float32 or actual.shape != truth.shape:
        return []
    largest = float(elementwise_error(actual, truth).max())
    if largest >= SAME:
        return []
    return [f"nearly right: the largest error is {largest:.2g}; rounded too early, or to too few bits?"]


def _dtype_hint(actual: Array, yardstick: Array) -> str:
    if actual.dtype == np.float64 and yardstick.dtype == np.float32:
        return ": float32 with a NumPy scalar of float64, such as np.sqrt(2), makes float64"
    return ": see astype"


def _shown(values: Array) -> str:
    if np.issubdtype(values.dtype, np.unsignedinteger):
        return " ".join(f"0x{value:04X}" for value in values.tolist())
    return " ".join(f"{value:.6g}" for value in values.tolist())


def _recognized(exercise: Exercise, case: Case, seed: int, outputs: Outputs, truth: Outputs) -> list[str]:
    """A sentence that names the first mistake that gives what was found here, and not what is right.

    Of an answer that is NaN everywhere it names them all, as nothing tells them apart.
    """
    from_truth = _distance(outputs, truth)
    if from_truth == 0:  # only the dtype is wrong, or there is no element that could tell
        return []
    found = []
    for mistake in exercise.mistakes:
        try:
            wrong = case.candidate(mistake.function, **case.make_inputs(seed))
        except MemoryError:  # of a case that is about memory
            continue
        if NEARER * _distance(outputs, wrong) <= from_truth and _distance(outputs, wrong) < SAME:
            found.append(mistake.what)
    shown = found if all(np.isnan(array).all() for array in outputs.values()) else found[:1]
    return [f"this is what comes out if {'; or if '.join(shown)}"] if shown else []


def _distance(first: Outputs, second: Outputs) -> float:
    """The largest error of any element, infinite if shapes differ."""
    if any(array.shape != second[name].shape for name, array in first.items()):
        return np.inf
    return max(float(elementwise_error(array, second[name]).max(initial=0)) for name, array in first.items())
