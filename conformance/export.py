"""Cases as files, for kernels in other languages: inputs, what ref answers, and how far an answer may be from it.

DIR/<stem>/<case>/case.json and a .npy beside it for each array: input.<name>, golden.<name> (ref in float64) and
yardstick.<name> (ref in the storage type, float32). bfloat16 is stored as uint16, its bits; case.json has the true
types. An output passes if both measures of conformance.compare keep their limits, which case.json has too.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.case import Case
from conformance.check import (
    is_floating,
    judged_as,
    run_reference,
    stored_dtype,
    stored_inputs,
)
from conformance.compare import error_limits
from conformance.memory import cast

README = """Each folder is a case: case.json says which array is in which .npy and what its type is (bfloat16 is
stored as uint16: its bits), the values of all other parameters, and for each output two limits:

  error(i) = |answer(i) - golden(i)| / max(|golden(i)|, root mean square of golden's row)
  root mean square of error over all elements <= "limit",   largest error <= "worst_limit"

where a row is the last axis; both infinite or both NaN counts as 0; integers must be equal. Arrays under "changes"
are written in place. "golden" is computed in float64 from the inputs as stored.
"""


def export(cases: Sequence[Case], folder: Path, seed: int) -> int:
    """Writes the cases that are functions of arrays; the number of those written.

    Raises:
        OSError: the folder cannot be written, or is not empty: what lies there, cases of another seed or a README of
            somebody's, would be taken for part of it or lost.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise OSError(errno.ENOTEMPTY, "it is not empty", str(folder))
    (folder / "README.txt").write_text(README, encoding="utf-8")
    written = []
    for case in cases:
        inputs = stored_inputs(case, seed)
        if not any(isinstance(value, dict) for value in inputs.values()):  # no whole models
            _write(case, inputs, folder / case.stem / case.name, seed)
            written.append(f"{case.stem}/{case.name}")
    (folder / "cases.json").write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    return len(written)


def _write(case: Case, inputs: dict[str, Any], folder: Path, seed: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    truth, yardstick = run_reference(case, inputs)
    arrays = {name: value for name, value in inputs.items() if isinstance(value, np.ndarray)}
    about: dict[str, Any] = {
        "stem": case.stem,
        "case": case.name,
        "seed": seed,
        "storage": case.storage,
        "axes": dict(case.axes),
        "changes": list(case.changes),
        "inputs": {name: _save(folder / f"input.{name}.npy", _stored(case, name, v)) for name, v in arrays.items()},
        "parameters": {name: value for name, value in inputs.items() if name not in arrays},
        "outputs": {},
    }
    for name, value in truth.items():
        limits = error_limits(value, yardstick[name], case.tolerance, judged_as(case, name))
        about["outputs"][name] = {
            **_save(folder / f"golden.{name}.npy", value),
            "dtype": stored_dtype(case, name).name if is_floating(value) else value.dtype.name,
            "limit": limits[0],
            "worst_limit": limits[1],
        }
        _save(folder / f"yardstick.{name}.npy", yardstick[name])
    (folder / "case.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def _stored(case: Case, name: str, array: NDArray[Any]) -> NDArray[Any]:
    return cast(array, stored_dtype(case, name)) if is_floating(array) else array


def _save(path: Path, array: NDArray[Any]) -> dict[str, Any]:
    """Writes an array and says what it is."""
    bits = array.view(np.uint16) if array.dtype.name == "bfloat16" else array
    np.save(path, np.ascontiguousarray(bits).reshape(array.shape))
    return {"file": path.name, "dtype": array.dtype.name, "shape": list(array.shape)}
