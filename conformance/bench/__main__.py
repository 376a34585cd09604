"""Times every kernel op on the GPU that is there, beside what that GPU allows, the goal and the peer:

python -m conformance.bench [--op OP] [--filter TEXT] [--arch sm_80|sm_86|sm_89|sm_90] [--peers] [--json FILE] [--list]
python -m conformance.bench --readme README.md   puts the tables of the runs in the tree into it

Exit status: 0, 1 if a row is behind its peer or its answer is wrong, 2 if there is no GPU or no such row.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from conformance.bench import (
    rows_attention,
    rows_linear,
    rows_linear_w4,
    rows_linear_w4_many,
    rows_linear_w4a8,
    rows_linear_w8,
    rows_linear_w8_many,
    rows_sampling,
    rows_tokens,
)
from conformance.bench.measure import Rivals, kernels_of_rows, measure
from conformance.bench.place import Place
from conformance.bench.readme import tables, with_tables
from conformance.bench.row import Rates, Row, limit_of
from conformance.bench.table import WRONG, Figure, header, line, report, status, summary
from conformance.bench.timing import GraphTimer, Timer, clocks
from conformance.machines import MachineMissing, about_gpu, find_cupy, kernel_hash
from conformance.options import unwritable
from engine.checkpoint.starter import cache_dir
from engine.errors import GlintError
from engine.kernels.notes import Notes

ARCHES = ("sm_80", "sm_86", "sm_89", "sm_90")
PEERS = "conformance.peers.rivals"


def all_rows() -> list[Row]:
    return [
        *rows_attention.rows(),
        *rows_linear.rows(),
        *rows_linear_w4.rows(),
        *rows_linear_w4_many.rows(),
        *rows_linear_w4a8.rows(),
        *rows_linear_w8.rows(),
        *rows_linear_w8_many.rows(),
        *rows_sampling.rows(),
        *rows_tokens.rows(),
    ]


def _refuse(problem: str) -> int:
    print(f"python -m conformance.bench: {problem}", file=sys.stderr)
    return 2


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parse(sys.argv[1:] if arguments is None else arguments)
    if args.json is not None and (problem := unwritable(args.json)):
        return _refuse(f"--json {args.json}: {problem}")
    if args.readme is not None:
        if not args.readme.is_file():
            return _refuse(f"--readme {args.readme}: there is no such file")
        args.readme.write_text(with_tables(args.readme.read_text("utf-8"), tables()), encoding="utf-8")
        return 0
    found = _choose(all_rows(), args)
    if not found:
        print(
            f"python -m conformance.bench: no row has --op {args.op} and {args.filter!r} in its name", file=sys.stderr
        )
        return 2
    if args.list:
        print("\n".join(f"{row.op} {row.name}" for row in found))
        return 0
    try:
        cupy = find_cupy()
        with GraphTimer(cupy) as timer:
            return _run(found, args, cupy, timer)
    except (MachineMissing, GlintError) as error:
        print(f"python -m conformance.bench: {error}", file=sys.stderr)
        return 2


def _run(found: Sequence[Row], args: argparse.Namespace, cupy: Any, timer: GraphTimer) -> int:
    compiler = importlib.import_module("engine.kernels.compile")
    gpu = importlib.import_module("engine.kernels.gpu").Gpu(cache_dir() / "kernels", args.arch)
    if not gpu.has_wgmma:
        found = [row for row in found if not row.hopper]
    rivals = _rivals(timer) if args.peers else None
    notes = Notes(gpu.num_sms, gpu.max_shared_bytes, gpu.has_wgmma, gpu.has_fp8)
    kernels = kernels_of_rows(found, _places(notes, dry=True))
    gpu.prepare(kernels)
    places = _places(gpu)
    rates = timer.rates(places[False])
    about = {
        **about_gpu(cupy, compiler),
        "arch": gpu.arch,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "state": clocks(),
    }
    print("\n".join(header(about, rates)), flush=True)
    figures: list[Figure] = []
    hashes = {stem: kernel_hash(stem) for stem in sorted({kernel.stem for kernel in kernels})}
    on_h200 = "H200" in about["gpu"]
    for row in found:
        cupy.get_default_memory_pool().free_all_blocks()
        figures.append(_figure(row if on_h200 else _elsewhere(row), places[row.portable], timer, rates, rivals))
        print(line(figures[-1]), flush=True)
        if figures[-1].verdict == WRONG:
            print(f"    {figures[-1].problem}")
        if args.json is not None:  # a run that is cut off keeps its rows
            text = json.dumps(report(about, rates, figures, hashes), indent=1, ensure_ascii=False)
            args.json.write_text(text + "\n", encoding="utf-8")
    print(summary(figures))
    return status(figures)


def _figure(row: Row, place: Place, timer: Timer, rates: Rates, rivals: Rivals | None) -> Figure:
    """What a row's kernel cannot do is its own failure: the other rows must still run."""
    try:
        return measure(row, place, timer, rates, rivals)
    except GlintError as error:
        return Figure(
            op=row.op,
            name=row.name,
            microseconds=math.inf,
            work=row.work,
            limit=limit_of(row.work, rates),
            goal=row.goal,
            error=math.inf,
            problem=f"raised {type(error).__name__}: {error}",
        )


def _rivals(timer: GraphTimer) -> Rivals:
    try:
        found = importlib.import_module(PEERS).rivals
    except ImportError as error:
        raise MachineMissing(f"--peers wants PyTorch beside CuPy: {error}") from error
    return partial(found, stream=timer.stream)


def _places(device: Any, dry: bool = False) -> dict[bool, Place]:
    """With what the GPU has, and (True) without what Hopper alone has."""
    return {False: Place(device, dry=dry), True: Place(device, dry=dry, has_wgmma=False)}


def _elsewhere(row: Row) -> Row:
    """Without what was measured on one H200 and holds nowhere else."""
    return replace(row, peer_tflops=0.0, goal=row.goal if row.goal is not None and row.goal.share else None)


def _choose(found: Sequence[Row], args: argparse.Namespace) -> list[Row]:
    return [row for row in found if args.op in (None, row.op) and args.filter in row.name]


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m conformance.bench", description="The kernels' times on a GPU.")
    parser.add_argument("--op", help="only rows of this op, such as linear")
    parser.add_argument("--filter", default="", metavar="TEXT", help="only rows with this in their name")
    parser.add_argument("--arch", choices=ARCHES, help="take the code paths of such a GPU instead of this one's")
    parser.add_argument("--peers", action="store_true", help="time PyTorch, cuDNN and Triton beside ours (needs them)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument("--readme", type=Path, metavar="FILE", help="write the tables of stored runs into README.md")
    parser.add_argument("--list", action="store_true", help="print the rows instead of running them")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
