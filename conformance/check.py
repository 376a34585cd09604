"""Runs one case on an op table: the values, and what must hold besides them.

Values       every output within its tolerance of ref in float64; integers equal.
Borders      no input is written that the case does not list, and nothing beside the part that the op was given.
Determinism  the same inputs again give the same bits, also when fresh memory is full of NaN.
Independence other content of other rows, and of memory that belongs to nobody, changes no bit of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from conformance.case import Case, Inputs, Kept, Outputs, Result
from conformance.compare import Comparison, compare
from conformance.inputs import poisoned_allocations
from engine.ops import OpTable
from ref.numerics import round_to

Array = NDArray[Any]

DISTURBANCES = 2  # how many different changes of other rows are tried


def check(case: Case, ops: OpTable, seed: int = 0) -> Result:
    """The verdict on one case. BLAS has one thread, as in the engine; more may be in the op table."""
    with threadpool_limits(1, user_api="blas"):
        return _check(case, ops, seed)


def _check(case: Case, ops: OpTable, seed: int) -> Result:
    truth = case.reference(**in_dtype(case.make_inputs(seed), np.dtype(np.float64)))
    yardstick = _yardstick(case, seed)
    try:
        outputs, problems = _run(case, ops, case.make_inputs(seed))
        comparisons = [_compare_output(name, outputs, truth, yardstick, case) for name in truth | outputs]
        problems += [comparison.problem for comparison in comparisons if comparison.problem]
        if not problems:
            problems += _repeat(case, ops, seed, outputs)
    except Exception as error:  # whatever a candidate raises is a failure of its case; the other cases must still run
        comparisons = [Comparison(np.inf, 0.0)]
        problems = [f"raised {type(error).__name__}: {error}"]
    worst = max(comparisons, key=lambda comparison: comparison.share)
    return Result(case.stem, case.name, "FAIL" if problems else "ok", worst.error, worst.limit, tuple(problems))


def in_dtype(inputs: Mapping[str, Any], dtype: np.dtype[Any]) -> Inputs:
    """Inputs with every floating array converted to dtype, always as a copy; tables of arrays too."""
    converted: Inputs = {}
    for name, value in inputs.items():
        if isinstance(value, np.ndarray) and np.issubdtype(value.dtype, np.floating):
            converted[name] = value.astype(dtype)
        else:
            converted[name] = in_dtype(value, dtype) if isinstance(value, dict) else value
    return converted


def _yardstick(case: Case, seed: int) -> Outputs:
    """ref run in the storage type: computed in float32 or wider, rounded once at the end."""
    compute = np.dtype(np.float64 if case.storage == "float64" else np.float32)
    outputs = case.reference(**in_dtype(case.make_inputs(seed), compute))
    return {
        name: round_to(value, case.storage).astype(compute) if np.issubdtype(value.dtype, np.floating) else value
        for name, value in outputs.items()
    }


def _compare_output(name: str, outputs: Outputs, truth: Outputs, yardstick: Outputs, case: Case) -> Comparison:
    if name not in outputs or name not in truth:
        return Comparison(np.inf, 0.0, f"output {name} is {'missing' if name in truth else 'not one of ref'}")
    result = compare(outputs[name], truth[name], yardstick[name], case.tolerance, case.storage)
    return Comparison(result.error, result.limit, f"output {name} {result.problem}" if result.problem else "")


def _run(case: Case, ops: OpTable, inputs: Inputs) -> tuple[Outputs, list[str]]:
    """Copies of the outputs, and which inputs were written that should not have been."""
    arrays = {name: value for name, value in inputs.items() if isinstance(value, np.ndarray)}
    before = {name: (array.copy(), _whole(array).copy()) for name, array in arrays.items()}
    outputs = {name: np.array(value) for name, value in case.candidate(ops, **inputs).items()}
    problems = []
    for name, array in arrays.items():
        part, whole = before[name]
        if name in case.changes:
            array[...] = part  # what may change is put back, so that the border around it can be compared
        if not same_bits(_whole(array), whole):
            where = "the memory around input" if name in case.changes else "input"
            problems.append(f"{where} {name} was written")
    return outputs, problems


def _whole(array: Array) -> Array:
    """The array that a view is a part of."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _repeat(case: Case, ops: OpTable, seed: int, outputs: Outputs) -> list[str]:
    """Runs the candidate again in ways that must not change a bit."""
    again, _ = _run(case, ops, case.make_inputs(seed))
    problems = _differences("on a second run", outputs, again, lambda value, name: value)
    with poisoned_allocations():
        poisoned, _ = _run(case, ops, case.make_inputs(seed))
    problems += _differences("when fresh memory holds NaN", outputs, poisoned, lambda value, name: value)
    for round_number in range(DISTURBANCES if case.disturb is not None else 0):
        inputs = case.make_inputs(seed)
        kept: Kept = case.disturb(inputs, np.random.default_rng([seed, round_number]))  # type: ignore[misc]
        disturbed, _ = _run(case, ops, inputs)
        problems += _differences(
            "with other content in other rows", outputs, disturbed, lambda value, name, kept=kept: value[kept[name]]
        )
    return problems


def _differences(when: str, outputs: Outputs, again: Outputs, part: Callable[..., Array]) -> list[str]:
    return [
        f"output {name} has other bits {when}"
        for name in outputs
        if not same_bits(part(outputs[name], name), part(again[name], name))
    ]


def same_bits(first: Array, second: Array) -> bool:
    """Equal in shape, dtype and every bit; −0 is not 0, and a NaN is equal to itself."""
    return (first.shape, first.dtype, first.tobytes()) == (second.shape, second.dtype, second.tobytes())
