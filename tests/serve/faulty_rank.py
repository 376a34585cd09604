"""`python -m tests.serve.faulty_rank FAULT RANK FLAGS…`: engine.serve, with something wrong in one of its ranks."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

import engine.backends.cpu
import engine.build
import engine.comm.ranks
import engine.rank_checks
import engine.runner
import engine.serve
from engine.comm.mpi_ranks import MpiRanks
from engine.env import launched_rank
from engine.errors import CheckpointError

STEP = 5  # of the rank, counted from 1


class PlantedError(RuntimeError):
    """What goes wrong."""


def raising(error: BaseException) -> Callable[..., NoReturn]:
    def fail(*_: Any, **__: Any) -> NoReturn:
        raise error

    return fail


def at_step(act: Callable[[], object]) -> None:
    """The rank does something odd in place of its share of a step."""
    usual, count = engine.runner.follow, iter(range(1, sys.maxsize))

    def follow(*arguments: Any) -> None:
        if next(count) == STEP:
            act()
        usual(*arguments)

    engine.runner.follow = follow


def in_a_thread() -> None:
    threading.Thread(target=raising(PlantedError("in a thread")), name="helper").start()


def slightly_off(
    self: MpiRanks, partial: Any, residual: Any, norm: Any, which: Any, usual: Any = MpiRanks.reduce_add_norm
) -> Any:
    hidden, total = usual(self, partial, residual, norm, which)
    return hidden + np.float32(1e-4), total


def plant(fault: str) -> None:
    match fault:
        case "find":
            engine.build.choose_split = raising(PlantedError("while looking"))
        case "load":
            engine.backends.cpu.load_weights = raising(PlantedError("while loading"))
        case "checkpoint":
            engine.backends.cpu.load_weights = raising(CheckpointError("model.safetensors is damaged"))
        case "memory":
            engine.backends.cpu.make_kv_cache = raising(MemoryError("no room for the KV cache"))
        case "step":
            at_step(raising(PlantedError("in a step")))
        case "exit":
            at_step(lambda: sys.exit(3))
        case "death":
            at_step(lambda: os._exit(3))
        case "thread":
            at_step(in_a_thread)
        case "hang":
            at_step(lambda: time.sleep(1000))
        case "disagree":
            at_step(lambda: setattr(MpiRanks, "reduce_add_norm", slightly_off))
        case "join":
            engine.backends.cpu.MpiRanks = lambda *_: time.sleep(60)
        case "late":
            time.sleep(60)
        case "no memory":
            engine.comm.ranks.SHARED_BYTES = 1 << 60
        case "no mpi":
            sys.modules["mpi4py"] = None  # type: ignore[assignment]
        case "versions":
            engine.rank_checks.versions = lambda: "Python 2.7"
        case "flags" | "model":
            pass  # see main
        case _:
            raise ValueError(fault)


def main(fault: str, rank: str, *flags: str) -> int:
    if fault in ("late", "join"):
        engine.comm.ranks.JOIN_S = engine.build.TOGETHER_S = 5.0
    if rank in ("all", str(launched_rank(os.environ))):
        plant(fault.partition("=")[0])
        if fault == "flags":
            return engine.serve.main([*flags, "--block-size", "8"])
        if fault.startswith("model="):
            return engine.serve.main([*flags, "--model", fault.removeprefix("model=")])
    return engine.serve.main(list(flags))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
