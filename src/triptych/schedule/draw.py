"""Timelines as characters, for the terminal. `svg.py` draws them for pages."""

from __future__ import annotations

from triptych.schedule.timeline import Span, Timeline, Work, microbatch_of, stage_of, work_of
from triptych.units import format_seconds

# One character for each chunk; from the fourth on they look alike.
_FILL = {
    Work.FORWARD: ">}])",
    Work.BACKWARD: "<{[(",
    Work.INPUT_GRADIENT: "ijkl",
    Work.WEIGHT_GRADIENT: "wxyz",
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

    A box starts with its micro-batch and is filled with the sort of work, for which each chunk of
    a rank has a character of its own.
    """
    head = len(f"rank {timeline.num_ranks - 1}  ")
    columns = max(8, width - head)
    per_s = _columns_per_s(timeline, columns)
    lines = [
        f"rank {rank}".ljust(head) + row[:columns]
        for rank, row in enumerate(_rows(timeline, per_s))
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


def _rows(timeline: Timeline, per_s: float) -> list[str]:
    """The ranks' boxes, each where it stands in time."""
    chunks, begin_s = timeline.chunk_of_stage, timeline.start_s
    width = round(timeline.makespan_s * per_s)
    cells = [[_IDLE] * width for _ in range(timeline.num_ranks)]
    for span in timeline.spans:
        start = round((span.start_s - begin_s) * per_s)
        stop = round((span.end_s - begin_s) * per_s)
        cells[span.rank][start:stop] = _box(span, chunks, stop - start)
    return ["".join(row) for row in cells]


def _box(span: Span, chunks: dict[int, int], columns: int) -> str:
    number, fill = microbatch_of(span.label), _fill(span.label, chunks)
    return number + fill * (columns - len(number)) if columns > len(number) else fill * columns


def _fill(label: str, chunks: dict[int, int]) -> str:
    """The character of a span: by its work and its chunk."""
    characters, stage = _FILL[work_of(label)], stage_of(label)
    chunk = chunks[stage] if stage is not None else 0
    return characters[min(chunk, len(characters) - 1)]


def _legend(timeline: Timeline) -> str:
    """Characters of the works that occur, chunk by chunk: `>} forward  <{ backward`."""
    chunks = timeline.chunk_of_stage
    used = {(work_of(span.label), _fill(span.label, chunks)) for span in timeline.spans}
    entries = []
    for work in Work:
        fills = "".join(c for c in _FILL[work] if (work, c) in used)
        entries += [f"{fills} {work}"] if fills else []
    many = ["(a character for each chunk)"] if max(chunks.values(), default=0) else []
    return "  ".join([*entries, *many, f"{_IDLE} idle"])
