"""A run, or a plan that has not run, as one self-contained HTML file.

No script and nothing from outside the file: it can be mailed, archived and opened anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from triptych.plan.plan import Plan, Stage
from triptych.report.advice import memory_advice
from triptych.report.chart import Series, line_chart
from triptych.report.compare import Comparison, comparisons, measured, worded
from triptych.report.planned import explained, memory_stacks, searched, traffic
from triptych.report.run import Run, Step
from triptych.report.terminal import comparison_row
from triptych.report.text import (
    ABSENT,
    gib,
    number,
    per_second,
    plan_name,
    seconds,
    share,
    short_names,
)
from triptych.schedule.svg import svg
from triptych.units import GIB, format_bytes

_SMALL_CHARTS: tuple[tuple[str, Callable[[Step], float | None]], ...] = (
    ("tokens per second", lambda step: step.tokens_per_s),
    ("gradient norm", lambda step: step.grad_norm),
    ("learning rate", lambda step: step.learning_rate),
)


class Figure(NamedTuple):
    """A headline number."""

    name: str
    value: str
    note: str


class Bar(NamedTuple):
    """A row of a bar chart: a second, thinner bar shows what was measured."""

    name: str
    value: str
    percent: float  # of the longest bar
    measured: str = ""
    measured_percent: float = 0.0


def write_report(run: Run, out: Path) -> Path:
    """Writes the page of a run to `out` (folders are made); returns `out`."""
    return write_page(html(run), out)


def write_page(page: str, out: Path) -> Path:
    """Writes a page to `out` (folders are made); returns `out`."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page, encoding="utf-8")
    return out


def html(run: Run) -> str:
    """The page of a run. What the run lacks is left out, and named at the end."""
    prediction, rows = run.prediction or {}, comparisons(run)
    return (
        environment()
        .get_template("report.html.j2")
        .render(
            run=run,
            subtitle=run.plan.short() if run.plan else plan_name(prediction).removesuffix(ABSENT),
            figures=_figures(run),
            stages=_stages(run.plan),
            settings=_settings(run.plan),
            memory=_memory_bars(run),
            memory_totals=_memory_totals(run),
            memory_advice=memory_advice(run.prediction or {}),
            times=_time_bars(rows),
            charts=_charts(run),
            comparisons=[(row, comparison_row(row)) for row in rows],
            num_measured=measured(run.steps).num_steps,
            timeline=_timeline(run),
            ranked=_ranked(run),
            search=searched(run.search),
            stacks=memory_stacks(prediction),
            traffic=traffic(prediction),
            explained=explained(run.search),
        )
    )


