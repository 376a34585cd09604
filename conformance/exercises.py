"""The twelve exercises of ref/EXERCISES.md in their order, and what the command line says of them."""

from __future__ import annotations

from collections.abc import Iterator

from conformance.exercise import Exercise, run_case
from conformance.exercise_attention import ATTENTION, COMBINE, ROPE
from conformance.exercise_cache import MLA, PAGED
from conformance.exercise_experts import MOE
from conformance.exercise_formats import BF16, GPTQ, INT8
from conformance.exercise_layers import RMSNORM, TENSOR_PARALLEL, TOP_P
from conformance.implementation import load_implementation

EXERCISES = (RMSNORM, BF16, ROPE, ATTENTION, COMBINE, PAGED, TOP_P, INT8, GPTQ, TENSOR_PARALLEL, MOE, MLA)


def list_lines() -> list[str]:
    """A line an exercise, and how one is checked."""
    lines = [f"{exercise.number:2}  {exercise.signature}: {exercise.task}" for exercise in EXERCISES]
    return [*lines, f"the text is in ref/EXERCISES.md; to check one: {_command(EXERCISES[0], 'my_file.py:rmsnorm')}"]


def task_lines(number: int) -> list[str]:
    """One exercise in short. Raises ValueError if there is none of this number."""
    exercise = _numbered(number)
    return [
        f"exercise {number}: {exercise.signature}",
        exercise.task,
        f"text and a worked number: ref/EXERCISES.md; read: {exercise.read}",
        f"to check it: {_command(exercise, f'my_file.py:{exercise.function}')}",
    ]


def exercise_lines(number: int, impl: str, name: str | None = None, seed: int = 0) -> Iterator[str]:
    """Runs an exercise's cases, or the one of this name; the last line is the count.

    Raises:
        ValueError: no such exercise or case.
        ImplementationError: an impl that cannot be used.
    """
    exercise = _numbered(number)
    cases = [case for case in exercise.cases if name in (None, case.name)]
    if not cases:
        raise ValueError(f"exercise {number} has no case {name}; its cases are {_names(exercise)}")
    function = load_implementation(impl, exercise.parameters)
    failed = []
    for case in cases:
        lines = run_case(exercise, case, function, seed)
        setting = ", ".join(f"{axis} {value}" for axis, value in case.axes.items())
        yield f"{case.name} {'FAILED' if lines else 'passed'}{f'   ({setting})' if lines and setting else ''}"
        yield from (f"    {line}" for line in lines)
        failed += [case.name] if lines else []
    if failed:
        yield f"to read: exercise {number} of ref/EXERCISES.md, {exercise.read}"
        yield f"again: {_command(exercise, impl)} --case {failed[0]}{f' --seed {seed}' if seed else ''}"
    yield f"{len(cases) - len(failed)} passed, {len(failed)} failed"


def _numbered(number: int) -> Exercise:
    if not 1 <= number <= len(EXERCISES):
        raise ValueError(f"there is no exercise {number}; they go from 1 to {len(EXERCISES)}")
    return EXERCISES[number - 1]


def _names(exercise: Exercise) -> str:
    return ", ".join(case.name for case in exercise.cases)


def _command(exercise: Exercise, impl: str) -> str:
    return f"python -m conformance --exercise {exercise.number} --impl {impl}"
