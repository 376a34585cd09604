"""`python -m engine.bench offline | shape | bookkeeping | streaming | serve`; each with --help."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from engine.bench import bookkeeping, load, offline, shapes, streaming
from engine.config import EngineConfig
from engine.errors import GlintError
from engine.log import set_up_logging


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m engine.bench", description="Benchmarks of the engine.")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_offline(commands)
    _add_shape(commands)
    _add_bookkeeping(commands)
    streaming.add_arguments(commands.add_parser("streaming", help="what streaming clients cost the engine's steps"))
    load.add_arguments(commands.add_parser("serve", help="load on a running server: TTFT, TPOT, throughput"))
    arguments = parser.parse_args(argv)
    set_up_logging("bench", "WARNING")
    try:
        status: int | None = arguments.run(arguments)
    except GlintError as error:
        print(f"engine.bench: {error}", file=sys.stderr)
        return 1
    return status or 0


def _add_offline(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("offline", help="decode and prefill of a model in this process")
    parser.add_argument("--model", default="starter")
    parser.add_argument("--batches", type=_numbers, default=(1, 8), help="decode batch sizes, such as 1,8")
    parser.add_argument("--prefills", type=_numbers, default=(512,), help="prompt lengths")
    parser.add_argument("--steps", type=int, default=30, help="decode steps a figure is the median of")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--json", default=None, help="file to write the report to; - for one line on standard output")
    parser.add_argument(
        "--against-transformers", metavar="PYTHON", help="an interpreter with the oracle extra: paired runs"
    )
    parser.add_argument("--rounds", type=int, default=3, help="of paired runs")
    parser.set_defaults(run=_run_offline)


def _run_offline(arguments: argparse.Namespace) -> None:
    longest = max((*arguments.prefills, offline.PROMPT_TOKENS + arguments.steps)) + 8
    config = EngineConfig(
        model=arguments.model,
        num_threads=arguments.threads,
        max_num_seqs=max(arguments.batches, default=1),
        max_num_batched_tokens=max(512, *arguments.batches),
        num_gpu_blocks_override=max(arguments.batches, default=1) * (longest // 16 + 2),
    )
    if arguments.against_transformers:
        print(
            offline.compare_with_transformers(
                config, arguments.against_transformers, arguments.batches, arguments.rounds, arguments.steps
            )
        )
        return
    report = offline.measure(config, arguments.batches, arguments.prefills, arguments.steps)
    if arguments.json == "-":
        print(offline.as_json(report))
        return
    print(offline.table(report))
    if arguments.json:
        Path(arguments.json).write_text(offline.as_json(report) + "\n")


def _add_shape(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("shape", help="a model's shapes with random weights on the GPU, beside limit and peer")
    parser.add_argument("--model-shape", default="llama-3.1-8b", help=", ".join(shapes.SHAPES))
    parser.add_argument("--json", type=Path, help="file to write the report to")
    parser.set_defaults(run=_run_shape)


def _run_shape(arguments: argparse.Namespace) -> int:
    """1 where a figure is behind the peer."""
    about, figures = shapes.measure(arguments.model_shape)
    print(shapes.table(about, figures))
    if arguments.json is not None:
        arguments.json.write_text(shapes.as_json(about, figures) + "\n", encoding="utf-8")
    return int(any(figure.verdict == "BEHIND" for figure in figures))


def _add_bookkeeping(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("bookkeeping", help="a step without the model's and the sampler's arithmetic")
    parser.add_argument("--seqs", type=int, default=256, help="running sequences")
    parser.set_defaults(run=_run_bookkeeping)


def _run_bookkeeping(arguments: argparse.Namespace) -> None:
    result = bookkeeping.measure(arguments.seqs)
    print(
        f"{result.num_seqs} sequences: median {result.median_ms:.2f} ms a step, "
        f"95th percentile {result.p95_ms:.2f}, lowest {result.min_ms:.2f}"
    )


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers such as 1,8") from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
