"""Pictures as text: the few shapes of SVG that the plots of the course need. No font or size is left to chance.

A Panel is a frame on the page with a scale along each side; what is drawn in it is given in the units of the data.
Lengths are in pixels, y grows downwards. Numbers are written with one decimal (shades with two), so that a last bit
that differs between machines is not seen.

Source: W3C 2011, "Scalable Vector Graphics (SVG) 1.1".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#555555")  # told apart by the colour-blind too
Range = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Panel:
    """A frame, its left upper corner at (left, top), for data in x_range and y_range."""

    left: float
    top: float
    width: float
    height: float
    x_range: Range
    y_range: Range
    log_x: bool = False
    log_y: bool = False

    def x(self, value: float) -> float:
        return self.left + self.width * _share(value, self.x_range, self.log_x)

    def y(self, value: float) -> float:
        return self.top + self.height * (1 - _share(value, self.y_range, self.log_y))


def _share(value: float, limits: Range, is_log: bool) -> float:
    low, high = limits
    return math.log(value / low) / math.log(high / low) if is_log else (value - low) / (high - low)


def document(width: int, height: int, shapes: Iterable[str]) -> str:
    """The whole file: a white page with the shapes on it, one a line."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="12">'
    )
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *shapes, "</svg>", ""])


def text(x: float, y: float, words: str, anchor: str = "start", color: str = "black", turn: int = 0) -> str:
    """Words at a point; anchor: start, middle or end; turn: degrees, clockwise."""
    turned = f' transform="rotate({turn} {x:.1f} {y:.1f})"' if turn else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}"{turned}>{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, color: str = "#dddddd", dashed: bool = False) -> str:
    """A straight line between two points of the page."""
    dashes = ' stroke-dasharray="4 3"' if dashed else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}"{dashes}/>'


def square(x: float, y: float, size: float, shade: float, color: str = COLORS[0]) -> str:
    """A cell of a map: shade from 0, white, to 1."""
    side = f'width="{size:.1f}" height="{size:.1f}"'
    return f'<rect x="{x:.1f}" y="{y:.1f}" {side} fill="{color}" fill-opacity="{shade:.2f}"/>'


def dot(panel: Panel, x: float, y: float, color: str) -> str:
    """A filled circle at a point of the data."""
    return f'<circle cx="{panel.x(x):.1f}" cy="{panel.y(y):.1f}" r="4" fill="{color}"/>'


def curve(panel: Panel, xs: Sequence[float], ys: Sequence[float], color: str) -> str:
    """Straight lines from point to point."""
    points = " ".join(f"{panel.x(x):.1f},{panel.y(y):.1f}" for x, y in zip(xs, ys, strict=True))
    return f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.5"/>'


def frame(
    panel: Panel, title: str, x_label: str, y_label: str, x_ticks: Sequence[float], y_ticks: Sequence[float]
) -> list[str]:
    """The grid of a panel with its numbers, its title above, its labels below and on the left."""
    bottom, right = panel.top + panel.height, panel.left + panel.width
    shapes = []
    for tick in x_ticks:
        shapes.append(line(panel.x(tick), panel.top, panel.x(tick), bottom))
        shapes.append(text(panel.x(tick), bottom + 15, f"{tick:g}", "middle"))
    for tick in y_ticks:
        shapes.append(line(panel.left, panel.y(tick), right, panel.y(tick)))
        shapes.append(text(panel.left - 5, panel.y(tick) + 4, f"{tick:g}", "end"))
    shapes.append(text(panel.left, panel.top - 8, title))
    shapes.append(text(panel.left + panel.width / 2, bottom + 32, x_label, "middle"))
    shapes.append(text(panel.left - 48, panel.top + panel.height / 2, y_label, "middle", turn=-90))
    return shapes


def legend(x: float, y: float, names: Sequence[str]) -> list[str]:
    """The names one below the other, each in the colour of its place in the list."""
    return [text(x, y + 15 * place, name, color=COLORS[place]) for place, name in enumerate(names)]
