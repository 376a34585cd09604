"""What quantization costs: perplexity of a text, and how far the answers are from those of the model before.

perplexity = exp(nll / num_tokens), KL and top-1 the means of what engine.bench.divergence adds up.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.batch import StepPlan
from engine.bench.arguments import not_negative, positive, report_file
from engine.bench.divergence import Divergence, Sums
from engine.bench.offline import decode_steps
from engine.build import BuiltEngine, build_engine
from engine.checkpoint.gguf_file import read_gguf
from engine.checkpoint.loader import load_model_config
from engine.checkpoint.source import ModelSource, resolve
from engine.checkpoint.stored_tensor import BLOCK
from engine.checkpoint.text import load_text
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.progress import Progress
from engine.quantize.as_format import ACTIVATIONS, FormatModel
from engine.quantize.calibrate import Windows, cut_windows
from engine.runner import PROMPT_LOGPROB_ROWS
from ref.quant.awq import AwqConfig
from ref.quant.compressed_tensors_config import CtConfig, CtScheme
from ref.quant.gptq import GptqConfig

Float32 = NDArray[np.float32]

BLOCK_SIZE = 16
LARGEST_EXP = math.log(sys.float_info.max)
# Largest perplexity against that of the model before, by the type of weights, of a model as small as the starter model;
# larger ones lose less. Rounding is noise of a share r of a weight: 0.7 % in int8 with a scale a row (3.3 standard
# deviations in 127 steps), 2.6 % in e4m3 (half of the last of 3 bits), 9 to 11 % in int4 in groups of 64. KL grows with
# its square, and the logarithm of the ratio like KL: 20 to 55 r² were found. Activations of 8 bits add half as much in
# e4m3, and eight times as much in int8, where a token's outliers take all the steps. Twice what was found passes.
BOUNDS = {"floating point": 1.01, "int8": 1.05, "fp8": 1.08, "int4": 1.6}
GGUF_KINDS = {"Q8_0": "int8", "Q4_0": "int4", "Q4_1": "int4"}


@dataclass(frozen=True, slots=True)
class Row:
    """A model's line of the table. ratio: of perplexities, against the model before; ms: a token, alone."""

    model: str
    format: str
    size_mb: float
    ms: float | None
    perplexity: float
    ratio: float
    bound: float
    kl: float
    top1: float

    @property
    def holds(self) -> bool:
        return self.ratio <= self.bound


@dataclass(frozen=True, slots=True)
class Report:
    device: str
    activations: str
    text: str
    num_tokens: int
    window: int
    rows: tuple[Row, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="the model before: a folder, a GGUF file, or starter")
    parser.add_argument("--against", nargs="+", required=True, metavar="MODEL", help="quantized ones of it")
    parser.add_argument("--text", type=Path, help="a text file; by default what ref says of itself")
    parser.add_argument("--tokens", type=positive, default=20_000, help="of the text that are read (20000)")
    parser.add_argument("--window", type=positive, default=512, help="tokens that are read in one go (512)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    parser.add_argument(
        "--activations",
        choices=("engine", *ACTIVATIONS),
        default="engine",
        help="engine: as it serves (a CPU decodes weights and leaves activations alone); format: of 8 bits where the "
        "format has them; int8 and fp8: for 4-bit weights too. Those three on a CPU, by ref's definition, and slow",
    )
    parser.add_argument(
        "--steps", type=not_negative, default=30, help="decode steps that ms/token is the median of (30); 0: none"
    )
    parser.add_argument("--json", type=report_file, help="file to write the report to")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """1 where a bound is passed.

    Raises:
        ConfigError: a model or the text cannot be used.
    """
    if arguments.window < 2:
        raise ConfigError("--window must be at least 2")
    report = measure(arguments)
    print(table(report))
    if arguments.json is not None:
        Path(arguments.json).write_text(json.dumps(asdict(report), indent=1) + "\n", encoding="utf-8")
    return int(not all(row.holds for row in report.rows))


