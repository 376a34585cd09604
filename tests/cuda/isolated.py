"""Faults in the text of a kernel, and a process of its own for what one may take with it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any

PROCESSES = get_context("forkserver")
PROCESSES.set_forkserver_preload(  # so that a new process has imported everything
    [
        f"tests.cuda.test_{name}"
        for name in ("mutants", "all_reduce", "attention_splits", "kv_codes", "linear", "sampling")
    ]
)


def isolated(function: Callable[..., str], *arguments: Any) -> str:
    """The answer of a function that runs in a process of its own, or that the process died: a kernel that writes where
    it should not can take all with it."""
    with ProcessPoolExecutor(1, PROCESSES) as pool:
        try:
            return pool.submit(function, *arguments).result()
        except BrokenProcessPool:
            return "the process died"


def planted(text: str, old: str, new: str) -> str:
    assert text.count(old) == 1, f"{old!r} is there {text.count(old)} times"
    return text.replace(old, new)
