"""What each stream of each rank does when, in a few layers of a step: every part between two events.

On a GPU these are CUDA events around what is launched, kernel by kernel: steps of more than 512 tokens are launched so,
and no graph is looked into. On a CPU the host's clock stands for them. Clocks of ranks are told by the sum of the
embedding, which ends on all of them at the same time. Where sums go by copy engines, their streams are lanes too: what
they show begins when the caller has what is copied, and waits for the other ranks within.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from conformance.ranks.recorder import COMPUTE, COPY, SUM, GpuClock, HostClock, Recorder, Span, marked_copies
from conformance.ranks.steps import WHOLE, Steps, halving_of, make_steps, prompt_plan
from engine.batch import StepPlan
from engine.comm.ranks import Ranks
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.forward import Forward
from engine.halves import NEVER

KINDS = {  # the wire, and whether the step is in halves
    "whole": ("auto", False),
    "dual streams": ("auto", True),
    "dual streams, int8": ("int8", True),
}
SHOWN = 2  # layers
UNTIMED, REPEATS = 2, 5  # of a step; the middle one of those that are timed is shown


@dataclass(frozen=True, slots=True)
class Timeline:
    """Of one kind of step (see KINDS), all ranks; us: from the first begin to the last end."""

    kind: str
    num_tokens: int
    spans: tuple[Span, ...]

    @property
    def us(self) -> float:
        return max(span.end for span in self.spans)

    @property
    def num_layers(self) -> int:
        return len({span.layer for span in self.spans})

    @property
    def ranks(self) -> list[int]:
        return sorted({span.rank for span in self.spans})

    def of_sums(self) -> tuple[float, float]:
        """µs of sums, and how much of them lies beside parts of the same rank that compute; means of ranks."""
        total = beside = 0.0
        for rank in self.ranks:
            mine = [span for span in self.spans if span.rank == rank]
            parts = [span for span in mine if span.lane == COMPUTE and span.part != SUM]
            for one in (span for span in mine if span.part == SUM):
                total += one.end - one.begin
                beside += sum(max(0.0, min(one.end, part.end) - max(one.begin, part.begin)) for part in parts)
        return total / len(self.ranks), beside / len(self.ranks)


def record(config: EngineConfig, ranks: Ranks, num_tokens: int) -> tuple[list[Timeline], str]:
    """A prompt of so many tokens, in each kind of step; and what computes. On all ranks together.

    Raises:
        ConfigError: there is one rank, or the model cannot be split; the step is a graph.
    """
    recorder = Recorder(HostClock())
    with marked_copies(recorder, config.device != "cpu"):
        steps = make_steps(config, ranks, tuple(dict.fromkeys(wire for wire, _ in KINDS.values())), recorder)
        if steps.device.startswith("device cuda"):
            recorder.clock = GpuClock()
        in_two = replace(halving_of(num_tokens), min_decodes=NEVER)
        found = []
        for kind, (wire, is_halved) in KINDS.items():
            forward = steps.forwards[wire]
            forward.halve(in_two if is_halved else WHOLE)
            runs = ranks.gather(_runs(forward, prompt_plan(num_tokens), ranks, steps, recorder), "the timeline")
            shown = sorted((_shown(spans) for spans in zip(*runs, strict=True)), key=lambda spans: spans[-1].end)
            found.append(Timeline(kind, num_tokens, tuple(shown[len(shown) // 2])))
    return found, steps.device


def _runs(forward: Forward, plan: StepPlan, ranks: Ranks, steps: Steps, recorder: Recorder) -> list[list[Span]]:
    found = []
    for turn in range(REPEATS):
        ranks.gather(None, "a step")
        batch = forward.batch(plan)
        recorder.halves, recorder.is_on = batch.halves or (), turn >= UNTIMED
        steps.wait(forward(batch))
        recorder.is_on = False
        if turn >= UNTIMED:
            found.append(recorder.take(ranks.rank))
    if not all(found):
        raise ConfigError(
            f"--timeline: a step of {plan.num_tokens} tokens is a graph, into which no event goes; give --prefills 513 "
            "or more"
        )
    return found


def _shown(runs: Sequence[list[Span]]) -> list[Span]:
    """A few layers behind the first, if there are so many; by their ends."""
    spans = [span for of_rank in runs for span in of_rank]
    layers = sorted({span.layer for span in spans})
    chosen = layers[1 : 1 + SHOWN] if len(layers) > SHOWN else layers
    kept = [span for span in spans if span.layer in chosen]
    zero = min(span.begin for span in kept)
    moved = (replace(span, begin=span.begin - zero, end=span.end - zero) for span in kept)
    return sorted(moved, key=lambda span: span.end)


def table(timelines: Sequence[Timeline]) -> str:
    """µs a layer, means of ranks: each part of each half, from begin to end, and how much of sums is hidden."""
    columns = [(line, half) for line in timelines for half in sorted({span.half for span in line.spans})]
    heads = [line.kind if half < 2 else "" for line, half in columns]
    by_begin = (span for line in timelines for span in sorted(line.spans, key=lambda span: span.begin))
    parts = dict.fromkeys(span.part for span in by_begin if span.part != COPY)  # several streams at a time
    rows = [["µs a layer", *heads], ["", *(f"half {half}" if half else "" for _, half in columns)]]
    for part in parts:
        times = [
            sum(span.end - span.begin for span in line.spans if (span.part, span.half) == (part, half))
            / (len(line.ranks) * line.num_layers)
            for line, half in columns
        ]
        rows.append([part, *(f"{us:,.0f}" if us else "" for us in times)])
    is_first = [half < 2 for _, half in columns]
    sums = [line.of_sums() for line, _ in columns]
    ends = [f"{line.us / line.num_layers:,.0f}" for line, _ in columns]
    shares = [f"{beside / total:.0%}" if total else "" for total, beside in sums]
    for name, values in (("from begin to end", ends), ("of sums beside parts", shares)):
        rows.append([name, *(value if first else "" for value, first in zip(values, is_first, strict=True))])
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    lines = [
        row[0].ljust(widths[0]) + "".join(f" {cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)
