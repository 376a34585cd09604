"""The picture of a load report: TTFT and TPOT by rate, mean and 95th percentile."""

from __future__ import annotations

import math

from engine.bench.load_report import Report
from ref.svg import COLORS, Panel, curve, document, dot, frame, legend, line, text

WIDTH, HEIGHT = 800, 340
Points = list[tuple[float, float | None]]


def picture(report: Report) -> str:
    """Two panels over a common scale of rates; dashed: the limits, where they lie in the panel."""
    rows, settings = report.rows, report.settings
    seconds: list[Points] = [
        [(row.rate, None if ms is None else ms / 1e3) for row, ms in zip(rows, times, strict=True)]
        for times in ([row.ttft_mean for row in rows], [row.ttft_p95 for row in rows])
    ]
    ms: list[Points] = [[(row.rate, row.tpot_mean) for row in rows], [(row.rate, row.tpot_p95) for row in rows]]
    lengths = f"{settings.input_tokens} in + {settings.output_tokens} out"
    title = f"{report.model.get('id', '')}, {lengths}; {report.server.get('device', '')}".removesuffix("; ")
    return document(
        WIDTH,
        HEIGHT,
        [
            text(70, 24, title),
            *_panel(70, "time to first token", "s", seconds, settings.most_ttft_s, settings.rates),
            *_panel(470, "time per output token", "ms", ms, settings.most_tpot_ms, settings.rates),
        ],
    )


def _panel(
    left: float, title: str, unit: str, curves: list[Points], limit: float, rates: tuple[float, ...]
) -> list[str]:
    values = [value for points in curves for _, value in points if value is not None]
    top = max(values, default=1.0) * 1.15 or 1.0
    panel = Panel(left, 60, 300, 220, (min(rates) / 1.25, max(rates) * 1.25), (0, top), log_x=True)
    shapes = frame(panel, title, "requests a second", unit, rates, ticks(top))
    for points, color in zip(curves, COLORS, strict=False):
        known = sorted((rate, value) for rate, value in points if value is not None)
        shapes.append(curve(panel, [rate for rate, _ in known], [value for _, value in known], color))
        shapes += [dot(panel, rate, value, color) for rate, value in known]
    if limit <= top:
        shapes.append(line(left, panel.y(limit), left + panel.width, panel.y(limit), COLORS[4], dashed=True))
    return [*shapes, *legend(left + 10, 76, ("mean", "P95"))]


def ticks(top: float) -> list[float]:
    """From 0 to at most top, three to six, in steps of 1, 2 or 5 times a power of ten."""
    rough = top / 5
    power: float = 10.0 ** math.floor(math.log10(rough))
    step = next(step for step in (power, 2 * power, 5 * power, 10 * power) if step >= rough * 0.999)
    return [round(step * place, 10) for place in range(int(top / step * 1.001) + 1)]
