"""Runs the cases of a target and prints a line a case:

python -m conformance --target golden|cpu|host|gpu [--op STEM] [--case NAME] [--seed N] [--json FILE] [--junit FILE]
python -m conformance --target host|gpu --list           what would run, and what has no kernel
python -m conformance --target host [--schedule in_step|greedy|random] [--sanitizer address|thread] [--quick] …
python -m conformance --target gpu [--arch sm_80] [--quick] …
python -m conformance --op OP --impl FILE.cu:entry|FILE.py:function|module:function [--target cpu|host|gpu] …
python -m conformance export DIR [--target host|gpu] [--op STEM] [--case NAME] [--seed N]   cases as files
python -m conformance --results                         stored runs on GPUs, and which kernels changed since
python -m conformance --layers DIR [--ids 1,2,3] [--seed N]   the engine and ref layer by layer
python -m conformance --exercises                       lists the exercises of ref/EXERCISES.md
python -m conformance --exercise N --impl FILE.py:function [--case NAME] [--seed N]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from conformance.case import Case, Result
from conformance.check import check
from conformance.exercises import exercise_lines, list_lines, task_lines
from conformance.export import export
from conformance.foreign import cases_of_function, cases_of_kernel, is_kernel, swapped_kernel, with_function
from conformance.host import SCHEDULES
from conformance.host_build import SANITIZERS, BuildError
from conformance.implementation import ImplementationError
from conformance.layers import compare_layers, prompt_for
from conformance.machines import Machine, MachineMissing, gpu_machine, host_machine
from conformance.memory import NumpyMemory
from conformance.model_shapes import model_cases
from conformance.report import junit, report, result_lines
from conformance.suite import (
    KERNEL_TARGETS,
    NO_KERNEL,
    TARGETS,
    cases,
    in_storages,
    left_out,
    quick,
    rerun_command,
    target_ops,
)
from engine.errors import ConfigError, GlintError
from engine.kernels.notes import Notes


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, 1 if a case failed, 2 if there was nothing to run or nothing to run it on."""
    args = _parse(sys.argv[1:] if arguments is None else arguments)
    if args.results:
        print("\n".join(result_lines()) or "conformance/results holds no run")
        return 0
    if args.exercises or args.exercise is not None:
        return _exercise(args)
    if args.layers is not None:
        return _layers(args)
    try:
        found = _found(args)
    except GlintError as error:
        print(f"python -m conformance: {error}", file=sys.stderr)
        return 2
    if args.impl is not None:
        return _foreign(args, found)
    chosen = _choose(found, args.op, args.case)
    chosen = quick(chosen) if args.quick else chosen
    if not chosen:
        stems = ", ".join(dict.fromkeys(case.stem for case in found))
        print(
            f"python -m conformance: no case of --target {args.target} has --op {args.op} --case {args.case}; "
            f"its stems are {stems}",
            file=sys.stderr,
        )
        return 2
    if args.list:
        return _list(args, chosen)
    if args.export is not None:
        print(f"{export(chosen, args.export, args.seed)} cases written to {args.export}")
        return 0
    try:
        machine = _machine(args, [case for case in chosen if args.target not in case.skip])
    except (MachineMissing, BuildError, GlintError) as error:
        print(f"python -m conformance: --target {args.target}: {error}", file=sys.stderr)
        return 2
    return _run_all(args, chosen, machine)


def _found(args: argparse.Namespace) -> list[Case]:
    """All cases of the target, or those on a model's sizes. Raises ConfigError."""
    if args.model is None:
        return cases(args.target)
    if args.target not in KERNEL_TARGETS:
        raise ConfigError(f"--model {args.model} is for --target host and gpu, found --target {args.target}")
    return in_storages(model_cases(args.model))


def _foreign(args: argparse.Namespace, found: Sequence[Case]) -> int:
    """Somebody else's kernel or function in the place of ours, over all cases that use it."""
    try:
        if args.op is None:
            raise ImplementationError("--impl wants --op too: which kernel or function it stands for")
        by_name = [case for case in _choose(found, None, args.case) if args.target not in case.skip]
        if is_kernel(args.impl):
            if args.target not in KERNEL_TARGETS:
                raise ImplementationError(f"--impl {args.impl}: a kernel runs with --target host or gpu")
            args.swap = swapped_kernel(args.op, args.impl)
            chosen = cases_of_kernel(args.op, by_name, Notes())
            machine = _machine(args, chosen)
        else:
            chosen = cases_of_function(args.op, by_name)
            machine = _machine(args, [])
            machine = replace(machine, ops=with_function(machine.ops, args.op, args.impl))
    except (ImplementationError, MachineMissing, BuildError, GlintError) as error:
        print(f"python -m conformance: {error}", file=sys.stderr)
        return 2
    return _run_all(args, chosen, machine)


def _machine(args: argparse.Namespace, chosen: Sequence[Case]) -> Machine:
    if args.target == "host":
        return host_machine(chosen, args.swap, schedule=args.schedule, seed=args.seed, sanitizer=args.sanitizer)
    if args.target == "gpu":
        return gpu_machine(chosen, args.arch, args.swap, pooled=not args.quick)
    return Machine(target_ops(args.target), NumpyMemory())