def measure(arguments: argparse.Namespace) -> Report:
    """Runs all models on the text, one after another."""
    names = (arguments.model, *arguments.against)
    sources = [resolve(name) for name in names]
    windows, text = text_windows(sources, arguments.text, arguments.tokens, arguments.window)
    rows: list[Row] = []
    device = ""
    with Divergence(windows, load_model_config(sources[0]).vocab_size) as divergence:
        for name, source in zip(names, sources, strict=True):
            if arguments.activations != "engine" and rows:
                parts, ms = FormatModel(name, arguments.activations).logits(windows, PROMPT_LOGPROB_ROWS), None
                sums = divergence.judge(_followed(parts, source.name, windows.size))
            else:
                built = _engine(name, arguments)
                device = device or built.device
                sums = divergence.judge(_followed(engine_logits(built, windows), source.name, windows.size))
                ms = decode_steps(built, 1, arguments.steps, 0.0).median_ms if arguments.steps else None
                del built  # before the next takes memory
            rows.append(_row(source, sums, ms, rows[0].perplexity if rows else None))
    num_tokens = windows.size - len(windows)
    return Report(device, arguments.activations, text, num_tokens, windows.shape[1], tuple(rows))


def _followed(parts: Iterator[Float32], model: str, num_tokens: int) -> Iterator[Float32]:
    with Progress(num_tokens, model, "tokens") as bar:
        for part in parts:
            yield part
            bar.update(len(part))


def _row(source: ModelSource, sums: Sums, ms: float | None, before: float | None) -> Row:
    kind, details = format_of(source)
    perplexity = exp(sums.nll / sums.num_tokens)
    return Row(
        model=source.name,
        format=kind + details,
        size_mb=_size_mb(source),
        ms=ms,
        perplexity=perplexity,
        ratio=perplexity / (before or perplexity),
        bound=BOUNDS[kind],
        kl=sums.kl / sums.num_tokens,
        top1=sums.same / sums.num_tokens,
    )


def text_windows(
    sources: Sequence[ModelSource], path: Path | None, num_tokens: int, length: int
) -> tuple[Windows, str]:
    """Token ids of the text, and its name. All models must read it alike."""
    if path is None:
        text, name = own_text(), "ref's own words"
    else:
        try:
            text, name = path.read_text(encoding="utf-8"), path.name
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--text {path}: cannot be read as UTF-8 text: {error}") from error
    found: list[list[int]] = []
    for source in sources:
        config = load_model_config(source)
        if length > config.max_position_embeddings:
            raise ConfigError(
                f"--window {length}: {source.path} has {config.max_position_embeddings} positions "
                "(max_position_embeddings)"
            )
        tokenizer, _ = load_text(source, config.vocab_size)
        if tokenizer is None:
            raise ConfigError(f"{source.path}: has no tokenizer.json to read a text with")
        found.append(tokenizer.encode(text, add_special_tokens=False))
        if found[-1] != found[0]:
            raise ConfigError(
                f"{source.path}: its tokenizer cuts the text in other tokens than that of {sources[0].path}"
            )
    return cut_windows(found[0], num_tokens, length, "--text"), name


def exp(x: float) -> float:
    """Infinite where a float is too small for it: a model can be as wrong as that."""
    return math.inf if x > LARGEST_EXP else math.exp(x)


def own_text() -> str:
    """The guides that come with ref, in the order of their names."""
    guides = [part for folder in ("", "course") for part in resources.files("ref").joinpath(folder).iterdir()]
    texts = {part.name: part.read_text(encoding="utf-8") for part in guides if part.name.endswith(".md")}
    return "\n\n".join(texts[name] for name in sorted(texts))


def _engine(model: str, arguments: argparse.Namespace) -> BuiltEngine:
    longest = max(arguments.window, 2 * arguments.steps + 64)
    config = EngineConfig(
        model=model,
        device=arguments.device,
        dtype=arguments.dtype,
        block_size=BLOCK_SIZE,
        max_num_seqs=1,
        max_num_batched_tokens=max(arguments.window, 64),
        num_gpu_blocks_override=longest // BLOCK_SIZE + 2,
        enable_prefix_caching=False,
    )
    return build_engine(config, progress=False)


