"""`mpirun -n N python -m conformance.ranks [--split TP2|PP2|TP3|TP4|TP2xPP2] [--case WORD] [--halves] [--engine]
[--device cuda]`

Every golden over N ranks of this CPU, in each split of so many, against one rank; with --engine those of
conformance.whole_engine, through scheduler, plans, preemption, sampler and all, against ref; with --device cuda too, on
a GPU a rank. With --halves each step is computed in two, as with dual streams. A line a case from rank 0; exit status 1
where something is wrong.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial

from mpi4py import MPI
from threadpoolctl import threadpool_limits

from conformance.engine_run import HALVED, WHOLE
from conformance.ranks.engines import over_ranks
from conformance.ranks.splits import MODELS, SPLITS, split_model
from conformance.whole_engine import goldens
from conformance.whole_engine.cases import Device


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m conformance.ranks", description=__doc__)
    parser.add_argument("--split", action="append", choices=tuple(SPLITS), help="default: each of so many ranks")
    parser.add_argument("--case", default="", help="only models with this in their name")
    parser.add_argument("--engine", action="store_true", help="the whole engine, of which rank 0 has the scheduler")
    parser.add_argument("--halves", action="store_true", help="steps in two halves, as with --dual-stream on")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="with --engine: what ranks compute on")
    args = parser.parse_args(arguments)
    if args.device == "cuda" and not args.engine:
        parser.error("--device cuda: is for the whole engine; give --engine too")
    world = MPI.COMM_WORLD
    splits = [name for name, (tp, pp) in SPLITS.items() if tp * pp == world.size and name in (args.split or SPLITS)]
    if not splits:
        print(f"{world.size} ranks: none of {', '.join(args.split or SPLITS)} has so many", file=sys.stderr)
        return 2
    threadpool_limits(1, user_api="blas")
    failed = False
    device = Device("cuda", "bfloat16", 600) if args.device == "cuda" else Device("cpu", "float32", 600)
    for split in splits:
        sizes = *SPLITS[split], args.halves
        for name, case in (_engine_cases(device, *sizes) if args.engine else _model_cases(*sizes)).items():
            if args.case not in name:
                continue
            started = time.perf_counter()
            wrong = case()
            verdict = f"FAILED: {'; '.join(wrong)}" if wrong else "ok"
            if world.rank == 0:
                print(f"{split} {name} ({time.perf_counter() - started:.1f} s): {verdict}", flush=True)
            failed |= bool(wrong)
    return int(failed)


def _model_cases(tp: int, pp: int, halves: bool) -> dict[str, Callable[[], list[str]]]:
    return {name: partial(split_model, MPI.COMM_WORLD, name, tp, pp, HALVED if halves else WHOLE) for name in MODELS}


def _engine_cases(device: Device, tp: int, pp: int, halves: bool) -> dict[str, Callable[[], list[str]]]:
    return {name: partial(over_ranks, case, device, tp, pp, halves) for name, case in goldens.CASES.items()}


def run() -> None:
    """main, but that a rank which fails ends all."""
    try:
        status = main()
    except Exception:
        traceback.print_exc()
        MPI.COMM_WORLD.Abort(1)
    sys.exit(status)


if __name__ == "__main__":
    run()
