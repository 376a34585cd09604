"""The picture of timelines: a panel a kind of step over one scale of time, a lane a rank and stream."""

from __future__ import annotations

from collections.abc import Sequence

from conformance.ranks.recorder import COMPUTE, COPY, SUM, SUMS, Span
from conformance.ranks.timeline import Timeline
from engine.bench.load_picture import ticks
from ref.svg import COLORS, Panel, document, line, text

LEFT, WIDTH, LANE, BAR = 130, 840, 20, 14  # pixels
SMALL, LETTER = 9, 5.2  # height and width of a letter in a bar
HALF_COLORS = (COLORS[4], COLORS[0], COLORS[1])  # of a whole step, of the halves
NAMES = ("whole", "first half", "second half")


def picture(timelines: Sequence[Timeline], title: str, how: str) -> str:
    """title: model and what computes; how: what the times are made of."""
    most = max(one.us for one in timelines)
    shapes = [text(LEFT, 20, title), text(LEFT, 36, how, color=COLORS[4])]
    shapes += [
        text(LEFT + 110 * place, 54, name, color=color)
        for place, (name, color) in enumerate(zip(NAMES, HALF_COLORS, strict=True))
    ]
    shapes.append(text(LEFT + 330, 54, "strong: computes; light: adds up, copies"))
    top = 90.0
    for one in timelines:
        lanes = lanes_of(one)
        panel = Panel(LEFT, top, WIDTH, LANE * len(lanes), (0, most * 1.02), (len(lanes), 0))
        shapes += _panel(panel, one, lanes, ticks(most * 1.02))
        top += panel.height + 62
    return document(LEFT + WIDTH + 30, int(top) - 20, shapes)


def lanes_of(timeline: Timeline) -> list[tuple[int, str]]:
    """(rank, stream): of each rank what computes, sums, then copies out and in."""
    order = {COMPUTE: 0, SUMS: 1}
    found = {(span.rank, span.lane) for span in timeline.spans}
    return sorted(found, key=lambda lane: (lane[0], order.get(lane[1], 2), lane[1].startswith("in"), lane[1]))


def _panel(panel: Panel, timeline: Timeline, lanes: list[tuple[int, str]], times: Sequence[float]) -> list[str]:
    bottom = panel.top + panel.height
    sums, beside = timeline.of_sums()
    hidden = f", {beside / sums:.0%} of the sums beside parts that compute" if sums else ""
    layers = f"{timeline.num_layers} layers" if timeline.num_layers > 1 else "a layer"
    shapes = [text(LEFT, panel.top - 8, f"{timeline.kind}: {layers} in {timeline.us:,.0f} µs{hidden}")]
    for tick in times:
        shapes.append(line(panel.x(tick), panel.top, panel.x(tick), bottom))
        shapes.append(text(panel.x(tick), bottom + 15, f"{tick:,g}", "middle"))
    shapes.append(text(panel.left + panel.width, bottom + 30, "µs", "end"))
    for place, (rank, name) in enumerate(lanes):
        y = panel.top + LANE * place + (LANE - BAR) / 2
        shapes.append(text(LEFT - 8, y + BAR - 3, f"rank {rank} {name}", "end"))
        for span in timeline.spans:
            if (span.rank, span.lane) == (rank, name):
                shapes += _bar(panel.x(span.begin), panel.x(span.end), y, span)
    return shapes


def _bar(begin: float, end: float, y: float, span: Span) -> list[str]:
    width = max(end - begin - 0.4, 0.6)  # neighbours stay apart, and the shortest is seen
    is_light = span.part in (SUM, COPY)
    shade, color = ("0.35", "black") if is_light else ("0.90", "white")
    side = f'width="{width:.1f}" height="{BAR}"'
    told = f"<title>{span.part}, layer {span.layer}, {NAMES[span.half]}: {span.end - span.begin:,.0f} µs</title>"
    bar = (
        f'<rect x="{begin:.1f}" y="{y:.1f}" {side} fill="{HALF_COLORS[span.half]}" fill-opacity="{shade}">{told}</rect>'
    )
    if width < LETTER * len(span.part):
        return [bar]
    words = text((begin + end) / 2, y + BAR - 4, span.part, "middle", color)
    return [bar, words.replace("<text ", f'<text font-size="{SMALL}" ')]
