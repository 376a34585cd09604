"""`python -m engine.bench offline | bookkeeping | weights | streaming | serve | soak | quality | ranks | wires |
allreduce`; each with --help."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import get_args

from engine.bench import allreduce, bookkeeping, load, offline, quality, ranks, shapes, soak, streaming, weights, wires
from engine.bench.arguments import positive, positive_list, report_file_or_output
from engine.bench.model_shapes import QUANTS, SHAPES
from engine.config import CUDA_ARCHES, AllReduce, DualStream, EngineConfig
from engine.env import launched_rank
from engine.errors import ConfigError, GlintError
from engine.log import set_up_logging


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m engine.bench", description="Benchmarks of the engine.")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_offline(commands)
    _add_bookkeeping(commands)
    weights.add_arguments(commands.add_parser("weights", help="from files into a GPU's memory, beside a bare copy"))
    streaming.add_arguments(commands.add_parser("streaming", help="what streaming clients cost the engine's steps"))
    load.add_arguments(commands.add_parser("serve", help="load on a running server: TTFT, TPOT, throughput"))
    soak.add_arguments(
        commands.add_parser("soak", help="a crowd on a running server: right answers, nothing left behind")
    )
    ranks.add_arguments(commands.add_parser("ranks", help="under mpirun: delay of plans, idle ranks"))
    quality.add_arguments(commands.add_parser("quality", help="what quantized weights cost: perplexity, KL, top-1"))
    wires.add_arguments(commands.add_parser("wires", help="under mpirun: what sums over ranks cost: KL, top-1"))
    allreduce.add_arguments(
        commands.add_parser("allreduce", help="under mpirun: sums over GPUs, way by way, beside NCCL")
    )
    arguments = parser.parse_args(argv)
    set_up_logging("bench", "WARNING")
    try:
        status: int | None = arguments.run(arguments)
    except GlintError as error:
        if launched_rank(os.environ) == 0:
            print(f"engine.bench: {error}", file=sys.stderr)
        return 1
    return status or 0


def _add_offline(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("offline", help="decode and prefill of a model in this process")
    parser.add_argument("--model", default="starter")
    parser.add_argument(
        "--model-shape",
        choices=SHAPES,
        help="in place of a model: its shapes with random weights on the GPU, beside limit and peer",
    )
    parser.add_argument("--quant", choices=QUANTS, default="", help="with --model-shape: quantized weights")
    parser.add_argument(
        "--w4a8", choices=("off", "int8", "fp8"), default="off", help="with --quant of 4 bits: as engine.serve's"
    )
    parser.add_argument(
        "--small",
        action="store_true",
        help="with --model-shape: weights as small as those that the peer was timed with",
    )
    parser.add_argument(
        "--arch", choices=CUDA_ARCHES, default="auto", help="with --model-shape: the kernels of an older kind of GPU"
    )
    parser.add_argument(
        "--cold-start", action="store_true", help="with --model-shape: start once with all caches empty too"
    )
    parser.add_argument(
        "--only",
        type=_names,
        default=(),
        help='with --model-shape: only these figures, by name or the first word of it, such as "prefill,decode 1"',
    )
    parser.add_argument(
        "--tensor-parallel-size", type=positive, default=1, help="with --model-shape: as engine.serve's"
    )
    parser.add_argument("--pipeline-parallel-size", type=positive, default=1, help="with --model-shape, the same")
    parser.add_argument("--allreduce", choices=get_args(AllReduce), default="auto", help="with --model-shape, the same")
    parser.add_argument(
        "--dual-stream", choices=get_args(DualStream), default="auto", help="with --model-shape, the same"
    )
    parser.add_argument("--batches", type=positive_list, default=(1, 8), help="decode batch sizes, such as 1,8")
    parser.add_argument("--prefills", type=positive_list, default=(512,), help="prompt lengths")
    parser.add_argument("--steps", type=positive, default=30, help="decode steps a figure is the median of")
    parser.add_argument("--threads", type=positive, default=None)
    parser.add_argument(
        "--json",
        type=report_file_or_output,
        default=None,
        help="file to write the report to; - for one line on standard output",
    )
    parser.add_argument(
        "--against-transformers", metavar="PYTHON", help="an interpreter with the oracle extra: paired runs"
    )
    parser.add_argument("--rounds", type=positive, default=3, help="of paired runs")
    parser.set_defaults(run=_run_offline)


def _run_offline(arguments: argparse.Namespace) -> int | None:
    if arguments.model_shape is not None:
        return _run_shape(arguments)
    for name, default in (
        ("quant", ""),
        ("w4a8", "off"),
        ("arch", "auto"),
        ("small", False),
        ("cold_start", False),
        ("only", ()),
        ("tensor_parallel_size", 1),
        ("pipeline_parallel_size", 1),
        ("allreduce", "auto"),
        ("dual_stream", "auto"),
    ):
        if getattr(arguments, name) != default:
            raise ConfigError(f"--{name.replace('_', '-')}: is for --model-shape; give one of {', '.join(SHAPES)}")
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
        return None
    report = offline.measure(config, arguments.batches, arguments.prefills, arguments.steps)
    if arguments.json != "-":
        print(offline.table(report))
    _write(arguments.json, offline.as_json(report))
    return None


def _run_shape(arguments: argparse.Namespace) -> int:
    """1 where a figure is behind the peer."""
    about, figures = shapes.measure(
        arguments.model_shape,
        arguments.arch,
        arguments.cold_start,
        arguments.only,
        arguments.quant,
        arguments.w4a8,
        arguments.small,
        shapes.Split(
            arguments.tensor_parallel_size,
            arguments.pipeline_parallel_size,
            arguments.allreduce,
            arguments.dual_stream,
        ),
        lambda line: print(line, file=sys.stderr, flush=True),
    )
    if arguments.json != "-":
        print(shapes.table(about, figures))
    _write(arguments.json, shapes.as_json(about, figures))
    return int(any(figure.verdict == "BEHIND" for figure in figures))


def _write(where: str | None, report: str) -> None:
    """To a file; - is standard output."""
    if where == "-":
        print(report)
    elif where is not None:
        Path(where).write_text(report + "\n", encoding="utf-8")


def _add_bookkeeping(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("bookkeeping", help="a step without the model's and the sampler's arithmetic")
    parser.add_argument("--seqs", type=positive, default=256, help="running sequences")
    parser.set_defaults(run=_run_bookkeeping)


def _run_bookkeeping(arguments: argparse.Namespace) -> None:
    result = bookkeeping.measure(arguments.seqs)
    print(
        f"{result.num_seqs} sequences: median {result.median_ms:.2f} ms a step, "
        f"95th percentile {result.p95_ms:.2f}, lowest {result.min_ms:.2f}"
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
