"""python -m tests.cuda.mutation: makes faults by rule, and says which of them the cases do not find."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from engine.system import usable_cores
from tests.cuda.mutation.report import Record
from tests.cuda.mutation.sweep import all_mutants, chosen, sweep

ENOUGH = 0.9  # of the mutants that compile must be found, if there are not
FEW = 100  # or less


def main() -> int:
    """0 if enough are found, and with --explained nothing but equivalents is left; otherwise 1."""
    args = _parse()
    mutants = all_mutants()
    record = Record.load(args.json, mutants, not args.keep)
    of_files = [mutant for mutant in mutants if not args.files or mutant.file.rpartition("/")[2] in args.files]
    some = [mutant for mutant in of_files if not args.ids or mutant.id in args.ids]
    some = chosen(some, args.seed, args.per_file)
    record.scope = {mutant.id for mutant in some}
    wanted = [mutant for mutant in some if not record.knows(mutant)]
    print(f"{len(mutants)} mutants; {len(some)} chosen; {len(wanted)} to be judged", flush=True)
    start = time.monotonic()
    for number, verdict in enumerate(sweep(wanted, args.jobs, args.seconds), 1):
        record.add(verdict)
        if not args.quiet or verdict.status not in ("killed", "no build"):
            print(f"{number} {verdict.mutant} {verdict.status} {verdict.seconds} s {verdict.found[:100]}", flush=True)
        if args.json and number % 10 == 0:  # a night may be cut short
            record.write(args.json)
    if args.json:
        record.write(args.json)
    print("\n".join([*record.survivors(), *record.table()]))
    print(f"{time.monotonic() - start:.0f} s with {args.jobs} at once")
    is_enough = record.raw_rate >= ENOUGH or len(record.judged) < FEW
    return 0 if is_enough and not record.broken and not (args.explained and record.unexplained) else 1


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.cuda.mutation", description=__doc__)
    parser.add_argument("files", nargs="*", metavar="FILE", help="such as rmsnorm.cu or row.cuh (default: all)")
    parser.add_argument("--ids", nargs="+", metavar="ID", help="only these mutants")
    parser.add_argument("--jobs", type=int, default=usable_cores(), help="mutants at once (default: the cores)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no mutant after this time")
    parser.add_argument("--per-file", type=int, metavar="N", help="at most N of a file (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice and its order (default 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="go on from this file, and write the verdicts there")
    parser.add_argument("--explained", action="store_true", help="fail if one is left that equivalent.txt lacks")
    parser.add_argument("--keep", action="store_true", help="keep verdicts where only other lines of a file changed")
    parser.add_argument("--quiet", action="store_true", help="print survivors only")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
