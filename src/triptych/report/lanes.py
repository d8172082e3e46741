"""How busy groups of devices are over time, as SVG: one lane each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from triptych.schedule.svg import tick_step

_LEFT, _RIGHT, _TOP, _BOTTOM = 118, 12, 6, 26
_HEIGHT, _GAP = 26, 6


class Lane(NamedTuple):
    """One group: busy shares of equal stretches of time."""

    name: str
    shares: Sequence[float]


def lanes_chart(title: str, lanes: Sequence[Lane], duration_s: float, *, width: int) -> str:
    """An SVG element with the lanes below each other over one axis of seconds; full height is 1."""
    height = _TOP + len(lanes) * (_HEIGHT + _GAP) + _BOTTOM
    parts = [
        f'<svg class="chart" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="100%" role="img" aria-label="{escape(title, quote=True)}">',
        *(part for row, lane in enumerate(lanes) for part in _lane(lane, row, width)),
        *_seconds(duration_s, width, height - _BOTTOM),
        "</svg>",
    ]
    return "\n".join(parts)


def _lane(lane: Lane, row: int, width: int) -> Iterator[str]:
    bottom = _TOP + row * (_HEIGHT + _GAP) + _HEIGHT
    yield (
        f'<rect class="lane" x="{_LEFT}" y="{bottom - _HEIGHT}" '
        f'width="{width - _LEFT - _RIGHT}" height="{_HEIGHT}"/>'
    )
    yield (
        f'<text class="tick" x="{_LEFT - 8}" y="{bottom - 8}" text-anchor="end">'
        f"{escape(lane.name)}</text>"
    )
    step = (width - _LEFT - _RIGHT) / max(1, len(lane.shares))
    path = [f"M{_LEFT},{bottom}"]
    for index, share in enumerate(lane.shares):
        path.append(f"V{bottom - _HEIGHT * min(1.0, share):.1f}H{_LEFT + (index + 1) * step:.1f}")
    yield f'<path class="busy" d="{"".join(path)}V{bottom}Z"/>'


def _seconds(duration_s: float, width: int, bottom: int) -> Iterator[str]:
    step, across = tick_step(duration_s, max(2, width // 110)), width - _LEFT - _RIGHT
    for index in range(int(duration_s / step + 1e-9) + 1):
        x = _LEFT + index * step / duration_s * across
        yield (
            f'<text class="tick" x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">'
            f"{index * step:g} s</text>"
        )
