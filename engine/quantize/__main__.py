"""`python -m engine.quantize --model DIR --out DIR --method METHOD`; with --help for all that can be chosen."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from pathlib import Path

from engine.errors import ConfigError, GlintError
from engine.log import set_up_logging
from engine.quantize.calibrate import read_windows
from engine.quantize.methods import ALPHA, DAMP, METHODS, Settings
from engine.quantize.run import SHARD_BYTES, quantize
from engine.quantize.source_model import open_model

logger = logging.getLogger(__name__)


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    arguments = _parse(argv)
    set_up_logging("quantize", "INFO")
    try:
        _run(arguments)
    except GlintError as error:
        print(f"engine.quantize: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("engine.quantize: stopped; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


def _run(arguments: argparse.Namespace) -> None:
    method, started = METHODS[arguments.method], time.perf_counter()
    _check(arguments)
    model = open_model(arguments.model)
    settings = Settings(
        method=arguments.method,
        group_size=arguments.group_size or 0,
        symmetric=not (arguments.asymmetric or method.packing == "awq"),
        act_order=arguments.act_order,
        alpha=arguments.alpha,
        damp=arguments.damp,
    )
    windows = None
    if method.calibration is not None and arguments.calibration is not None:
        length = min(arguments.window, model.config.max_position_embeddings)
        windows = read_windows(model, arguments.calibration, arguments.calibration_tokens, length)
        logger.info("calibrating on %d windows of %d tokens", *windows.shape)
    made = quantize(model, arguments.out, settings, windows, tuple(arguments.ignore), arguments.shard_size * 10**6)
    if not made:
        logger.info("%s holds all of this already; nothing was written", arguments.out)
        return
    num_bytes = sum(path.stat().st_size for path in arguments.out.glob("*.safetensors"))
    took = time.perf_counter() - started
    logger.info("%s: %.1f MB of weights in %.1f s", arguments.out, num_bytes / 1e6, took)


def _check(arguments: argparse.Namespace) -> None:
    method = METHODS[arguments.method]
    if arguments.group_size is not None and not method.has_groups:
        raise ConfigError(f"--group-size: --method {arguments.method} has no groups")
    if arguments.group_size is not None and arguments.group_size < 1 and arguments.group_size != -1:
        raise ConfigError(f"--group-size {arguments.group_size}: must be a number of columns, or -1 for whole rows")
    if arguments.asymmetric and not method.has_groups:
        raise ConfigError(f"--asymmetric: --method {arguments.method} has no zero points")
    if arguments.act_order and arguments.method != "int4-gptq":  # compressed-tensors has given up groups of others
        raise ConfigError("--act-order: only GPTQ's own files say which inputs make a group; use --method int4-gptq")
    if arguments.ignore and method.packing == "plain":
        raise ConfigError(f"--ignore: --method {arguments.method} quantizes nothing")
    if arguments.alpha != ALPHA and not method.smooth:
        raise ConfigError(f"--alpha: --method {arguments.method} does not smooth")
    if arguments.damp != DAMP and method.calibration != "hessian":
        raise ConfigError(f"--damp: --method {arguments.method} is without GPTQ")
    if not 0 <= arguments.alpha <= 1:
        raise ConfigError(f"--alpha {arguments.alpha}: must be from 0 to 1")
    if not 0 < arguments.damp < 1:
        raise ConfigError(f"--damp {arguments.damp}: must be above 0 and below 1")
    for name, value in (
        ("--calibration-tokens", arguments.calibration_tokens),
        ("--window", arguments.window),
        ("--shard-size", arguments.shard_size),
    ):
        if value < 1:
            raise ConfigError(f"{name} {value}: must be at least 1")
    if arguments.calibration is not None and method.calibration is None:
        logger.warning("--calibration is not used: --method %s looks at the weights alone", arguments.method)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m engine.quantize",
        description="Makes a checkpoint with quantized weights from one in floating point. A run that was stopped goes "
        "on when it is repeated.",
        epilog="\n".join(["methods:", *(f"  {name:<13} {method.says}" for name, method in METHODS.items())]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model", required=True, help='folder with config.json and *.safetensors; a GGUF file; "starter"'
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder to write; new, empty, or of a run to go on with"
    )
    parser.add_argument("--method", choices=METHODS, required=True)
    parser.add_argument("--calibration", type=Path, help="a text file like what will be served")
    parser.add_argument("--calibration-tokens", type=int, default=8192, help="of the text that are read (8192)")
    parser.add_argument("--window", type=int, default=512, help="tokens that are read in one go (512)")
    parser.add_argument(
        "--group-size", type=int, help="columns that share a scale, -1: all (the largest of 128, 64, 32 that divides)"
    )
    parser.add_argument("--asymmetric", action="store_true", help="4 bits: with zero points (awq-rtn always has them)")
    parser.add_argument("--act-order", action="store_true", help="GPTQ: the inputs that matter most come first")
    parser.add_argument(
        "--damp", type=float, default=DAMP, help=f"GPTQ: share of the mean that joins the diagonal ({DAMP})"
    )
    parser.add_argument(
        "--alpha", type=float, default=ALPHA, help=f"SmoothQuant: how much moves into the weights ({ALPHA})"
    )
    parser.add_argument(
        "--ignore", action="append", default=[], metavar="MODULE", help='a module, or "re:" and a pattern; repeatable'
    )
    parser.add_argument("--shard-size", type=int, default=SHARD_BYTES // 10**6, help="of a file, in MB (5000)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
