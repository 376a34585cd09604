"""Somebody else's function, named on the command line: FILE.py:function or module:function.

What cannot be loaded, or could not be called, is refused in one line before any case runs.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

Function = Callable[..., Any]

FORM = "wanted FILE.py:function or module:function, or of a kernel FILE.cu:entry"


class ImplementationError(ValueError):
    """An --impl that cannot be used; the message says what was found and what is wanted."""


def load_implementation(name: str, parameters: Sequence[str]) -> Function:
    """The function that `name` names, ready to be called with arguments of these names.

    Raises:
        ImplementationError: no such file, module or function; code that fails as it is imported; a function that
            cannot take the parameters by name, or wants more.
    """
    place, colon, entry = name.rpartition(":")
    if not (colon and place and entry.isidentifier()):
        raise ImplementationError(f"--impl {name}: {FORM}")
    if place.endswith((".cu", ".so", ".ptx")):
        raise ImplementationError(f"--impl {name}: only Python functions are run here; {FORM}")
    is_file = place.endswith(".py") or "/" in place or "\\" in place
    module = _import_file(Path(place)) if is_file else _import_module(place)
    function = getattr(module, entry, None)
    if function is None:
        own = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
        raise ImplementationError(f"{place} has no function {entry}; it has {', '.join(own) or 'no function at all'}")
    if not callable(function):
        raise ImplementationError(f"{entry} of {place} is no function but {type(function).__name__}")
    _check_parameters(function, entry, parameters)
    return function  # type: ignore[no-any-return]


def where_raised(error: BaseException, function: Function) -> str:
    """ "FILE, line N" of the last line of the function's own file that an error passed through; "" if of none."""
    file = getattr(getattr(function, "__code__", None), "co_filename", None)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}" if frames else ""


def _import_file(path: Path) -> ModuleType:
    """Runs a file as a module whose neighbours it may import, as `python FILE` would."""
    if not path.is_file():
        raise ImplementationError(
            f"there is no file {path} below {Path.cwd()}" if not path.is_absolute() else f"there is no file {path}"
        )
    spec = importlib.util.spec_from_file_location(f"implementation_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImplementationError(f"{path} is no Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ImplementationError(f"{path} cannot be imported: {_in_a_line(error, path)}") from error
    finally:
        sys.path.remove(str(path.resolve().parent))
    return module


def _import_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            raise ImplementationError(f"there is no module {name}; for a file write {name}.py:function") from error
        raise ImplementationError(f"module {name} cannot be imported: {_in_a_line(error)}") from error


def _in_a_line(error: BaseException, path: Path | None = None) -> str:
    if isinstance(error, SyntaxError):
        return f"line {error.lineno}: {error.msg}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f"{f'line {lines[-1]}: ' if lines else ''}{type(error).__name__}: {error}"


def _check_parameters(function: Function, entry: str, parameters: Sequence[str]) -> None:
    wanted = f"{entry}({', '.join(parameters)})"
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # a builtin that does not say what it takes
    try:
        signature.bind(**dict.fromkeys(parameters))
    except TypeError as error:
        raise ImplementationError(
            f"{entry}{signature} cannot be called as {wanted}: {error}; the names must be these, in any order"
        ) from error
