"""`mpirun -n N python -m conformance.ranks.dual_stream [--model-shape NAME] [--prefills 512,2048] [--decodes 512]`

What dual streams hide of the wire, in one table and one picture: a step plain, in halves whose sums go under the other
half's compute, the same with int8 on the wire, and without a wire (each rank takes its own part for the sum, so its
numbers are wrong and its time is that of computing alone). Beside it what ref.dual_stream foretells from the plain step
and those without a wire. --predict needs no ranks: what two, four and eight GPUs on PCIe should take, as
conformance/ranks/predictions.py says; conformance/results/predicted-tp4-tp8.txt keeps it for when there are such runs.
--timeline draws instead what each stream of each rank does when, in two layers of a prompt of the first length: whole,
in halves, and in halves with int8 (see conformance/ranks/timeline.py).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from conformance.ranks import predictions, timeline
from conformance.ranks.steps import (
    BLOCK_SIZE,
    CONTEXT,
    NO_WIRE,
    WHOLE,
    decode_plan,
    halving_of,
    make_steps,
    prompt_plan,
)
from conformance.ranks.timeline_picture import picture as timeline_picture
from engine.batch import StepPlan
from engine.bench.arguments import positive, positive_list, report_file
from engine.bench.model_shapes import QUANTS, SHAPES
from engine.comm.ranks import Ranks, join_ranks
from engine.config import EngineConfig
from engine.errors import ConfigError, GlintError
from engine.forward import Forward
from ref.dual_stream import dual, total_time
from ref.svg import COLORS, Panel, document, dot, frame, line, text

Array = Any

WIRES = ("auto", "int8", NO_WIRE)
REPEATS = 5  # of a step, of which the first counts not


@dataclass(frozen=True, slots=True)
class Times:
    """Milliseconds of a step of the slowest rank; halves: of the step in two."""

    kind: str  # prefill or decode
    num_tokens: int
    num_pieces: int
    plain: float
    dual: float
    int8: float
    dual_int8: float
    no_wire: float
    no_wire_halves: float

    def hidden(self, in_halves: float) -> float:
        """1 − (T_dual − T_nowire) / (T_plain − T_nowire); 0 where there is no wire to hide."""
        visible = self.plain - self.no_wire
        return 1 - (in_halves - self.no_wire) / visible if visible > 0 else 0.0

    @property
    def foretold(self) -> float:
        """The time in halves as ref.dual_stream has it, of equal pieces."""
        n = self.num_pieces
        wire = max(self.plain - self.no_wire, 0.0) / n
        overhead = max(self.no_wire_halves - self.no_wire, 0.0) / (2 * n)
        return total_time(dual([self.no_wire / n] * n, [wire] * n, overhead=overhead))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m conformance.ranks.dual_stream", description=__doc__)
    parser.add_argument("--model", default="starter")
    parser.add_argument("--model-shape", choices=SHAPES, help="in place of a model: its shapes with random weights")
    parser.add_argument("--quant", choices=QUANTS, default="", help="with --model-shape: quantized weights")
    parser.add_argument("--layers", type=positive, default=8, help="with --model-shape: of which a step is made (8)")
    parser.add_argument("--prefills", type=positive_list, help="prompt lengths (512,2048; to predict 8192 too)")
    parser.add_argument("--decodes", type=positive_list, help="numbers of sequences (512; to predict 1,16,64)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--json", type=report_file, help="file to write the report to")
    parser.add_argument("--svg", type=report_file, help="file to draw the picture to")
    parser.add_argument(
        "--timeline", type=report_file, help="file to draw what each stream does when to, in place of all"
    )
    parser.add_argument("--predict", action="store_true", help="no ranks: what should come of so many H200 on PCIe")
    parser.add_argument("--ranks", type=positive_list, help="with --predict: how many (2,4,8)")
    args = parser.parse_args(arguments)
    try:
        if args.predict:
            return _predict(args)
        if args.ranks is not None:
            raise ConfigError("--ranks: is for --predict; to measure, start as many with mpirun -n")
        if args.timeline:
            return _timeline(args)
        args.prefills, args.decodes = args.prefills or (512, 2048), args.decodes or (512,)
        ranks = join_ranks(os.environ)
        with ranks.guard(), tempfile.TemporaryDirectory() as folder:
            steps = measure(_config(args, folder), ranks, args.prefills, args.decodes)
    except GlintError as error:
        sys.stderr.write(f"conformance.ranks.dual_stream: {error}\n")
        return 1
    if ranks.rank == 0:
        num_layers = max(steps[0].num_pieces // 2, 1)
        _say(f"{args.model_shape or args.model}, TP {ranks.size}, {num_layers} layers:", table(steps, num_layers))
        if args.json:
            Path(args.json).write_text(json.dumps([asdict(step) for step in steps], indent=1) + "\n", encoding="utf-8")
        if args.svg:
            Path(args.svg).write_text(picture(steps, num_layers), encoding="utf-8")
    return 0


def _predict(args: argparse.Namespace) -> int:
    if args.svg:
        raise ConfigError("--svg: draws what is measured; predictions are a table (or --json)")
    if args.quant and not args.model_shape:
        raise ConfigError(f"--quant {args.quant}: is for --model-shape; give one of {', '.join(SHAPES)}")
    models = [(args.model_shape, args.quant)] if args.model_shape else predictions.MODELS
    counts = args.ranks or predictions.RANKS
    steps = args.prefills or predictions.PREFILLS, args.decodes or predictions.DECODES
    found = predictions.predict(models, counts, *steps)
    _say(predictions.report(found))
    if args.json:
        Path(args.json).write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n", encoding="utf-8")
    return 0


def _timeline(args: argparse.Namespace) -> int:
    if args.svg or args.decodes:
        raise ConfigError("--timeline: draws one prompt, and is a picture itself; leave out --svg and --decodes")
    args.prefills, args.decodes = (args.prefills or (2048,))[:1], (1,)
    ranks = join_ranks(os.environ)
    with ranks.guard(), tempfile.TemporaryDirectory() as folder:
        found, device = timeline.record(_config(args, folder), ranks, args.prefills[0])
    if ranks.rank == 0:
        title = f"{args.model_shape or args.model}, TP {ranks.size}, a prompt of {args.prefills[0]} tokens; {device}"
        how = (
            "between CUDA events, launched kernel by kernel (no graphs)" if "cuda" in device else "by the host's clock"
        )
        _say(f"{title}, {how}:", timeline.table(found))
        Path(args.timeline).write_text(timeline_picture(found, title, how), encoding="utf-8")
        if args.json:
            Path(args.json).write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n", encoding="utf-8")
    return 0


def _say(*lines: str) -> None:
    sys.stdout.write("\n".join([*lines, ""]))


def measure(config: EngineConfig, ranks: Ranks, prefills: Sequence[int], decodes: Sequence[int]) -> list[Times]:
    """Of every step, on all ranks together.

    Raises:
        ConfigError: there is one rank, or the model cannot be split so.
    """
    shared, steps = make_steps(config, ranks, WIRES), []
    plans = [("prefill", n, prompt_plan(n)) for n in prefills] + [("decode", n, decode_plan(n)) for n in decodes]
    for kind, num_tokens, plan in plans:
        found = {}
        for name, forward in shared.forwards.items():
            for halves in (False, True):
                forward.halve(halving_of(num_tokens) if halves else WHOLE)
                found[name, halves] = _time(forward, plan, ranks, shared.wait)
        whole, in_two = ([found[name, halves] for name in WIRES] for halves in (False, True))
        times = whole[0], in_two[0], whole[1], in_two[1], whole[2], in_two[2]
        steps.append(Times(kind, num_tokens, shared.num_pieces, *times))
    return steps


def _time(forward: Forward, plan: StepPlan, ranks: Ranks, wait: Callable[[Array], None]) -> float:
    times = []
    for _ in range(REPEATS):
        ranks.gather(None, "a step")
        started = time.perf_counter()
        wait(forward(forward.batch(plan)))
        times.append((time.perf_counter() - started) * 1e3)
    return max(ranks.gather(statistics.median(times[1:]), "times"))


def _config(args: argparse.Namespace, folder: str) -> EngineConfig:
    model, load = args.model, "auto"
    if args.model_shape:
        shape = SHAPES[args.model_shape] | {"num_hidden_layers": args.layers}
        shape |= {"quantization_config": QUANTS[args.quant]} if args.quant else {}
        Path(folder, "config.json").write_text(json.dumps(shape), encoding="utf-8")
        model, load = folder, "dummy"
    longest, most = max((*args.prefills, CONTEXT + 1)), max(args.decodes, default=1)
    return EngineConfig(
        model=model,
        device=args.device,
        load_format=load,  # type: ignore[arg-type]
        max_model_len=longest + BLOCK_SIZE,
        max_num_seqs=most,
        max_num_batched_tokens=max(longest, most),
        num_gpu_blocks_override=longest // BLOCK_SIZE + most + 2,
        dual_stream="off",
    )


def table(steps: Sequence[Times], num_layers: int) -> str:
    """Milliseconds a layer, and what is hidden of the wire; foretold: of dual, by ref.dual_stream."""
    head = f"{'ms a layer':<22} {'plain':>8} {'dual':>8} {'foretold':>8} {'int8':>8} {'both':>8} {'no wire':>8} "
    lines = [head + f"{'halves':>8} {'hidden':>7} {'both':>7}"]
    for step in steps:
        times = step.plain, step.dual, step.foretold, step.int8, step.dual_int8, step.no_wire, step.no_wire_halves
        numbers = " ".join(f"{ms / num_layers:>8.3f}" for ms in times)
        shares = f"{step.hidden(step.dual):>7.1%} {step.hidden(step.dual_int8):>7.1%}"
        lines.append(f"{f'{step.kind} {step.num_tokens}':<22} {numbers} {shares}")
    return "\n".join(lines)


def picture(steps: Sequence[Times], num_layers: int) -> str:
    """A panel a step: a line as long as the time; dashed: what computing takes alone."""
    shapes = []
    for place, step in enumerate(steps):
        times = {"plain": step.plain, "dual streams": step.dual, "+ int8": step.dual_int8, "no wire": step.no_wire}
        longest = max(times.values()) / num_layers * 1.1
        panel = Panel(110, 40 + 190 * place, 420, 110, (0, longest), (len(times), 0))
        ticks = [round(longest * share, 3) for share in (0, 0.25, 0.5, 0.75, 1)]
        shapes += frame(panel, f"{step.kind}, {step.num_tokens} tokens", "ms a layer", "", ticks, ())
        for row, (name, ms) in enumerate(times.items()):
            y = panel.y(row + 0.5)
            shapes.append(text(100, y + 4, name, "end"))
            shapes.append(line(panel.left, y, panel.x(ms / num_layers), y, COLORS[row]))
            shapes.append(dot(panel, ms / num_layers, row + 0.5, COLORS[row]))
        alone = panel.x(step.no_wire / num_layers)
        shapes.append(line(alone, panel.top, alone, panel.top + panel.height, COLORS[4], dashed=True))
    return document(570, 20 + 190 * len(steps), shapes)


if __name__ == "__main__":
    sys.exit(main())
