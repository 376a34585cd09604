"""Runs one case on an op table: the values, and what must hold besides them.

Values       every output within its tolerance of ref in float64; integers equal.
Borders      no input is written that the case does not list, and nothing beside the part that the op was given; on a
             device nothing beside what it allocated either.
Determinism  the same inputs again give the same bits, also when fresh memory is full of NaN.
Independence other content of other rows, and of memory that belongs to nobody, changes no bit of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from conformance.case import HALVES, Case, Inputs, Kept, Outputs, Result
from conformance.compare import Comparison, compare
from conformance.memory import DTYPES, Memory, NumpyMemory, whole_of
from engine.ops import OpTable
from ref.numerics import round_to

Array = NDArray[Any]

DISTURBANCES = 2  # how many different changes of other rows are tried


def check(case: Case, ops: OpTable, seed: int = 0, memory: Memory | None = None, repeats: bool = True) -> Result:
    """The verdict on one case. BLAS has one thread, as in the engine; more may be in the op table.

    memory: where ops works; None = on NumPy's arrays. repeats: whether more is checked than the values and borders.
    """
    with threadpool_limits(1, user_api="blas"):
        return _check(case, ops, seed, NumpyMemory() if memory is None else memory, repeats)


def _check(case: Case, ops: OpTable, seed: int, memory: Memory, repeats: bool) -> Result:
    inputs = stored_inputs(case, seed)
    truth, yardstick = run_reference(case, inputs)
    try:
        outputs, problems = _run(case, ops, memory, inputs, 0)
        comparisons = [_compare_output(name, outputs, truth, yardstick, case) for name in truth | outputs]
        problems += [comparison.problem for comparison in comparisons if comparison.problem]
        if repeats and not problems:
            problems += _repeat(case, ops, seed, memory, outputs)
    except Exception as error:  # whatever a candidate raises is a failure of its case; the other cases must still run
        comparisons = [Comparison(np.inf, 0.0)]
        problems = [f"raised {type(error).__name__}: {error}"]
    worst = max(comparisons, key=lambda comparison: comparison.share)
    return Result(case.stem, case.name, "FAIL" if problems else "ok", worst.error, worst.limit, tuple(problems))


def run_reference(case: Case, inputs: Inputs) -> tuple[Outputs, Outputs]:
    """Truth, which is ref in float64, and yardstick, which is ref in the storage type."""
    storage = {"storage": case.storage} if case.storages else {}
    truth = case.reference(**in_dtype(inputs, np.dtype(np.float64)), **dict.fromkeys(storage))
    return truth, _yardstick(case, case.reference(**in_dtype(inputs, compute_dtype(case)), **storage))


def stored_inputs(case: Case, seed: int) -> Inputs:
    """A case's inputs, in float32 that the storage type holds exactly."""
    inputs = case.make_inputs(seed)
    _round(inputs, case)
    return inputs


def _round(inputs: Inputs, case: Case) -> None:
    """In place; float32 and wider are as they were made."""
    if case.storage not in HALVES:
        return
    for name, value in inputs.items():
        if isinstance(value, dict):
            _round(value, case)
        elif is_floating(value) and name not in case.wide:
            value[...] = round_to(value, case.storage)


def is_floating(value: Any) -> bool:
    return isinstance(value, np.ndarray) and bool(np.issubdtype(value.dtype, np.floating))


def compute_dtype(case: Case) -> np.dtype[Any]:
    """What ref runs in for the yardstick: float32 or wider."""
    return np.dtype(np.float64 if case.storage == "float64" else np.float32)


def in_dtype(inputs: Mapping[str, Any], dtype: np.dtype[Any]) -> Inputs:
    """Inputs with every floating array converted to dtype, always as a copy; tables of arrays too."""
    converted: Inputs = {}
    for name, value in inputs.items():
        if is_floating(value):
            converted[name] = value.astype(dtype)
        else:
            converted[name] = in_dtype(value, dtype) if isinstance(value, dict) else value
    return converted


def _yardstick(case: Case, outputs: Outputs) -> Outputs:
    """ref run in the storage type: computed in float32 or wider, rounded once at the end."""
    return {
        name: round_to(value, case.storage).astype(compute_dtype(case))
        if is_floating(value) and name not in case.wide
        else value
        for name, value in outputs.items()
    }


def stored_dtype(case: Case, name: str) -> np.dtype[Any]:
    """What a floating input or output of this name is stored as."""
    return np.dtype(np.float32) if name in case.wide else DTYPES.get(case.storage, compute_dtype(case))


def judged_as(case: Case, name: str) -> str:
    """The storage type whose roundings an output of this name may have."""
    return "float32" if name in case.wide else case.storage


def _compare_output(name: str, outputs: Outputs, truth: Outputs, yardstick: Outputs, case: Case) -> Comparison:
    if name not in outputs or name not in truth:
        return Comparison(np.inf, 0.0, f"output {name} is {'missing' if name in truth else 'not one of ref'}")
    actual = outputs[name]
    if is_floating(truth[name]):
        expected = stored_dtype(case, name)
        if actual.dtype != expected:
            return Comparison(np.inf, 0.0, f"output {name} is {actual.dtype}, expected {expected}")
        actual = actual.astype(compute_dtype(case))
    elif case.undecided is not None and actual.shape == truth[name].shape:
        actual = np.where(truth[name] == case.undecided, truth[name], actual)
    result = compare(actual, truth[name], yardstick[name], case.tolerance, judged_as(case, name))
    return Comparison(result.error, result.limit, f"output {name} {result.problem}" if result.problem else "")


def _run(case: Case, ops: OpTable, memory: Memory, inputs: Inputs, run: int) -> tuple[Outputs, list[str]]:
    """Copies of the outputs, and which memory was written that should not have been."""
    arrays = {name: value for name, value in inputs.items() if isinstance(value, np.ndarray)}
    before = {name: (array.copy(), whole_of(array).copy()) for name, array in arrays.items()}
    dtypes = {name: stored_dtype(case, name) for name, array in arrays.items() if is_floating(array)}
    outputs = case.candidate(ops, **memory.place(inputs, dtypes, run))
    outputs = {name: memory.fetch(value) for name, value in outputs.items()}
    problems = memory.bring_back()
    for name, array in arrays.items():
        part, whole = before[name]
        if name in case.changes:
            array[...] = part  # what may change is put back, so that the border around it can be compared
        if not same_bits(whole_of(array), whole):
            where = "the memory around input" if name in case.changes else "input"
            problems.append(f"{where} {name} was written")
    return outputs, problems


def _repeat(case: Case, ops: OpTable, seed: int, memory: Memory, outputs: Outputs) -> list[str]:
    """Runs the candidate again in ways that must not change a bit."""
    again, _ = _run(case, ops, memory, stored_inputs(case, seed), 1)
    problems = _differences("on a second run", outputs, again, lambda value, name: value)
    poisoned = memory.poisoned()
    if poisoned is not None:
        with poisoned:
            again, _ = _run(case, ops, memory, stored_inputs(case, seed), 2)
        problems += _differences("when fresh memory holds NaN", outputs, again, lambda value, name: value)
    for round_number in range(DISTURBANCES if case.disturb is not None else 0):
        inputs = stored_inputs(case, seed)
        kept: Kept = case.disturb(inputs, np.random.default_rng([seed, round_number]))  # type: ignore[misc]
        _round(inputs, case)
        disturbed, _ = _run(case, ops, memory, inputs, 2 + round_number)
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
