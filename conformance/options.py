"""The command line of `python -m conformance`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from conformance.host import SCHEDULES
from conformance.host_build import SANITIZERS
from conformance.suite import TARGETS

MAX_SEED = 2**32 - 1  # so that seeds that are made of it fit the generators


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Ends the process with status 2 and a message where they cannot be read."""
    if arguments and arguments[0] == "export":  # a command of its own, of the cases of the kernels
        arguments = _as_option(arguments[1:])
    if _names(arguments, "--impl", "--list") and not _names(arguments, "--target", "--exercise"):
        arguments = [*arguments, "--target", "host"]
    parser = argparse.ArgumentParser(
        prog="python -m conformance",
        description="Kernels and their twins against ref.",
        epilog="python -m conformance export DIR writes cases as files, for kernels in other languages; see "
        "python -m conformance export --help.",
    )
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
        metavar="FILE:NAME",
        help="what stands for --op: FILE.cu:entry, with the parameters of the kernel of that name in cuda/, "
        "FILE.py:function or module:function, with those of ref's (--target host unless given); "
        "or a solution of an exercise",
    )
    parser.add_argument(
        "--op", metavar="STEM", help="only cases of this stem, such as attention; with --impl, the kernel or function"
    )
    parser.add_argument("--case", metavar="NAME", help="only the case of this name")
    parser.add_argument("--list", action="store_true", help="print the cases instead of running them")
    parser.add_argument("--seed", type=_seed, default=0, help="of the inputs (default 0)")
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
        "--timeout",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="of --impl: what a case may take before it is stopped and has failed (default 300)",
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
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    parser.add_argument("--junit", type=Path, metavar="FILE", help="write them as JUnit's XML")
    return parser.parse_args(arguments)


def _as_option(arguments: Sequence[str]) -> list[str]:
    """What `export DIR …` is as options; with --help, what it is."""
    parser = argparse.ArgumentParser(
        prog="python -m conformance export",
        description="Writes cases as files, for kernels in other languages: inputs, what ref answers, and limits.",
    )
    parser.add_argument("folder", metavar="DIR", help="a new folder, or an empty one")
    parser.add_argument("--target", metavar="cpu|host|gpu", default="host", help="whose cases (default host)")
    parser.add_argument("--op", metavar="STEM", help="only cases of this stem, such as attention")
    parser.add_argument("--case", metavar="NAME", help="only the case of this name")
    parser.add_argument("--seed", type=_seed, default=0, help="of the inputs (default 0)")
    given, others = parser.parse_known_args(arguments)
    asked = {"--export": given.folder, "--target": given.target, "--op": given.op, "--case": given.case}
    return [
        *(word for flag, value in asked.items() if value for word in (flag, value)),
        f"--seed={given.seed}",
        *others,
    ]


def _names(arguments: Sequence[str], *flags: str) -> bool:
    return any(argument.partition("=")[0] in flags for argument in arguments)


def _seed(text: str) -> int:
    value = int(text)
    if not 0 <= value <= MAX_SEED:
        raise argparse.ArgumentTypeError(f"{value} is not within 0 to {MAX_SEED}")
    return value


def misplaced(args: argparse.Namespace) -> str:
    """What is asked of the wrong target, or of a file that cannot be written; it would be passed over in silence."""
    for name, value, targets in (
        ("--schedule", args.schedule, ("host",)),
        ("--sanitizer", args.sanitizer, ("host",)),
        ("--arch", args.arch, ("gpu",)),
        ("--model DIR", args.model, ("host", "gpu")),
        ("export", args.export, ("cpu", "host", "gpu")),
    ):
        if value and args.target not in targets:
            found = f"--target {args.target}" if args.target else "none"
            return f"{name} is for --target {' or '.join(targets)}, found {found}"
    if not (math.isfinite(args.timeout) and args.timeout > 0):
        return f"--timeout {args.timeout:g}: it must be a number of seconds above 0"
    if args.ids is not None and args.layers is None:
        return "--ids is for --layers"
    for name, path in (("--json", args.json), ("--junit", args.junit)):
        if path is not None and (problem := unwritable(path)):
            return f"{name} {path}: {problem}"
    return ""


def unwritable(path: Path) -> str:
    """Why a file cannot be written, or "": asked before a run of hours, not behind it."""
    try:
        path.open("a").close()
    except OSError as error:
        return f"it cannot be written: {error.strerror}"
    return ""