def _list(args: argparse.Namespace, chosen: Sequence[Case]) -> int:
    for case in chosen:
        reason = case.skip.get(args.target)
        print(f"{case.stem} {case.name}{f' skip({reason})' if reason else ''}")
    for case in _choose(left_out(args.target) if args.model is None else [], args.op, args.case):
        print(f"{case.stem} {case.name} left out({NO_KERNEL})")
    return 0


def _run_all(args: argparse.Namespace, chosen: Sequence[Case], machine: Machine) -> int:
    """Runs the cases, prints a line for each, and writes the files that were asked for."""
    results: list[Result] = []
    seconds: dict[tuple[str, str], float] = {}
    for case in chosen:
        started = time.perf_counter()
        results.append(_run(args, case, machine))
        seconds[case.stem, case.name] = time.perf_counter() - started
    if args.json is not None:
        args.json.write_text(json.dumps(report(args.target, results, machine), indent=1) + "\n", encoding="utf-8")
    if args.junit is not None:
        args.junit.write_text(junit(args.target, results, seconds), encoding="utf-8")
    num_passed, num_failed, num_skipped = (
        sum(r.status == status for r in results) for status in ("ok", "FAIL", "skip")
    )
    without = len(_choose(left_out(args.target), args.op, args.case)) if args.model is None else 0
    missing = f"; {without} cases have no kernel yet (--list names them)" if without else ""
    print(f"{num_passed} passed, {num_failed} failed, {num_skipped} skipped{missing}")
    return 1 if num_failed else 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    if arguments and arguments[0] == "export":  # a command of its own, of the cases of the kernels
        target = [] if "--target" in arguments else ["--target", "host"]
        arguments = ["--export", *arguments[1:], *target]
    if "--impl" in arguments and not {"--target", "--exercise"} & set(arguments):
        arguments = [*arguments, "--target", "host"]
    parser = argparse.ArgumentParser(prog="python -m conformance", description="Kernels and their twins against ref.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--target", choices=TARGETS)
    what.add_argument("--exercises", action="store_true", help="list the twelve exercises of ref/EXERCISES.md")
    what.add_argument(
        "--exercise", type=int, metavar="N", help="check a solution of exercise N; without --impl, its task"
    )
    what.add_argument("--layers", type=Path, metavar="DIR", help="compare the engine with ref on this checkpoint")
    what.add_argument("--results", action="store_true", help="list the stored runs, and which kernels changed since")
    parser.add_argument("--export", type=Path, metavar="DIR", help=argparse.SUPPRESS)
    parser.add_argument("--ids", help="of --layers: token ids with commas between them (default: random ones)")
    parser.add_argument(
        "--impl",
        metavar="FILE.py:function",
        help="a solution of an exercise; or what stands for --op: FILE.cu:entry or module:function",
    )
    parser.add_argument("--op", metavar="STEM", help="only cases of this stem, such as attention")
    parser.add_argument("--case", metavar="NAME", help="only the case of this name")
    parser.add_argument("--list", action="store_true", help="print the cases instead of running them")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs (default 0)")
    parser.add_argument(
        "--schedule",
        choices=SCHEDULES,
        default="",
        help="of --target host: the order of threads (default: all in turn)",
    )
    parser.add_argument(
        "--sanitizer",
        choices=[name for name in SANITIZERS if name],
        default="",
        help="of --target host: watch every launch (slow: give --op or --case too)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a few cases of every op, each run once, arrays of a GPU apart: for a sanitizer",
    )
    parser.add_argument(
        "--arch", metavar="sm_80", help="of --target gpu: the kernels of this older kind of GPU, as it would run them"
    )
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="of --target host and gpu: the ops of this model, on its own sizes"
    )
    parser.set_defaults(swap=None)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    parser.add_argument("--junit", type=Path, metavar="FILE", help="write them as JUnit's XML")
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
        token_ids = prompt_for(args.layers, args.seed, args.ids)
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


def _run(args: argparse.Namespace, case: Case, machine: Machine) -> Result:
    """Runs and prints one case."""
    if args.target in case.skip:
        reason = case.skip[args.target]
        print(f"{case.stem} {case.name} - - skip({reason})", flush=True)
        return Result(case.stem, case.name, "skip", 0.0, 0.0, (reason,))
    result = check(case, machine.ops, args.seed, machine.memory, repeats=not (args.sanitizer or args.quick))
    print(f"{case.stem} {case.name} {result.error:.3g} {result.tolerance:.3g} {result.status}", flush=True)
    for problem in result.problems:
        print(f"    {problem}")
    if result.problems:
        again = rerun_command(args.target, case, args.seed, args.op if args.impl else "", args.impl or "")
        print(f"    again: {again}{f' --model {args.model}' if args.model else ''}")
    return result


if __name__ == "__main__":
    sys.exit(main())
