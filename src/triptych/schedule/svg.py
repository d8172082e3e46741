"""Timelines as SVG: one row a rank, a box an action, seconds below; light and dark.

The drawing has no script and no outside resource, and stands alone or inside an HTML page.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from triptych.schedule.timeline import Span, Timeline, Work, microbatch_of, stage_of, work_of
from triptych.units import format_seconds

WIDTH = 1120
_LEFT, _RIGHT = 64, 16
_ROW_GAP = 4
_TITLE_HEIGHT, _HEAD_HEIGHT, _AXIS_HEIGHT, _LEGEND_HEIGHT = 30, 24, 34, 26
_MOST_STRIPES = 5
_MOST_HOVER_TEXTS = 4000  # beyond, boxes carry none: the file would grow past a few megabytes

# Boxes of a rank's second, third, ... chunk have one, two, ... stripes.
# Forward and backward differ in lightness too, so that they can be told apart without colour.
STYLE = """
.tl{font:12px system-ui,sans-serif;color-scheme:light dark;
--ink:#1d2433;--soft:#667085;--lane:#eef0f4;--grid:#d5d9e2;
--forward:#8fb8f0;--backward:#2f5fb3;--input:#0f7f86;--weight:#8a5fc4;--comm:#e0a33a;--waiting:#f5e3c0;
--optimizer:#3f9d78;--other:#9aa3b2;--on-forward:#12233f;--on-backward:#ffffff}
@media (prefers-color-scheme:dark){.tl{
--ink:#e6e9f0;--soft:#98a2b3;--lane:#262b36;--grid:#3b4252;
--forward:#8fb8f0;--backward:#3a6fca;--input:#17868d;--weight:#8f66c9;--comm:#d79a34;--waiting:#463a24;
--optimizer:#4bae88;--other:#7d8698}}
.tl text{fill:var(--ink)}.tl .soft{fill:var(--soft)}.tl .title{font-size:14px;font-weight:600}
.tl .lane{fill:var(--lane)}.tl .grid{stroke:var(--grid);stroke-width:1}
.tl .forward{fill:var(--forward)}.tl .backward{fill:var(--backward)}
.tl .input-gradient{fill:var(--input)}.tl .weight-gradient{fill:var(--weight)}
.tl .communication{fill:var(--comm)}.tl .waiting-for-a-stage{fill:var(--waiting)}
.tl .optimizer{fill:var(--optimizer)}
.tl .other{fill:var(--other)}
.tl .on{fill:var(--on-backward);font-size:11px;text-anchor:middle;pointer-events:none}
.tl .on.forward{fill:var(--on-forward)}
.tl .stripes{stroke:var(--on-backward);stroke-width:1.6;fill:none;pointer-events:none}
.tl .stripes.forward{stroke:var(--on-forward)}
""".strip()


class _Panel(NamedTuple):
    """One timeline in the drawing."""

    head: str
    timeline: Timeline
    top: float  # y of the first row


class _Scale(NamedTuple):
    """Seconds from the start of a timeline -> x."""

    end_s: float
    row_height: float

    def x(self, offset_s: float) -> float:
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * offset_s / self.end_s


def svg(timeline: Timeline, title: str, *, recorded: Timeline | None = None) -> str:
    """An SVG element with the timeline; with `recorded` below it on the same time axis.

    Each timeline starts at the left edge. Numbers in the boxes are micro-batches; hovering names
    the action and its seconds.
    """
    most_ranks = max(timeline.num_ranks, recorded.num_ranks if recorded else 1)
    end_s = max(timeline.makespan_s, recorded.makespan_s if recorded else 0.0) or 1.0
    scale = _Scale(end_s, 26 if most_ranks <= 8 else 18)
    panels = list(_stacked(timeline, recorded, scale))
    bottom = _bottom(panels[-1], scale)
    height = bottom + _AXIS_HEIGHT + _LEGEND_HEIGHT
    parts = [
        f'<svg class="tl" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" '
        f'width="100%" role="img" aria-label="{escape(title, quote=True)}">',
        f"<style>{STYLE}</style>",
        f'<text class="title" x="0" y="18">{escape(title)}</text>',
        *_axis(scale, _TITLE_HEIGHT, bottom),
        *(part for panel in panels for part in _draw_panel(panel, scale)),
        *_legend(panels, bottom + _AXIS_HEIGHT + 12),
        "</svg>",
    ]
    return "\n".join(parts)


def _stacked(timeline: Timeline, recorded: Timeline | None, scale: _Scale) -> Iterator[_Panel]:
    """The panels from top to bottom; a single one needs no heading."""
    if recorded is None:
        yield _Panel("", timeline, _TITLE_HEIGHT)
        return
    first = _Panel(_heading("predicted", timeline), timeline, _TITLE_HEIGHT + _HEAD_HEIGHT)
    yield first
    top = _bottom(first, scale) + 8 + _HEAD_HEIGHT
    yield _Panel(_heading("recorded", recorded), recorded, top)


def _heading(name: str, timeline: Timeline) -> str:
    return f"{name}: {format_seconds(timeline.makespan_s)}, bubble {timeline.bubble_fraction:.1%}"


def _bottom(panel: _Panel, scale: _Scale) -> float:
    return panel.top + panel.timeline.num_ranks * (scale.row_height + _ROW_GAP)


def _draw_panel(panel: _Panel, scale: _Scale) -> Iterator[str]:
    timeline = panel.timeline
    if panel.head:
        yield f'<text x="0" y="{panel.top - 8:.0f}" font-weight="600">{escape(panel.head)}</text>'
    for rank in range(timeline.num_ranks):
        y = _row_y(panel, rank, scale)
        middle = y + scale.row_height / 2 + 4
        yield f'<text class="soft" x="0" y="{middle:.1f}">rank {rank}</text>'
        width = scale.x(timeline.makespan_s) - _LEFT
        yield f'<rect class="lane" x="{_LEFT}" y="{y:.1f}" width="{width:.1f}" {_tall(scale)}/>'
    has_hover = len(timeline.spans) <= _MOST_HOVER_TEXTS
    digits = max((len(microbatch_of(span.label)) for span in timeline.spans), default=0)
    for span in timeline.spans:
        yield from _draw_span(span, panel, scale, has_hover, numbers_from=7 * digits + 3)
    yield from _stripes(panel, scale)


def _stripes(panel: _Panel, scale: _Scale) -> Iterator[str]:
    """One path for the stripes on forwards, one for those on other boxes."""
    timeline, chunks = panel.timeline, panel.timeline.chunk_of_stage
    lines: dict[bool, list[str]] = {True: [], False: []}
    for span in timeline.spans:
        stage = stage_of(span.label)
        left, right = _edges(span, timeline, scale)
        is_forward = work_of(span.label) is Work.FORWARD
        for number in range(min(chunks[stage], _MOST_STRIPES) if stage is not None else 0):
            y = _row_y(panel, span.rank, scale) + 3.5 + 3 * number
            lines[is_forward].append(f"M{left:.1f} {y:.1f}H{right:.1f}")
    for is_forward, drawn in lines.items():
        if drawn:
            css = "stripes forward" if is_forward else "stripes"
            yield f'<path class="{css}" d="{"".join(drawn)}"/>'


def _edges(span: Span, timeline: Timeline, scale: _Scale) -> tuple[float, float]:
    """Left and right of a box; a hairline of background keeps neighbours apart if there is room."""
    left, right = (scale.x(t - timeline.start_s) for t in (span.start_s, span.end_s))
    return left, max(right - (1 if right - left > 4 else 0), left + 0.3)


def _row_y(panel: _Panel, rank: int, scale: _Scale) -> float:
    return panel.top + rank * (scale.row_height + _ROW_GAP)


def _tall(scale: _Scale) -> str:
    return f'height="{scale.row_height:g}" rx="2"'


def _draw_span(
    span: Span, panel: _Panel, scale: _Scale, has_hover: bool, numbers_from: float
) -> Iterator[str]:
    """The box, and its micro-batch if it is at least `numbers_from` wide."""
    start_s, end_s = (t - panel.timeline.start_s for t in (span.start_s, span.end_s))
    left, right = _edges(span, panel.timeline, scale)
    width = right - left
    y = _row_y(panel, span.rank, scale)
    css = work_of(span.label).replace(" ", "-")
    box = f'<rect class="{css}" x="{left:.1f}" y="{y:.1f}" width="{width:.1f}" {_tall(scale)}'
    hover = f"{span.label} on rank {span.rank}: {start_s:.4g} to {end_s:.4g} s"
    yield f"{box}><title>{escape(hover)}</title></rect>" if has_hover else f"{box}/>"
    number = microbatch_of(span.label)
    if number and width > numbers_from:
        middle_x, middle_y = left + width / 2, y + scale.row_height / 2 + 4
        yield f'<text class="on {css}" x="{middle_x:.1f}" y="{middle_y:.1f}">{number}</text>'


def _axis(scale: _Scale, top: float, bottom: float) -> Iterator[str]:
    step_s = tick_step(scale.end_s, 8)
    decimals = max(0, -math.floor(math.log10(step_s)))
    for number in range(math.floor(scale.end_s / step_s + 1e-9) + 1):
        x = scale.x(number * step_s)
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom + 4:.1f}"/>'
        unit = " s" if number == 0 else ""
        yield (
            f'<text class="soft" x="{x:.1f}" y="{bottom + 20:.1f}" text-anchor="middle">'
            f"{number * step_s:.{decimals}f}{unit}</text>"
        )


def tick_step(extent: float, most: int) -> float:
    """The smallest of 1, 2, 5 x 10^k that divides an extent > 0 into at most `most` steps."""
    least = extent / most
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def _legend(panels: Sequence[_Panel], y: float) -> Iterator[str]:
    present = {work_of(span.label) for panel in panels for span in panel.timeline.spans}
    entries = [(work.value, work.value.replace(" ", "-")) for work in Work if work in present]
    x = float(_LEFT)
    for name, css in [*entries, ("idle", "lane")]:
        yield f'<rect class="{css}" x="{x:.0f}" y="{y - 10:.0f}" width="14" height="12" rx="2"/>'
        yield f'<text class="soft" x="{x + 20:.0f}" y="{y:.0f}">{name}</text>'
        x += 34 + 7 * len(name)
    chunks = max((c for p in panels for c in p.timeline.chunk_of_stage.values()), default=0)
    if chunks:
        many = "no stripe: first chunk, one: second" + (", and so on" if chunks > 1 else "")
        yield f'<text class="soft" x="{x:.0f}" y="{y:.0f}">{many}</text>'
