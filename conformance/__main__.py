"""Runs the cases of a target and prints a line a case:

python -m conformance --target golden|cpu|host|gpu [--op STEM] [--case NAME] [--seed N] [--json FILE] [--junit FILE]
python -m conformance --target host|gpu --list           what would run, and what has no kernel
python -m conformance --target host [--schedule in_step|greedy|random] [--sanitizer address|thread] [--quick] …
python -m conformance --target gpu [--arch sm_80] [--quick] …
python -m conformance --op OP --impl FILE.cu:entry|FILE.py:function|module:function [--target cpu|host|gpu]
                      [--timeout SECONDS] …   each case in a process that may loop, crash or end itself
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
from collections.abc import Iterable, Sequence
from contextlib import closing

from conformance.case import Case, Result
from conformance.check import check
from conformance.exercises import exercise_lines, list_lines, task_lines
from conformance.export import export
from conformance.foreign import cases_of_function, cases_of_kernel, is_kernel, swapped_kernel
from conformance.host_build import BuildError
from conformance.implementation import ImplementationError
from conformance.isolated import Where, Work, run_isolated
from conformance.layers import compare_layers, prompt_for
from conformance.machines import Machine, MachineMissing, gpu_machine, host_machine
from conformance.memory import NumpyMemory
from conformance.model_shapes import model_cases
from conformance.options import misplaced, parse
from conformance.report import junit, report, result_lines
from conformance.suite import (
    KERNEL_TARGETS,
    NO_KERNEL,
    cases,
    in_storages,
    left_out,
    quick,
    rerun_command,
    target_ops,
)
from engine.errors import GlintError
from engine.kernels.notes import Notes


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, 1 if a case failed, 2 if there was nothing to run or nothing to run it on."""
    args = parse(sys.argv[1:] if arguments is None else arguments)
    if problem := misplaced(args):
        return _refuse(problem)
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
        return _refuse(str(error))
    if args.impl is not None:
        return _foreign(args, found)
    chosen = _choose(found, args.op, args.case)
    chosen = quick(chosen) if args.quick else chosen
    chosen = [case for case in chosen if not (args.sanitizer and "sanitizer" in case.skip)]
    if not chosen:
        return _refuse(_no_case(args, found, args.op))
    if args.list:
        return _list(args, chosen, left_out(args.target) if args.model is None else [])
    if args.export is not None:
        try:
            print(f"{export(chosen, args.export, args.seed)} cases written to {args.export}")
        except OSError as error:
            return _refuse(f"export {args.export}: {error.strerror}; give a new folder")
        return 0
    try:
        machine = _machine(args, [case for case in chosen if args.target not in case.skip])
    except (MachineMissing, BuildError, GlintError) as error:
        return _refuse(f"--target {args.target}: {error}")
    return _run_all(args, chosen, (_run(args, case, machine) for case in chosen), machine)


def _refuse(problem: str) -> int:
    print(f"python -m conformance: {problem}", file=sys.stderr)
    return 2


def _no_case(args: argparse.Namespace, found: Sequence[Case], stem: str | None) -> str:
    asked = [f"{name} {value}" for name, value in (("--op", stem), ("--case", args.case)) if value is not None]
    asked += ["--quick"] if args.quick else []
    stems = ", ".join(dict.fromkeys(case.stem for case in found))
    return f"no case of --target {args.target} has {' '.join(asked)}; its stems are {stems} (--list prints the cases)"


def _found(args: argparse.Namespace) -> list[Case]:
    """All cases of the target, or those on a model's sizes. Raises ConfigError."""
    return cases(args.target) if args.model is None else in_storages(model_cases(args.model))