def environment() -> Environment:
    """Where the templates of pages are, and how they are read."""
    return Environment(
        loader=PackageLoader("triptych.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _figures(run: Run) -> list[Figure]:
    """The numbers that are read first; measured ones where there are any."""
    prediction, actual = run.prediction or {}, measured(run.steps)
    predicted_s = prediction.get("step_time_s")
    figures = [
        _figure("step time", seconds, actual.step_time_s, predicted_s),
        _speed(actual.tokens_per_s, prediction.get("tokens_per_s_per_gpu")),
        _figure(
            "peak memory",
            gib,
            actual.memory_bytes and actual.memory_bytes / GIB,
            prediction.get("peak_memory_gib"),
        ),
        _figure(
            "pipeline bubble",
            share,
            run.timeline.bubble_fraction if run.timeline and run.timeline.spans else None,
            prediction.get("bubble_fraction"),
        ),
        _figure("MFU", share, actual.mfu, prediction.get("mfu")),
        *_loss_figures(run),
    ]
    return [figure for figure in figures if figure.value != ABSENT]


def _figure(
    name: str, shown: Callable[[float | None], str], actual: float | None, predicted: float | None
) -> Figure:
    if actual is None:
        return Figure(name, shown(predicted), "predicted")
    return Figure(name, shown(actual), f"predicted {shown(predicted)}" if predicted else "measured")


def _speed(tokens_per_s: float | None, per_gpu: float | None) -> Figure:
    """The whole run's speed where it was measured, else the predicted one of each GPU."""
    if tokens_per_s is None:
        return Figure("tokens/s per GPU", per_second(per_gpu).removesuffix("/s"), "predicted")
    return Figure("tokens per second", per_second(tokens_per_s), "measured")


def _loss_figures(run: Run) -> list[Figure]:
    figures = []
    if run.evaluations:
        first, last = run.evaluations[0], run.evaluations[-1]
        note = f"{number(first.loss)} at step {first.step}"
        figures.append(Figure("held-out loss", number(last.loss), note))
    elif run.steps:
        note = f"{number(run.steps[0].loss)} at step {run.steps[0].step}"
        figures.append(Figure("training loss", number(run.steps[-1].loss), note))
    return figures


def _stages(plan: Plan | None) -> list[dict[str, Any]]:
    """A row for each run of stages that are alike."""
    stages = plan.stages if plan else ()
    most = max((stage.num_layers for stage in stages), default=1) or 1
    rows: list[dict[str, Any]] = []
    first = 0
    for (count, degrees), run in groupby(stages, _shape_of):
        alike = list(run)
        last = first + len(alike) - 1
        rows.append(
            {
                "stages": str(first) if first == last else f"{first} to {last}",
                "layers": _span(alike[0].start, alike[-1].stop),
                "count": count,
                "percent": 100 * count / most,
                "degrees": degrees,
            }
        )
        first = last + 1
    return rows


def _shape_of(stage: Stage) -> tuple[int, tuple[int, ...]]:
    """The number of its layers, and its degrees."""
    return stage.num_layers, (stage.data, stage.tensor, stage.context, stage.expert)


def _span(start: int, stop: int) -> str:
    if start == stop:
        return "none"
    return str(start) if stop - start == 1 else f"{start} to {stop - 1}"


def _settings(plan: Plan | None) -> list[tuple[str, str]]:
    if plan is None:
        return []
    precision = plan.precision
    return [
        ("ranks", str(plan.world_size)),
        ("ZeRO stage", str(plan.zero)),
        ("sequences in a micro-batch", str(plan.microbatch)),
        (
            "schedule",
            f"{plan.schedule}, {plan.chunks} chunks" if plan.chunks > 1 else plan.schedule,
        ),
        ("recompute", plan.recompute),
        ("sequence parallel", "yes" if plan.sequence_parallel else "no"),
        ("context ranks", f"{plan.cp}, {plan.context_method}" if plan.cp > 1 else "1"),
        ("parameters", precision.parameter),
        ("gradients", f"{precision.gradient}, reduced in {precision.reduction}"),
        ("master weights", precision.master),
        ("moments", precision.moments),
        ("gradient bucket", format_bytes(plan.bucket_bytes)),
        ("attention", plan.attention),
        ("rank order", plan.rank_order),
    ]


def _memory_bars(run: Run) -> list[Bar]:
    terms: Mapping[str, float] = (run.prediction or {}).get("memory_gib") or {}
    largest = max(terms.values(), default=0.0) or 1.0
    return [Bar(worded(name), gib(value), 100 * value / largest) for name, value in terms.items()]


def _memory_totals(run: Run) -> list[tuple[str, str]]:
    peak_bytes = measured(run.steps).memory_bytes
    rows = [("in all", gib((run.prediction or {}).get("peak_memory_gib")))]
    return rows + ([("measured peak", format_bytes(peak_bytes))] if peak_bytes else [])


def _time_bars(rows: Sequence[Comparison]) -> list[Bar]:
    """Step time by term, predicted and measured."""
    parts = [row for row in rows if row.is_part]
    largest = max((max(row.predicted or 0, row.measured or 0) for row in parts), default=0) or 1
    return [
        Bar(
            row.name,
            seconds(row.predicted),
            100 * (row.predicted or 0) / largest,
            seconds(row.measured),
            100 * (row.measured or 0) / largest,
        )
        for row in parts
    ]


def _charts(run: Run) -> list[Markup]:
    """The loss curve, wide; then small ones of what else each step has."""
    if not run.steps:
        return []
    curves = [Series("training", "train", [(step.step, step.loss) for step in run.steps])]
    held_out = [(evaluation.step, evaluation.loss) for evaluation in run.evaluations]
    curves.append(Series("held-out text", "eval", held_out, has_dots=True))
    charts = [line_chart("loss", curves, width=1120, height=320)]
    for title, value_of in _SMALL_CHARTS:
        points = [(step.step, y) for step in run.steps if (y := value_of(step)) is not None]
        if points:
            series = [Series(title, "train", points)]
            charts.append(line_chart(title, series, width=360, height=190))
    return [Markup(chart) for chart in charts]  # our own SVG; its texts are escaped


def _timeline(run: Run) -> Markup:
    """The predicted timeline above the recorded one, or the one there is."""
    predicted, recorded = run.predicted_timeline, run.timeline
    if recorded is not None and not recorded.spans:
        recorded = None
    title = f"one step of {run.plan.schedule}" if run.plan else "one step"
    if predicted and recorded:
        return Markup(svg(predicted, title, recorded=recorded))
    only = predicted or recorded
    if only is None:
        return Markup("")
    return Markup(svg(only, f"{title}, {'predicted' if predicted else 'recorded'}"))


def _ranked(run: Run) -> dict[str, Any]:
    """The ranked plans, and the settings that all of them share."""
    plans: Sequence[Mapping[str, Any]] = (run.search or {}).get("plans") or []
    common, names = short_names(plans)
    rows = [
        {
            "name": name,
            "step": seconds(plan.get("step_time_s")),
            "speed": per_second(plan.get("tokens_per_s_per_gpu")).removesuffix("/s"),
            "mfu": share(plan.get("mfu")),
            "memory": gib(plan.get("peak_memory_gib")),
            "bubble": share(plan.get("bubble_fraction")),
            "fits": plan.get("fits", True),
            "reason": plan.get("reason", ""),
        }
        for name, plan in zip(names, plans, strict=True)
    ]
    return {"rows": rows, "common": common}
