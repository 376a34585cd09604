"""The law of one vocabulary: an operation has one name in ref, cuda, engine and conformance, and one parameter list.

A stem is a file's name without suffix; its first part is the operation: attention_decode.cu belongs to attention.
"""

import inspect
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from importlib import import_module
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest

from conformance.suite import OPS, cases
from engine.ops import OpTable, cpu_ops

ROOT = Path(__file__).parent.parent
HELPERS = {"team"}  # engine/cpu/team.py: the threads of a matrix product, no operation
FORMATS = {  # stem → ref file
    "all_gather": "collectives",
    "all_reduce": "collectives",
    "all_reduce_islands": "collectives",
    "all_reduce_pair": "collectives",
    "all_reduce_pieces": "collectives",
    "gather_columns": "quant/groups",
    "int8_codes": "int8_feedback",
    "quantize": "quant/fused",
    "repack4": "quant/groups",
    "sum_parts": "collectives",
}
WITHOUT_CASES = {"repack4"}  # puts words in another order: tests/cuda compares each with what engine.packed4 makes
OTHER_ARGUMENTS = {
    "sampling.apply_penalties": "ids with what each loses, which the sampler keeps: counting a whole text for every "
    "token would cost more than the penalties",
}


def stems(folder: str, suffix: str) -> list[str]:
    return sorted(file.stem for file in (ROOT / folder).glob(f"[!_]*{suffix}"))


def operation(stem: str) -> str:
    """The longest beginning of a stem that is a file of ref: rope_table belongs to rope, kv_cache_copy to kv_cache.

    What number formats alone have is defined in ref/quant, file by file of another name.
    """
    if stem in FORMATS:
        return FORMATS[stem]
    parts = stem.split("_")
    names = ["_".join(parts[:count]) for count in range(len(parts), 0, -1)]
    return next((name for name in names if (ROOT / "ref" / f"{name}.py").exists()), "")


CPU_STEMS = [stem for stem in stems("engine/cpu", ".py") if stem not in HELPERS]
STEMS = {*CPU_STEMS, *stems("cuda", ".cu"), *(op.__name__.split(".")[-1] for op in OPS)}


def public_functions(module: ModuleType) -> dict[str, Callable[..., Any]]:
    """Functions that a module defines itself."""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, FunctionType) and value.__module__ == module.__name__ and not name.startswith("_")
    }


def leading_parameters(function: Callable[..., Any]) -> list[str]:
    """Names of the parameters that may be given by position."""
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind in by_position]


def agrees(function: Callable[..., Any], reference: Callable[..., Any]) -> bool:
    """Whether one's parameters begin with those of the other: either may know more of them at the end."""
    pairs = zip(leading_parameters(function), leading_parameters(reference), strict=False)
    return all(name == other for name, other in pairs)


def twins() -> list[tuple[str, Callable[..., Any], Callable[..., Any]]]:
    """(stem.name, function of engine.cpu, function of ref) of all that exist on both sides."""
    found = []
    for stem in CPU_STEMS:
        reference = public_functions(import_module(f"ref.{operation(stem)}"))
        for name, function in public_functions(import_module(f"engine.cpu.{stem}")).items():
            if name in reference:
                found.append((f"{stem}.{name}", function, reference[name]))
    return found


@pytest.mark.parametrize("stem", sorted(STEMS))
def test_a_stem_begins_with_a_file_of_ref(stem: str) -> None:
    assert (ROOT / "ref" / f"{operation(stem)}.py").is_file(), f"no ref/{stem}.py, nor one of a beginning of that name"


@pytest.mark.parametrize("stem", sorted(STEMS - WITHOUT_CASES))
def test_a_stem_has_cases(stem: str) -> None:
    files = {op.__name__.split(".")[-1] for op in OPS}
    assert {stem, operation(stem)} & files, f"conformance has neither {stem}.py nor {operation(stem)}.py in its suite"


def test_cases_are_named_after_their_file() -> None:
    for op in OPS:
        name = op.__name__.split(".")[-1]
        assert {case.stem for case in op.cases()} in ({name}, {operation(name)})
    assert {case.stem for case in cases("golden")} <= set(stems("ref/model", ".py"))


@pytest.mark.parametrize(("name", "function", "reference"), twins(), ids=lambda value: str(value).split(" ")[0])
def test_a_twin_has_the_parameters_of_ref(
    name: str, function: Callable[..., Any], reference: Callable[..., Any]
) -> None:
    if name in OTHER_ARGUMENTS:
        assert not agrees(function, reference), f"{name} needs no exception any more"
    else:
        assert agrees(function, reference), f"{leading_parameters(function)} is not {leading_parameters(reference)}"


def test_every_twin_has_a_function_of_ref() -> None:
    """Each stem shares at least one name with ref, and all of the op table's names are names of ref."""
    assert {name.split(".")[0] for name, _, _ in twins()} == set(CPU_STEMS)
    modules = [f"ref.{stem}" for stem in stems("ref", ".py")] + [
        f"ref.quant.{stem}" for stem in stems("ref/quant", ".py")
    ]
    known = {name for module in modules for name in public_functions(import_module(module))}
    ops = {field.name for field in fields(OpTable)} - {"prepare", "sampling"}  # a layout of weights; a module
    assert ops <= known


def test_the_op_table_holds_functions_of_its_own_names() -> None:
    table = cpu_ops()
    for field in fields(OpTable):
        if field.name not in ("prepare", "sampling"):
            function = getattr(table, field.name)
            function = function.func if isinstance(function, partial) else function
            assert function.__name__ == field.name


def test_no_empty_exceptions() -> None:
    assert all(len(reason.split()) >= 5 for reason in OTHER_ARGUMENTS.values())
    assert OTHER_ARGUMENTS.keys() <= {name for name, _, _ in twins()}
    assert all((ROOT / "engine/cpu" / f"{stem}.py").exists() for stem in HELPERS)
    assert FORMATS.keys() | WITHOUT_CASES <= STEMS


def test_agreement_can_fail() -> None:
    def reference(x: int, weight: int, bias: int = 0) -> None: ...
    def shorter(x: int, weight: int, *, out: int = 0) -> None: ...
    def longer(x: int, weight: int, bias: int, more: int) -> None: ...
    def renamed(x: int, w: int) -> None: ...
    def reordered(weight: int, x: int) -> None: ...

    assert agrees(shorter, reference)
    assert agrees(longer, reference)
    assert not agrees(renamed, reference)
    assert not agrees(reordered, reference)