def engine_logits(built: BuiltEngine, windows: Windows) -> Iterator[Float32]:
    """As FormatModel.logits, of an engine. Nobody has a request in it, so all blocks are free."""
    for window in windows:
        num_blocks = -(-len(window) // BLOCK_SIZE)
        plan = StepPlan(
            step=0,
            slots=np.zeros(1, np.int32),
            starts=np.zeros(1, np.int32),
            cu_seqlens_q=np.array([0, len(window)], np.int32),
            token_ids=window,
            block_table=np.arange(num_blocks, dtype=np.int32)[None],
            num_logits=np.array([len(window)], np.int32),
            samples=np.zeros(1, np.bool_),
            rope_lens=np.full(1, built.engine.runner.rope.rope_len(len(window)), np.int32),
            two_way_lens=np.zeros(1, np.int32),
            num_decodes=0,
        )
        yield from built.engine.runner.prompt_logits(plan)


def format_of(source: ModelSource) -> tuple[str, str]:
    """The type of weights, a key of BOUNDS, and what else is to be said."""
    if source.kind == "gguf":
        return _gguf_format(source)
    quantization = load_model_config(source).quantization
    if quantization is None:
        return "floating point", ""
    method = quantization.method
    if isinstance(method, AwqConfig):
        return "int4", f" g{method.group_size}, AWQ"
    if isinstance(method, GptqConfig):
        zeros = "" if method.symmetric else ", zero points"
        return f"int{method.bits}", f" g{method.group_size}{zeros}, GPTQ's files"
    scheme: CtScheme = method.groups[0][1] if isinstance(method, CtConfig) else method
    size = f" g{scheme.group_size}" if scheme.strategy == "group" else f" a {scheme.strategy}"
    activations = {"token": "A8 per token", "group": "A8 per token and 128", "static": "A8 static"}
    after = f", {activations[scheme.activations]}" if scheme.activations else ""
    zeros = "" if scheme.symmetric else ", zero points"
    return f"{'int' if scheme.type == 'int' else 'fp'}{scheme.bits}", f"{size}{zeros}{after}"


def _gguf_format(source: ModelSource) -> tuple[str, str]:
    """That of most of its bytes."""
    sizes: Counter[str] = Counter()
    for tensor in read_gguf(source.path).tensors.values():
        sizes[tensor.dtype] += tensor.num_bytes
    dtype, _ = sizes.most_common(1)[0]
    return (GGUF_KINDS[dtype], f" g{BLOCK}, GGUF's {dtype}") if dtype in GGUF_KINDS else ("floating point", "")


def _size_mb(source: ModelSource) -> float:
    files = [source.path] if source.kind == "gguf" else list(source.path.glob("*.safetensors"))
    return sum(file.stat().st_size for file in files) / 1e6


def table(report: Report) -> str:
    """The report for people."""
    width = max(len(model) for model in ("model", *(row.model for row in report.rows)))
    lines = [
        f"{report.num_tokens} tokens of {report.text} in windows of {report.window}; {report.device}; activations: "
        f"{report.activations}",
        f"{'model':<{width}} {'format':<34} {'MB':>7} {'ms/token':>9} {'perplexity':>10} {'ratio':>7} {'bound':>6} "
        f"{'KL':>9} {'top-1':>7}",
    ]
    for row in report.rows:
        ms = "-" if row.ms is None else f"{row.ms:.2f}"
        lines.append(
            f"{row.model:<{width}} {row.format:<34} {row.size_mb:>7.1f} {ms:>9} {row.perplexity:>10.4f} "
            f"{row.ratio:>7.4f} {row.bound:>6.3f} "
            f"{row.kl:>9.6f} {row.top1:>7.2%}{'' if row.holds else '  PASSED ITS BOUND'}"
        )
    return "\n".join(lines)
