"""`python -m engine.kernels [--arch sm_86] [--model DIR] [--json FILE]`: what each kernel takes of a GPU.

Registers and spills are the compiler's, of the kernels that the model launches, or else those that well-known models
do; no GPU is needed. Exit status 1 where a kernel does not fit.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from engine.checkpoint.loader import load_model_config
from engine.checkpoint.source import resolve
from engine.errors import GlintError
from engine.kernels.arches import ARCHES
from engine.kernels.shapes import MODEL_SHAPES
from engine.model_config.read import model_config_from_hf
from engine.system import cache_dir

try:
    from engine.kernels.compile import compile_all, nvrtc_version
    from engine.kernels.resources import as_dicts, launches_of, problem, table, uses
except ModuleNotFoundError as error:
    sys.exit(f"python -m engine.kernels: {error}; it needs NVRTC: python -m pip install -e '.[nvrtc]', or make test")

DESCRIPTION = "What each kernel takes of a GPU; none is needed. The first time all are compiled: minutes, or --model."


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m engine.kernels", description=DESCRIPTION)
    parser.add_argument("--arch", choices=ARCHES, default="sm_86", help="the kind of GPU (sm_86)")
    parser.add_argument("--model", metavar="DIR", help="only what this model launches")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write it there too")
    args = parser.parse_args(arguments)
    if args.json is not None:
        try:
            args.json.open("a").close()  # asked before minutes of compiling, not behind them
        except OSError as error:
            parser.error(f"--json {args.json}: cannot be written: {error.strerror}")
    try:
        if args.model is None:
            configs = [model_config_from_hf(shape, None, name) for name, shape in MODEL_SHAPES.items()]
        else:
            configs = [load_model_config(resolve(args.model))]
        launches = launches_of(configs, args.arch)
        compiled = compile_all([launch.instance for launch in launches], args.arch, cache_dir() / "kernels")
    except GlintError as error:
        print(f"python -m engine.kernels: {error}", file=sys.stderr)
        return 2
    found = uses(launches, compiled, args.arch)
    print(table(found, args.arch))
    if args.json is not None:
        report = {"arch": args.arch, "nvrtc": nvrtc_version(), "kernels": as_dicts(found)}
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return int(any(problem(use, args.arch) for use in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
