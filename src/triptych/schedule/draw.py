"""Timelines as characters, for the terminal. `svg.py` draws them for pages."""

from __future__ import annotations

from triptych.schedule.timeline import Span, Timeline, Work, microbatch_of, work_of
from triptych.units import format_seconds

_FILL = {
    Work.FORWARD: ">",
    Work.BACKWARD: "<",
    Work.INPUT_GRADIENT: "<",
    Work.WEIGHT_GRADIENT: "w",
    Work.WAITING: "~",
    Work.COMMUNICATION: "=",
    Work.OPTIMIZER: "#",
    Work.OTHER: "-",
}
_IDLE = "."


def draw_text(timeline: Timeline, width: int = 100) -> str:
    """One line a rank, time from left to right in at most `width` columns, and a legend.

    A timeline that is too long for that is cut at the right, and the last line says so.

        rank 0  0>1>....0<<<1<<<
        rank 1  ..0>0<<<1>1<<<..

    A box starts with its micro-batch and is filled with the sort of work.
    """
    head = len(f"rank {timeline.num_ranks - 1}  ")
    columns = max(8, width - head)
    per_s = _columns_per_s(timeline, columns)
    lines = [
        f"rank {rank}".ljust(head) + _row(timeline, rank, per_s)[:columns]
        for rank in range(timeline.num_ranks)
    ]
    notes = [_legend(timeline), f"one column = {format_seconds(1 / per_s)}"]
    if columns < round(timeline.makespan_s * per_s):
        shown, whole = format_seconds(columns / per_s), format_seconds(timeline.makespan_s)
        notes.append(f"(first {shown} of {whole})")
    return "\n".join([*lines, "   ".join(notes)])


def _columns_per_s(timeline: Timeline, columns: int) -> float:
    """Two columns for the usual short compute action where the whole then fits, else one.

    Whole columns keep equal actions equally wide.
    """
    durations_s: dict[Work, list[float]] = {}
    for span in timeline.compute.spans:
        durations_s.setdefault(work_of(span.label), []).append(span.duration_s)
    medians_s = [sorted(values)[len(values) // 2] for values in durations_s.values()]
    unit_s = min(medians_s, default=0.0) or timeline.makespan_s or 1.0
    return 2 / unit_s if 2 * timeline.makespan_s <= columns * unit_s else 1 / unit_s


def _row(timeline: Timeline, rank: int, per_s: float) -> str:
    cells = [_IDLE] * round(timeline.makespan_s * per_s)
    for span in timeline.spans:
        if span.rank == rank:
            start = round((span.start_s - timeline.start_s) * per_s)
            stop = round((span.end_s - timeline.start_s) * per_s)
            cells[start:stop] = _box(span, stop - start)
    return "".join(cells)


def _box(span: Span, columns: int) -> str:
    number, fill = microbatch_of(span.label), _FILL[work_of(span.label)]
    return number + fill * (columns - len(number)) if columns > len(number) else fill * columns


def _legend(timeline: Timeline) -> str:
    works = sorted({work_of(span.label) for span in timeline.spans}, key=list(Work).index)
    return "  ".join([f"{_FILL[work]} {work}" for work in works] + [f"{_IDLE} idle"])
