"""Line charts as SVG: curves over optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from triptych.schedule.svg import tick_step
from triptych.units import format_count

MOST_POINTS = 1200
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 16, 30, 32


class Series(NamedTuple):
    """One curve."""

    name: str
    css: str  # class of the line or the dots: its colour
    points: Sequence[tuple[float, float]]  # (step, value); values that are no number are skipped
    has_dots: bool = False  # dots joined by a line, for few points
    across: str = "step"  # what x counts


class _Frame(NamedTuple):
    """Values -> pixels."""

    width: int
    height: int
    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def at(self, x: float, y: float) -> tuple[float, float]:
        across = (x - self.x_low) / (self.x_high - self.x_low)
        up = (y - self.y_low) / (self.y_high - self.y_low)
        return (
            _LEFT + across * (self.width - _LEFT - _RIGHT),
            self.height - _BOTTOM - up * (self.height - _TOP - _BOTTOM),
        )


def line_chart(title: str, series: Sequence[Series], *, width: int, height: int) -> str:
    """An SVG element with the curves, a legend if there are several, and axes at round numbers."""
    drawn = [one._replace(points=_thinned(one.points)) for one in series]
    drawn = [one for one in drawn if one.points]
    frame = _frame([point for one in drawn for point in one.points], width, height)
    parts = [
        f'<svg class="chart" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="100%" role="img" aria-label="{escape(title, quote=True)}">',
        f'<text class="head" x="0" y="14">{escape(title)}</text>',
        *_grid(frame),
        *(part for one in drawn for part in _curve(one, frame)),
        *(_legend(drawn, width) if len(drawn) > 1 else ()),
        "</svg>",
    ]
    return "\n".join(parts)


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most `MOST_POINTS` finite points; the last one stays."""
    finite = [point for point in points if math.isfinite(point[1])]
    stride = max(1, math.ceil(len(finite) / MOST_POINTS))
    return finite[::stride] + (finite[-1:] if (len(finite) - 1) % stride else [])


def _frame(points: Sequence[tuple[float, float]], width: int, height: int) -> _Frame:
    """Axes that hold all points, with a little air above and below."""
    x_low, x_high = _extent([x for x, _ in points], least=1.0)
    y_low, y_high = _extent([y for _, y in points])
    air = 0.06 * (y_high - y_low)
    bottom = max(0.0, y_low - air) if y_low >= 0 else y_low - air
    return _Frame(width, height, x_low, x_high, bottom, y_high + air)


def _extent(values: Sequence[float], least: float = 0.0) -> tuple[float, float]:
    low, high = min(values, default=0.0), max(values, default=1.0)
    return (low, high) if high > low else (low, low + (least or abs(low) * 0.1 or 1.0))


def _grid(frame: _Frame) -> Iterator[str]:
    right, bottom = frame.width - _RIGHT, frame.height - _BOTTOM
    step = tick_step(frame.y_high - frame.y_low, max(2, frame.height // 50))
    for value, text in _ticks(frame.y_low, frame.y_high, step):
        _, y = frame.at(frame.x_low, value)
        yield f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text class="tick" x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{text}</text>'
    whole = max(1.0, tick_step(frame.x_high - frame.x_low, max(2, frame.width // 110)))
    for value, text in _ticks(frame.x_low, frame.x_high, whole):
        x, _ = frame.at(value, frame.y_low)
        yield f'<text class="tick" x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{text}</text>'
    yield f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>'


def _ticks(low: float, high: float, step: float) -> Iterator[tuple[float, str]]:
    """Multiples of a step between two values, with their text: `0.002`, `40k`."""
    first = math.ceil(low / step - 1e-9)
    for index in range(first, math.floor(high / step + 1e-9) + 1):
        yield index * step, _tick_text(index * step, step)


def _tick_text(value: float, step: float) -> str:
    if value == 0:
        return "0"
    if abs(value) >= 1e4:
        return format_count(value)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return f"{value:.{decimals}f}" if decimals <= 4 else f"{value:.1e}"


def _curve(series: Series, frame: _Frame) -> Iterator[str]:
    places = [frame.at(*point) for point in series.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    if len(places) > 1:
        yield f'<polyline class="line {series.css}" points="{path}"/>'
    if series.has_dots or len(places) == 1:
        for (x, y), (step, value) in zip(places, series.points, strict=True):
            hover = f"{series.name} {value:.4g} at {series.across} {step:g}"
            yield (
                f'<circle class="dot {series.css}" cx="{x:.1f}" cy="{y:.1f}" r="3.5">'
                f"<title>{escape(hover)}</title></circle>"
            )


def _legend(series: Sequence[Series], width: int) -> Iterator[str]:
    x = float(width - _RIGHT)
    for one in reversed(series):
        x -= 7.5 * len(one.name)
        yield f'<text class="tick" x="{x:.0f}" y="14">{escape(one.name)}</text>'
        yield f'<rect class="dot {one.css}" x="{x - 20:.0f}" y="5" width="14" height="10" rx="2"/>'
        x -= 40
