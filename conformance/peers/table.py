"""Runs kernels of others through our cases, and keeps how they did:

python -m conformance.peers.table [--target host|gpu] [--json FILE]

Each is `python -m conformance --op OP --impl IMPL` in a process of its own; PyTorch, Triton and cuBLAS as far as they
are here. Exit status 2 if one cannot be run at all.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.options import unwritable

TORCH, TRITON, CUBLAS = (f"conformance.peers.{name}_ops" for name in ("torch", "triton", "cublas"))
GATHERED = "keys gathered side by side, then scaled_dot_product_attention with a mask"
FOREIGN = {  # (op, module) → what it is
    ("embedding", TORCH): "moves rows: every bit arrives",
    ("linear", TORCH): "functional.linear: cuBLAS, the bias added before the one rounding",
    ("rmsnorm", TORCH): "functional.rms_norm: one rounding at the end, as ours",
    (
        "layernorm",
        TORCH,
    ): "functional.layer_norm by running means: in float32 the mean is off by a unit or two in the "
    "last place, which a row whose mean is a thousand times its spread shows a thousandfold",
    ("act", TORCH): "functional.silu, gelu and relu",
    ("gate_up_act", TORCH): "two kernels, so the activation is rounded before the product",
    ("attention_prefill", TORCH): GATHERED,
    ("attention_decode", TORCH): GATHERED,
    ("rmsnorm", TRITON): "ten lines of Triton, a program a row",
    ("linear", CUBLAS): "cublasGemmEx into float32, the bias added, one rounding",
}
PACKAGES = ("torch", "triton", "nvidia-cublas", "nvidia-cublas-cu12")
JOBS = 10


@dataclass(frozen=True, slots=True)
class Run:
    op: str
    impl: str
    report: dict[str, Any]  # of python -m conformance --json

    def record(self) -> dict[str, Any]:
        """How many cases passed, and those that did not with error and limit."""
        cases = self.report["cases"]
        failed = [case for case in cases if case["status"] == "FAIL"]
        what = FOREIGN[self.op, self.impl.partition(":")[0]]
        return {"op": self.op, "impl": self.impl, "what": what, "passed": len(cases) - len(failed), "failed": failed}


def run(target: str, op: str, module: str) -> Run:
    """Raises RuntimeError with what the command said if it ran no case."""
    impl = f"{module}:{op}"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "report.json")
        command = ["-m", "conformance", "--target", target, "--op", op, "--impl", impl, "--json", str(file)]
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
        if not file.is_file():
            raise RuntimeError(f"python {' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
        return Run(op, impl, json.loads(file.read_text("utf-8")))


def table(runs: Sequence[Run]) -> dict[str, Any]:
    """What --json writes: where they ran, versions, and a record a run."""
    about = {name: runs[0].report[name] for name in ("gpu", "driver", "cuda", "cupy", "date")}
    return {"target": "foreign", **about, "versions": versions(), "runs": [one.record() for one in runs]}


def versions() -> dict[str, str]:
    """Of the packages of others that are here."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m conformance.peers.table", description=__doc__)
    parser.add_argument("--target", choices=("host", "gpu"), default="gpu")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(arguments)
    if args.json is not None and (problem := unwritable(args.json)):
        parser.error(f"--json {args.json}: {problem}")
    wanted = [one for one in FOREIGN if args.target == "gpu" or one[1] == TORCH]
    try:
        with ThreadPoolExecutor(JOBS) as team:
            runs = list(team.map(lambda one: run(args.target, *one), wanted))
    except RuntimeError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    for one in runs:
        record = one.record()
        sys.stdout.write(f"{one.impl}: {record['passed']} passed, {len(record['failed'])} failed\n")
        for case in record["failed"]:
            sys.stdout.write(f"    {case['case']} {case['error']:.3g} {case['tolerance']:.3g}\n")
    if args.json is not None:
        args.json.write_text(json.dumps(table(runs), indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
