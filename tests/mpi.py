"""Starts Python over ranks, as a user does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
MPIRUN = Path(sys.executable).parent / "mpirun"


def mpirun(num_ranks: int, *arguments: str, timeout: float = 300) -> str:
    """What `mpirun -n N python ARGUMENTS` prints. Raises AssertionError with it where the exit status is not 0."""
    command = [str(MPIRUN), "-n", str(num_ranks), sys.executable, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT) as process:
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.terminate()  # it ends its ranks
            raise
    assert process.returncode == 0, output
    return output
