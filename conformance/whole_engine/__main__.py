"""`python -m conformance.whole_engine [--device cpu|cuda] [--dtype …] [--length TOKENS] [--case WORD]`

Hard cases of the whole engine on a device. A line a case; exit status 1 where something is wrong.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from conformance.whole_engine import cases, goldens
from conformance.whole_engine.cases import TOLERANCES, Device
from engine.errors import GlintError


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m conformance.whole_engine", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=tuple(TOLERANCES), help="default: float32, bfloat16 on a GPU")
    parser.add_argument("--length", type=int, help="of the prompt with a needle; default: 2000, 100000 on a GPU")
    parser.add_argument("--case", default="", help="only cases with this in their name")
    args = parser.parse_args(arguments)
    is_cpu = args.device == "cpu"
    device = Device(
        args.device,
        args.dtype or ("float32" if is_cpu else "bfloat16"),
        args.length or (2000 if is_cpu else 100_000),
    )
    failed = False
    for name, case in (cases.CASES | goldens.CASES).items():
        if args.case not in name:
            continue
        started = time.perf_counter()
        try:
            wrong = case(device)
        except GlintError as error:
            print(f"python -m conformance.whole_engine: {name}: {error}", file=sys.stderr)
            return 2
        verdict = f"FAILED: {'; '.join(wrong)}" if wrong else "ok"
        print(f"{name} ({device.name}, {device.dtype}, {time.perf_counter() - started:.1f} s): {verdict}", flush=True)
        failed |= bool(wrong)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
