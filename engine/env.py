"""The environment variables that Glint reads, in one table; everything else is a flag (see options).

Others that begin with GLINT_ are left alone: Kubernetes makes GLINT_PORT and the like for a service named glint.
Libraries read their own (HF_HOME, HF_TOKEN), and the starter model is kept under XDG_CACHE_HOME.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import ConfigError

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


@dataclass(frozen=True, slots=True)
class Environment:
    """Values of the variables, or their defaults."""

    log_level: str = "INFO"
    api_key: tuple[str, ...] = ()
    island_size: int = 1 << 30


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable; an empty one counts as absent."""

    name: str
    field: str  # of Environment
    convert: Callable[[str], Any]  # ValueError says what is wrong
    help: str


def _log_level(value: str) -> str:
    if value.upper() not in LOG_LEVELS:
        raise ValueError(f"is {value!r}; it must be one of {', '.join(LOG_LEVELS)}")
    return value.upper()


def _keys(value: str) -> tuple[str, ...]:
    keys = tuple(key.strip() for key in value.split(","))
    if not all(keys):
        raise ValueError("has an empty key; it must be keys with commas between them")
    return keys


def _count(value: str) -> int:
    if not value.isdigit() or int(value) < 1:
        raise ValueError(f"is {value!r}; it must be a number from 1 on")
    return int(value)


VARIABLES = (
    Variable("GLINT_LOG_LEVEL", "log_level", _log_level, "DEBUG, INFO (the default), WARNING or ERROR"),
    Variable("GLINT_API_KEY", "api_key", _keys, "keys with commas between them, if no --api-key is given"),
    Variable("GLINT_ISLAND_SIZE", "island_size", _count, "GPUs that reach each other's memory; by default all"),
)


def read_environment(environ: Mapping[str, str]) -> Environment:
    """Raises ConfigError with all that is wrong, one variable a line."""
    values: dict[str, Any] = {}
    problems = []
    for variable in VARIABLES:
        value = environ.get(variable.name, "")
        if not value:
            continue
        try:
            values[variable.field] = variable.convert(value)
        except ValueError as error:
            problems.append(f"the environment variable {variable.name} {error}")
    if problems:
        raise ConfigError("\n".join(problems))
    return Environment(**values)


# What MPI's launchers tell each process about its job: Open MPI, and MPICH or Intel MPI.
_RANK_COUNTS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")


def launched_ranks(environ: Mapping[str, str]) -> int:
    """How many ranks the MPI launcher started; 1 without one."""
    counts = [int(environ[name]) for name in _RANK_COUNTS if environ.get(name, "").isdigit()]
    return max(counts, default=1)


def launched_rank(environ: Mapping[str, str]) -> int:
    """Which of them this process is, as its launcher says; 0 without one."""
    return max((int(environ[name]) for name in _RANKS if environ.get(name, "").isdigit()), default=0)
