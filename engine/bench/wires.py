"""`mpirun -n N python -m engine.bench wires`: what each way of adding up over ranks costs a model in quality.

The same engine over the same ranks reads a text, each token after the true ones before it; what it foretells over one
wire is held to what it foretells over the first.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from engine.bench.arguments import positive, report_file
from engine.bench.divergence import Divergence
from engine.bench.quality import BLOCK_SIZE, engine_logits, exp, text_windows
from engine.build import build_engine
from engine.checkpoint.loader import load_model_config
from engine.checkpoint.source import resolve
from engine.comm.failure import Followed
from engine.config import EngineConfig
from engine.errors import ConfigError

WIRES = ("auto", "bfloat16", "int8", "int8-plain")
LEAST_TOP1 = 0.99  # of the rotated int8, the form that is meant for use


@dataclass(frozen=True, slots=True)
class Row:
    """kl in nats a token; top1: the share of tokens whose best id is that of the first wire."""

    wire: str
    perplexity: float
    kl: float
    top1: float


@dataclass(frozen=True, slots=True)
class Report:
    model: str
    device: str
    tensor_parallel_size: int | None
    pipeline_parallel_size: int | None
    text: str
    num_tokens: int
    window: int
    rows: tuple[Row, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="starter")
    parser.add_argument("--wires", nargs="+", default=WIRES, metavar="WIRE", help="as --allreduce of engine.serve")
    parser.add_argument("--text", type=Path, help="a text file; by default what ref says of itself")
    parser.add_argument("--tokens", type=positive, default=2_000, help="that are foretold (2000)")
    parser.add_argument("--window", type=positive, default=501, help="tokens that are read in one go (501)")
    parser.add_argument("--tensor-parallel-size", type=positive)
    parser.add_argument("--pipeline-parallel-size", type=positive)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--json", type=report_file, help="file to write the report to")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """1 where the int8 wire agrees less often than LEAST_TOP1. Ranks but rank 0 follow, and say nothing.

    Raises:
        ConfigError: the model, the text or a wire cannot be used.
    """
    if arguments.window < 2:
        raise ConfigError("--window must be at least 2")
    sources = [resolve(arguments.model)]
    foretold = arguments.window - 1
    num_tokens = -(-arguments.tokens // foretold) * arguments.window
    windows, text = text_windows(sources, arguments.text, num_tokens, arguments.window)
    rows: list[Row] = []
    device = ""
    with Divergence(windows, load_model_config(sources[0]).vocab_size) as divergence:
        for wire in arguments.wires:
            try:
                built = build_engine(_config(arguments, wire), progress=False)
            except Followed as end:
                if end.code:
                    raise
                continue
            device = built.device
            sums = divergence.judge(engine_logits(built, windows))
            built.close()
            rows.append(
                Row(wire, exp(sums.nll / sums.num_tokens), sums.kl / sums.num_tokens, sums.same / sums.num_tokens)
            )
    if not rows:
        return 0
    sizes = arguments.tensor_parallel_size, arguments.pipeline_parallel_size
    foretold_tokens = windows.size - len(windows)
    report = Report(sources[0].name, device, *sizes, text, foretold_tokens, windows.shape[1], tuple(rows))
    print(table(report))
    if arguments.json is not None:
        Path(arguments.json).write_text(json.dumps(asdict(report), indent=1) + "\n", encoding="utf-8")
    return int(any(row.wire == "int8" and row.top1 < LEAST_TOP1 for row in rows))


def _config(arguments: argparse.Namespace, wire: str) -> EngineConfig:
    return EngineConfig(
        model=arguments.model,
        device=arguments.device,
        block_size=BLOCK_SIZE,
        max_num_seqs=1,
        max_num_batched_tokens=max(arguments.window, 64),
        num_gpu_blocks_override=arguments.window // BLOCK_SIZE + 2,
        enable_prefix_caching=False,
        allreduce=wire,  # type: ignore[arg-type]
        tensor_parallel_size=arguments.tensor_parallel_size,
        pipeline_parallel_size=arguments.pipeline_parallel_size,
    )


def table(report: Report) -> str:
    """The report for people."""
    lines = [
        f"{report.model}, tensor parallel {report.tensor_parallel_size}, pipeline parallel "
        f"{report.pipeline_parallel_size}; {report.num_tokens} tokens of {report.text} in windows of {report.window}; "
        f"{report.device}",
        f"{'wire':<12} {'perplexity':>10} {'KL':>10} {'top-1':>8}",
    ]
    for row in report.rows:
        lines.append(f"{row.wire:<12} {row.perplexity:>10.4f} {row.kl:>10.3g} {row.top1:>8.2%}")
    return "\n".join(lines)
