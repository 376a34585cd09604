"""Kernels of others in the place of ours: --op OP --impl FILE.cu:entry, or --op OP --impl module:function.

FILE.cu:entry     a __global__ function with the template and call parameters of the kernel OP in cuda/, launched as the
                  head of that file says; without a template it is used for every type. Includes are looked for in
                  cuda/include and in the folder of the file.
module:function   in place of the function OP of the op table (engine.ops): called by name with ref's leading parameters
                  (of linear: x, weight, bias), on arrays of NumPy, bfloat16 being ml_dtypes', or of CuPy. What it
                  returns is anything that speaks DLPack; what ref changes in place it must change in place.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from conformance.case import Case
from conformance.engine_run import namespace_of
from conformance.host_build import CUDA
from conformance.implementation import ImplementationError, load_implementation
from conformance.machines import Swap, dry_run, kernels_of
from engine.kernels.device import Device, Instance
from engine.kernels.notes import Notes
from engine.ops import OpTable, cpu_ops
from engine.weights import LinearWeight

Array = Any


WHOLE_MODELS = "llama"  # stem of cases that are no case of one op
GLOBAL = re.compile(r"(template\s*<[^{};]*?>\s*)?__global__\s+[^;{}]*?\b(\w+)\s*\((?=[^()]*\w+\s*[*&\w]*\s+\w+)")
ASIDE = re.compile(r"//[^\n]*|/\*.*?\*/|\b__launch_bounds__\s*\((?:[^()]|\([^()]*\))*\)", re.DOTALL)  # no name is in it
OPS = tuple(field.name for field in fields(OpTable) if field.name not in ("prepare", "sampling", "mla_split_kv_b"))
LINEAR = ("linear", "logits")  # ops that take a LinearWeight


def is_kernel(impl: str) -> bool:
    return impl.rpartition(":")[0].endswith(".cu")


def swapped_kernel(op: str, impl: str) -> Swap:
    """Which instance is to be launched in place of which.

    Raises:
        ImplementationError: no such file, or no such kernel in it.
    """
    file, _, entry = impl.rpartition(":")
    path = Path(file).resolve()
    if not path.is_file():
        raise ImplementationError(f"--impl {impl}: there is no file {path}")
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ImplementationError(f"--impl {impl}: {path} cannot be read as UTF-8: {error}") from error
    text = ASIDE.sub("", text)
    kernels = {name: bool(template) for template, name in GLOBAL.findall(text)}
    if entry not in kernels:
        raise ImplementationError(f"{file} has no kernel {entry}; it has {', '.join(kernels) or 'none'}")
    found, wanted = _parameters(text, entry), _own_parameters(op)
    if wanted and len(found) != len(wanted):
        raise ImplementationError(
            f"--impl {impl}: {entry} has {len(found)} parameters, {op} of cuda/ has {len(wanted)}: {', '.join(wanted)}"
        )

    def swap(instance: Instance) -> Instance:
        name, bracket, arguments = instance.entry.partition("<")
        if name != op:
            return instance
        return Instance(str(path.with_suffix("")), f"{entry}{bracket}{arguments}" if kernels[entry] else entry)

    return swap


def _own_parameters(op: str) -> list[str]:
    """Of the kernel of this name in cuda/; empty: there is none."""
    for path in sorted(CUDA.glob("*.cu")):
        text = ASIDE.sub("", path.read_text("utf-8"))
        if any(name == op for _, name in GLOBAL.findall(text)):
            return _parameters(text, op)
    return []


def _parameters(text: str, entry: str) -> list[str]:
    """What stands between the brackets of a kernel, between commas that are in no brackets of their own."""
    head = next(match for match in GLOBAL.finditer(text) if match[2] == entry)
    depth, found = 1, [""]
    for character in text[head.end() :]:
        depth += (character in "(<[{") - (character in ")>]}")
        if not depth:
            break
        if character == "," and depth == 1:
            found.append("")
        else:
            found[-1] += character
    return [" ".join(parameter.split()) for parameter in found]


def cases_of_kernel(op: str, cases: Sequence[Case], like: Device) -> list[Case]:
    """The cases that launch the kernel of this name.

    Raises:
        ImplementationError: there is none; names those that there are.
    """
    launched = [
        (case, {kernel.entry.partition("<")[0] for kernel in kernels_of([case], like)}) for case in _single(cases)
    ]
    found = [case for case, names in launched if op in names]
    if not found:
        known = sorted(set().union(*(names for _, names in launched)))
        raise ImplementationError(f"--op {op}: no case launches a kernel of this name; they launch {', '.join(known)}")
    return found


def cases_of_function(op: str, cases: Sequence[Case]) -> list[Case]:
    """The cases that call this function of the op table.

    Raises:
        ImplementationError: there is no such function, or no case of it.
    """
    if op not in OPS:
        raise ImplementationError(f"--op {op} is no function of the op table; there are {', '.join(OPS)}")

    def calls(case: Case) -> bool:
        called: list[str] = []

        def note(*args: Any, **kwargs: Any) -> None:
            """Quantized weights are no arrays that another's linear could be given."""
            if all(arg.format == "dense" for arg in args if isinstance(arg, LinearWeight)):
                called.append(op)

        dry_run(case, Notes(), **{op: note})
        return bool(called)

    found = [case for case in _single(cases) if calls(case)]
    if not found:
        raise ImplementationError(f"--op {op}: this target has no case that calls it")
    return found


def with_function(ops: OpTable, op: str, impl: str) -> OpTable:
    """The op table with somebody else's function in it.

    Raises:
        ImplementationError: see conformance.implementation.
    """
    signature = inspect.signature(getattr(cpu_ops(), op))
    parameters = [p for p in signature.parameters.values() if p.name != "team"]
    names = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
    function = load_implementation(impl, [*names, "bias"] if op in LINEAR else names)
    call = partial(_call, function, signature.replace(parameters=parameters), op in LINEAR)
    return replace(ops, **{op: call}, **({"prepare": _as_it_is} if op in LINEAR else {}))


def _single(cases: Sequence[Case]) -> list[Case]:
    return [case for case in cases if case.stem != WHOLE_MODELS]


def _as_it_is(weight: LinearWeight) -> LinearWeight:
    return weight


def _call(
    function: Callable[..., Any], signature: inspect.Signature, is_linear: bool, *args: Any, **kwargs: Any
) -> Any:
    values = dict(signature.bind(*args, **kwargs).arguments)
    if is_linear:
        weight = values.pop("weight")
        values |= {"weight": weight.tensors["weight"], "bias": weight.bias}
    namespace = namespace_of(next(value for value in values.values() if hasattr(value, "dtype")))
    found = function(**values)
    if isinstance(found, tuple | list):
        return tuple(_as_array(value, namespace) for value in found)
    return _as_array(found, namespace)


def _as_array(value: Any, namespace: Any) -> Array:
    if value is None or isinstance(value, namespace.ndarray):
        return value
    return namespace.from_dlpack(value) if hasattr(value, "__dlpack__") else np.asarray(value)
