"""Runs the cases of a target and prints a line a case:

python -m conformance --target golden|cpu|host|gpu [--op STEM] [--case NAME] [--seed N] [--json FILE]
python -m conformance --layers DIR [--ids 1,2,3] [--seed N]   the engine and ref layer by layer
python -m conformance --exercises                       lists the exercises of ref/EXERCISES.md
python -m conformance --exercise N --impl FILE.py:function [--case NAME] [--seed N]
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conformance.case import Case, Result
from conformance.check import check
from conformance.exercises import exercise_lines, list_lines, task_lines
from conformance.layers import compare_layers, prompt_for
from conformance.suite import NO_KERNELS, TARGETS, cases, rerun_command, target_ops
from engine.errors import GlintError
from engine.ops import OpTable

ROOT = Path(__file__).parent.parent
SOURCES = {"cpu": ("engine/cpu", "engine/models", "engine", "ref"), "golden": ("ref/model",)}  # where a stem's file is


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, 1 if a case failed, 2 if there was nothing to run."""
    args = _parse(arguments)
    if args.exercises or args.exercise is not None:
        return _exercise(args)
    if args.layers is not None:
        return _layers(args)
    if args.target in NO_KERNELS:
        print(f"python -m conformance: --target {args.target}: {NO_KERNELS[args.target]}", file=sys.stderr)
        return 2
    chosen = _choose(cases(args.target), args.op, args.case)
    if not chosen:
        stems = ", ".join(dict.fromkeys(case.stem for case in cases(args.target)))
        print(
            f"python -m conformance: no case of --target {args.target} has --op {args.op} --case {args.case}; "
            f"its stems are {stems}",
            file=sys.stderr,
        )
        return 2
    ops = target_ops(args.target)
    results = [_run(args.target, case, ops, args.seed) for case in chosen]
    if args.json is not None:
        args.json.write_text(json.dumps(_report(args.target, results), indent=1) + "\n", encoding="utf-8")
    num_passed, num_failed, num_skipped = (
        sum(r.status == status for r in results) for status in ("ok", "FAIL", "skip")
    )
    print(f"{num_passed} passed, {num_failed} failed, {num_skipped} skipped")
    return 1 if num_failed else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m conformance", description="Kernels and their twins against ref.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--target", choices=TARGETS)
    what.add_argument("--exercises", action="store_true", help="list the twelve exercises of ref/EXERCISES.md")
    what.add_argument(
        "--exercise", type=int, metavar="N", help="check a solution of exercise N; without --impl, its task"
    )
    what.add_argument("--layers", type=Path, metavar="DIR", help="compare the engine with ref on this checkpoint")
    parser.add_argument("--ids", help="of --layers: token ids with commas between them (default: random ones)")
    parser.add_argument("--impl", metavar="FILE.py:function", help="the solution; module:function will do too")
    parser.add_argument("--op", metavar="STEM", help="only cases of this stem, such as attention")
    parser.add_argument("--case", metavar="NAME", help="only the case of this name")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs (default 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    return parser.parse_args(arguments)


def _exercise(args: argparse.Namespace) -> int:
    """Lists the exercises, prints the task of one, or checks a solution."""
    try:
        if args.exercises:
            lines = list_lines()
        elif args.impl is None:
            lines = task_lines(args.exercise)
        else:
            last = ""
            for last in exercise_lines(args.exercise, args.impl, args.case, args.seed):
                print(last, flush=True)
            return 0 if last.endswith(" 0 failed") else 1
    except ValueError as error:
        print(f"python -m conformance: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines))
    return 0


def _layers(args: argparse.Namespace) -> int:
    """A line a place where the engine and ref can be compared, in the order of the computation."""
    try:
        token_ids = prompt_for(args.layers, args.seed) if args.ids is None else [int(i) for i in args.ids.split(",")]
        places = compare_layers(args.layers, target_ops("cpu"), token_ids)
    except (ValueError, OSError, GlintError) as error:
        print(f"python -m conformance: --layers {args.layers}: {error}", file=sys.stderr)
        return 2
    for place in places:
        print(f"{place.name} {place.error:.3g} {place.limit:.3g} {'FAIL' if place.problem else 'ok'}", flush=True)
        if place.problem:
            print(f"    {place.problem}")
    parted = [place.name for place in places if place.problem]
    print(f"the engine and ref part at {parted[0]}" if parted else f"equal at all {len(places)} places")
    return 1 if parted else 0


def _choose(found: Sequence[Case], stem: str | None, name: str | None) -> list[Case]:
    return [case for case in found if stem in (None, case.stem) and name in (None, case.name)]


def _run(target: str, case: Case, ops: OpTable, seed: int) -> Result:
    """Runs and prints one case."""
    if target in case.skip:
        print(f"{case.stem} {case.name} - - skip({case.skip[target]})", flush=True)
        return Result(case.stem, case.name, "skip", 0.0, 0.0, (case.skip[target],))
    result = check(case, ops, seed)
    print(f"{case.stem} {case.name} {result.error:.3g} {result.tolerance:.3g} {result.status}", flush=True)
    for problem in result.problems:
        print(f"    {problem}")
    if result.problems:
        print(f"    again: {rerun_command(target, case, seed)}")
    return result


def _report(target: str, results: Sequence[Result]) -> dict[str, Any]:
    """What --json writes: where it ran (nothing here yet runs on a GPU), the sources, and all cases but the skipped.

    error is null where it is not finite: JSON has no infinity.
    """
    ran = [result for result in results if result.status != "skip"]
    return {
        "target": target,
        **dict.fromkeys(("gpu", "driver", "cuda", "cupy")),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "kernels": {stem: _source_hash(target, stem) for stem in dict.fromkeys(result.stem for result in ran)},
        "cases": [
            {
                "stem": result.stem,
                "case": result.case,
                "status": result.status,
                "error": result.error if result.error < float("inf") else None,
                "tolerance": result.tolerance,
            }
            for result in ran
        ],
    }


def _source_hash(target: str, stem: str) -> str:
    """sha256 of the file that was checked."""
    files = [ROOT / folder / f"{stem}.py" for folder in SOURCES[target]]
    return hashlib.sha256(next(file for file in files if file.exists()).read_bytes()).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
