"""How two streams hide the wire: a timeline of compute and all-reduce, with and without.

    python -m ref.dual_stream --compute-ms 2 --wire-ms 1 --pieces 6
    python -m ref.dual_stream --compute-ms 1.2,2.4 --wire-ms 0.9 --pieces 4 --overhead-ms 0.05

A layer is two pieces (attention, MLP), each followed by an all-reduce that the next one waits for. Serial: compute,
wire, compute, wire. Dual: the rows are split into halves A and B, which need nothing of each other but the order in
attention; while A's all-reduce is on the wire, B computes. There is one compute stream and one wire, both in the order
A, B, A, B; a half's next piece waits for its all-reduce.

    hidden share = 1 − (T_dual − T_nowire) / (T_serial − T_nowire)      T_nowire: compute alone

1 says that the wire costs nothing, 0 that the split gained nothing. n equal pieces of compute c and wire w ≤ c, halved,
take n c + w/2: all but the last half all-reduce is hidden, 1 − 1/(2n). With w > c the wire is what is busy: c/2 + n w.
Halves of a piece that reads its weights from memory take more than half its time each; `overhead` is what each half
takes more, and where it exceeds what is hidden, the share is negative.

Source: the overlap is that of ZhiLight (zhihu/ZhiLight, dual streams); the closed forms follow from the schedule.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """One thing that is done: times in ms."""

    lane: str  # "compute" or "wire"
    label: str  # "A" or "B"; "C" if the rows are not split
    piece: int
    start: float
    end: float


def serial(compute: Sequence[float], wire: Sequence[float]) -> list[Span]:
    """One piece after another, each with its all-reduce: T = Σ (compute + wire).

    Args:
        compute, wire: [num_pieces] each, ms.
    Raises:
        ValueError: lists of different length or none, times below 0.
    """
    _check(compute, wire, 0.5, 0.0)
    return _schedule(("C",), [compute], [wire])


def dual(
    compute: Sequence[float], wire: Sequence[float], *, first_share: float = 0.5, overhead: float = 0.0
) -> list[Span]:
    """Two halves, the all-reduce of one under the compute of the other.

    Args:
        compute, wire: [num_pieces] each, ms, of all rows.
        first_share: share of the rows in A; time goes with it.
        overhead: ms that each half of a piece takes more than its share.
    Raises:
        ValueError: lists of different length or none, times below 0, a share that is not between 0 and 1.
    """
    shares = (first_share, 1 - first_share)
    _check(compute, wire, first_share, overhead)
    return _schedule(
        ("A", "B"),
        [[ms * share + overhead for ms in compute] for share in shares],
        [[ms * share for ms in wire] for share in shares],
    )


def _schedule(labels: Sequence[str], compute: Sequence[Sequence[float]], wire: Sequence[Sequence[float]]) -> list[Span]:
    """Both lanes in the order of issue; a piece waits for its lane, and for the all-reduce of its half before it."""
    spans = []
    free = {"compute": 0.0, "wire": 0.0}
    reduced = [0.0] * len(labels)  # when each half's last all-reduce was done
    for piece in range(len(compute[0])):
        for half, label in enumerate(labels):
            start = max(free["compute"], reduced[half])
            free["compute"] = start + compute[half][piece]
            spans.append(Span("compute", label, piece, start, free["compute"]))
            start = max(free["wire"], free["compute"])
            free["wire"] = reduced[half] = start + wire[half][piece]
            spans.append(Span("wire", label, piece, start, free["wire"]))
    return spans


def total_time(spans: Sequence[Span]) -> float:
    """When the last thing is done, ms; 0 if there is none."""
    return max((span.end for span in spans), default=0.0)


def hidden_share(compute: Sequence[float], wire: Sequence[float], dual_spans: Sequence[Span]) -> float:
    """1 − (T_dual − T_nowire) / (T_serial − T_nowire); 0 if there is no wire to hide."""
    nowire = sum(compute)
    visible = total_time(serial(compute, wire)) - nowire
    return 1 - (total_time(dual_spans) - nowire) / visible if visible else 0.0


def draw(spans: Sequence[Span], width: int, until: float) -> str:
    """Both lanes as text: a letter where a half is at work (small on the wire), a dot where the lane waits.

    Args:
        width: columns that stand for `until` ms. A column shows what goes on in its middle.
    """
    lines = []
    for lane in ("compute", "wire"):
        row = ["."] * round(width * total_time(spans) / until)
        for column in range(len(row)):
            middle = (column + 0.5) * until / width
            for span in spans:
                if span.lane == lane and span.start <= middle < span.end:
                    row[column] = span.label if lane == "compute" else span.label.lower()
        lines.append(f"{lane:<8}{''.join(row)}")
    return "\n".join(lines)


def report(compute: Sequence[float], wire: Sequence[float], first_share: float, overhead: float, width: int) -> str:
    """Both timelines, the three times and the hidden share, as text."""
    one, two = serial(compute, wire), dual(compute, wire, first_share=first_share, overhead=overhead)
    times = total_time(one), total_time(two), sum(compute)
    until = max(times)
    return "\n".join(
        [
            f"serial  {times[0]:.3f} ms",
            draw(one, width, until),
            f"dual    {times[1]:.3f} ms",
            draw(two, width, until),
            f"compute alone {times[2]:.3f} ms; hidden share {hidden_share(compute, wire, two):.1%}; "
            f"{times[0] / times[1]:.2f} times as fast",
        ]
    )


def _check(compute: Sequence[float], wire: Sequence[float], first_share: float, overhead: float) -> None:
    if not compute or len(compute) != len(wire):
        raise ValueError(
            f"{len(compute)} compute times and {len(wire)} wire times; wanted as many, at least one of each"
        )
    if not min(*compute, *wire, overhead) >= 0 or sum(compute) == 0:
        raise ValueError("times must be 0 or more, and some compute time above 0")
    if not 0 < first_share < 1:
        raise ValueError(f"first_share is {first_share}; wanted a share of the rows between 0 and 1")


def _repeated(text: str, option: str, num_pieces: int) -> list[float]:
    try:
        times = [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} is {text!r}; wanted milliseconds, separated by commas") from None
    return [times[piece % len(times)] for piece in range(num_pieces)]


def main(arguments: list[str] | None = None) -> int:
    """Prints the report; returns the exit status: 0, or 2 for input that makes no sense, with one line on stderr.

    Raises: nothing; a ValueError becomes that line.
    """
    parser = argparse.ArgumentParser(prog="python -m ref.dual_stream", description="Dual streams, drawn.")
    parser.add_argument("--compute-ms", required=True, help="ms of each piece, repeated as needed: 1.2,2.4")
    parser.add_argument("--wire-ms", required=True, help="ms of the all-reduce after each piece")
    parser.add_argument("--pieces", type=int, default=4, help="two a layer")
    parser.add_argument("--first-share", type=float, default=0.5, help="share of the rows in the first half")
    parser.add_argument("--overhead-ms", type=float, default=0.0, help="what each half of a piece takes more")
    parser.add_argument("--width", type=int, default=96, help="columns of the picture")
    args = parser.parse_args(arguments)
    try:
        if args.pieces < 1 or args.width < 1:
            raise ValueError(f"--pieces is {args.pieces} and --width {args.width}; wanted 1 or more")
        compute = _repeated(args.compute_ms, "--compute-ms", args.pieces)
        wire = _repeated(args.wire_ms, "--wire-ms", args.pieces)
        text = report(compute, wire, args.first_share, args.overhead_ms, args.width)
    except ValueError as error:
        sys.stderr.write(f"python -m ref.dual_stream: error: {error}\n")
        return 2
    sys.stdout.write(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