def _foreign(args: argparse.Namespace, found: Sequence[Case]) -> int:
    """Somebody else's kernel or function in the place of ours, over all cases that use it."""
    try:
        if args.op is None:
            raise ImplementationError("--impl wants --op too: which kernel or function it stands for")
        by_name = [case for case in _choose(found, None, args.case) if args.target not in case.skip]
        by_name = quick(by_name) if args.quick else by_name
        if not by_name:
            raise ImplementationError(_no_case(args, found, None))
        if is_kernel(args.impl):
            if args.target not in KERNEL_TARGETS:
                raise ImplementationError(f"--impl {args.impl}: a kernel runs with --target host or gpu")
            swapped_kernel(args.op, args.impl)
            chosen = cases_of_kernel(args.op, by_name, Notes())
        else:
            chosen = cases_of_function(args.op, by_name)
        if args.list:
            return _list(args, chosen, [])
        work = Work(
            args.target,
            args.op,
            args.impl,
            tuple((case.stem, case.name) for case in chosen),
            args.seed,
            *(not (args.sanitizer or args.quick), args.schedule, args.sanitizer, args.arch, args.model),
        )
        with closing(run_isolated(work, args.timeout)) as events:
            where = next(events)
            assert isinstance(where, Where)
            return _run_all(args, chosen, (event for event in events if isinstance(event, Result)), where)
    except ImplementationError as error:
        return _refuse(str(error))


def _machine(args: argparse.Namespace, chosen: Sequence[Case]) -> Machine:
    if args.target == "host":
        return host_machine(chosen, schedule=args.schedule, seed=args.seed, sanitizer=args.sanitizer)
    if args.target == "gpu":
        return gpu_machine(chosen, args.arch, pooled=not args.quick)
    return Machine(target_ops(args.target), NumpyMemory())


def _list(args: argparse.Namespace, chosen: Sequence[Case], without: Sequence[Case]) -> int:
    for case in chosen:
        reason = case.skip.get(args.target)
        print(f"{case.stem} {case.name}{f' skip({reason})' if reason else ''}")
    for case in _choose(without, args.op, args.case):
        print(f"{case.stem} {case.name} left out({NO_KERNEL})")
    return 0


def _run_all(args: argparse.Namespace, chosen: Sequence[Case], found: Iterable[Result], where: Machine | Where) -> int:
    """Prints a line for each result as it comes, and writes the files that were asked for."""
    results: list[Result] = []
    seconds: dict[tuple[str, str], float] = {}
    started = time.perf_counter()
    for case, result in zip(chosen, found, strict=True):
        seconds[result.stem, result.case] = time.perf_counter() - started
        results.append(result)
        _print(args, case, result)
        started = time.perf_counter()
    if args.json is not None:
        written = report(args.target, results, where.about, where.kernels)
        args.json.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    if args.junit is not None:
        args.junit.write_text(junit(args.target, results, seconds), encoding="utf-8")
    num_passed, num_failed, num_skipped = (
        sum(r.status == status for r in results) for status in ("ok", "FAIL", "skip")
    )
    without = len(_choose(left_out(args.target), args.op, args.case)) if args.model is None else 0
    missing = f"; {without} cases have no kernel yet (--list names them)" if without else ""
    print(f"{num_passed} passed, {num_failed} failed, {num_skipped} skipped{missing}")
    return 1 if num_failed else 0


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
    if args.target in case.skip:
        return Result(case.stem, case.name, "skip", 0.0, 0.0, (case.skip[args.target],))
    return check(case, machine.ops, args.seed, machine.memory, repeats=not (args.sanitizer or args.quick))


def _print(args: argparse.Namespace, case: Case, result: Result) -> None:
    if result.status == "skip":
        print(f"{result.stem} {result.case} - - skip({result.problems[0]})", flush=True)
        return
    print(f"{result.stem} {result.case} {result.error:.3g} {result.tolerance:.3g} {result.status}", flush=True)
    for problem in result.problems:
        print(f"    {problem}")
    if result.problems:
        again = rerun_command(args.target, case, args.seed, args.op if args.impl else "", args.impl or "")
        for flag in ("model", "arch", "schedule", "sanitizer"):
            again += f" --{flag} {getattr(args, flag)}" if getattr(args, flag) else ""
        print(f"    again: {again}{' --quick' if args.quick else ''}")


if __name__ == "__main__":
    sys.exit(main())
