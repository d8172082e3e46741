"""Plans, predictions and runs as plain text tables.

Plain strings, no terminal library: these functions are loaded by every `triptych plan`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from textwrap import wrap
from typing import Any

from triptych.plan.plan import Plan
from triptych.report.advice import memory_advice
from triptych.report.compare import TIME_TERMS, Comparison, comparisons, measured, worded
from triptych.report.run import Run
from triptych.report.text import (
    bar,
    gib,
    number,
    per_second,
    plan_name,
    quantity,
    seconds,
    share,
    short_names,
    signed_error,
    table,
)

_BAR_WIDTH = 30


def plans_table(search: Mapping[str, Any]) -> str:
    """The ranked plans of a search with their figures and reasons, and what was rejected.

    `search` is the JSON document of `triptych plan`.
    """
    plans = search.get("plans") or []
    heading = ("#", "plan", "step", "tokens/s/GPU", "MFU", "memory", "bubble")
    common, names = short_names(plans)
    rows = [
        (str(index), name, *_figures(plan))
        for index, (name, plan) in enumerate(zip(names, plans, strict=True), start=1)
    ]
    parts = [table([heading, *rows], "><>>>>>")] if rows else ["no plan fits"]
    parts += [f"all of them: {common}"] if common else []
    reasons = [reason for index, plan in enumerate(plans, start=1) for reason in _why(index, plan)]
    parts += ["why:\n" + "\n".join(reasons)] if reasons else []
    return "\n\n".join([*parts, _searched(search)])


def _why(index: int, plan: Mapping[str, Any]) -> Iterator[str]:
    """The reason of a ranked plan, in lines of at most 100 characters."""
    unfit = "" if plan.get("fits", True) else "does not fit in memory; "
    if reason := unfit + (plan.get("reason") or ""):
        lines = wrap(reason, width=95)
        yield f"{index:>3}  {lines[0]}"
        yield from (f"     {line}" for line in lines[1:])


def _figures(prediction: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        seconds(prediction.get("step_time_s")) + _plus_minus(prediction),
        per_second(prediction.get("tokens_per_s_per_gpu")).removesuffix("/s"),
        share(prediction.get("mfu")),
        gib(prediction.get("peak_memory_gib")),
        share(prediction.get("bubble_fraction")),
    )


def _searched(search: Mapping[str, Any]) -> str:
    """How many plans there are, in what time, and what became of all but the first."""
    took = seconds(search.get("search_time_s"))
    legal, simulated = search.get("legal", 0), search.get("simulated", 0)
    illegal = {why: n for why, n in (search.get("rejected") or {}).items() if why != "memory"}
    lines = [
        f"{legal} legal plans in {took}: {simulated} simulated, the others passed over by a bound"
    ]
    by_count = sorted((search.get("bounds") or {}).items(), key=lambda item: -item[1])
    lines += [f"  {count} by {name}" for name, count in by_count if count]
    if spare := search.get("spare"):
        lines.insert(1, f"  a plan fits if {100 * spare:.1f} % of its peak are to spare")
    by_count = sorted(illegal.items(), key=lambda item: -item[1])
    lines += [f"  {count} sets of degrees rejected: {reason}" for reason, count in by_count]
    return "\n".join(lines)


def _plus_minus(prediction: Mapping[str, Any]) -> str:
    """Half of the range that holds 80 % of runs, in per cent."""
    low, high = prediction.get("step_time_low_s"), prediction.get("step_time_high_s")
    return f" ±{100 * (math.sqrt(high / low) - 1):.0f} %" if low and high else ""


def _bar(prediction: Mapping[str, Any]) -> str:
    """The range that holds 80 % of runs."""
    low, high = prediction.get("step_time_low_s"), prediction.get("step_time_high_s")
    return f"  ({seconds(low)} to {seconds(high)} in 80 % of runs)" if low and high else ""


def prediction_text(prediction: Mapping[str, Any]) -> str:
    """One prediction: the headline figures, step time by term and memory by term."""
    tables = _headline(prediction), time_table(prediction), memory_table(prediction)
    advice = "\n".join(wrap(memory_advice(prediction), width=95))
    return "\n\n".join(filter(None, (*tables, advice)))


def _headline(prediction: Mapping[str, Any]) -> str:
    fits = _fit(prediction)
    lines = (
        ("plan", plan_name(prediction)),
        ("step time", seconds(prediction.get("step_time_s")) + _bar(prediction)),
        ("tokens per GPU", per_second(prediction.get("tokens_per_s_per_gpu"))),
        ("model TFLOP/s per GPU", number(prediction.get("model_tflops_per_gpu"))),
        ("MFU, HFU", f"{share(prediction.get('mfu'))}, {share(prediction.get('hfu'))}"),
        ("bubble", share(prediction.get("bubble_fraction"))),
        ("peak memory", f"{gib(prediction.get('peak_memory_gib'))}, {fits}"),
    )
    return "\n".join(f"{name:<22} {value}" for name, value in lines)


def _fit(prediction: Mapping[str, Any]) -> str:
    """Whether the largest rank fits, and with how much to spare."""
    if not prediction.get("fits", True):
        return "DOES NOT FIT"
    spare, high = prediction.get("memory_spare"), prediction.get("peak_memory_high_gib")
    if spare is None:
        return "fits"
    note = "" if not high or high <= prediction["memory_limit_gib"] else ": within the error bar"
    return f"fits with {100 * spare:.1f} % to spare{note}"


def memory_table(prediction: Mapping[str, Any]) -> str:
    """Memory of the largest rank by term, with bars."""
    terms = prediction.get("memory_gib") or {}
    largest = max(terms.values(), default=0.0)
    rows = [
        (worded(name), gib(value), bar(value, largest, _BAR_WIDTH)) for name, value in terms.items()
    ]
    total = ("total", gib(prediction.get("peak_memory_gib", sum(terms.values()))), "")
    return table([("memory of the largest rank", "", ""), *rows, total], "<><")


def time_table(prediction: Mapping[str, Any]) -> str:
    """Step time by term, with bars; communication is what computing does not hide."""
    terms = prediction.get("time_s") or {}
    names = [name for name in (*TIME_TERMS, *sorted(set(terms) - set(TIME_TERMS))) if name in terms]
    largest = max(terms.values(), default=0.0)
    rows = [
        (worded(name), seconds(terms[name]), bar(terms[name], largest, _BAR_WIDTH))
        for name in names
    ]
    total = ("total", seconds(prediction.get("step_time_s", sum(terms.values()))), "")
    return table([("step time", "", ""), *rows, total], "<><")


def stages_table(plan: Plan) -> str:
    """Which layers each stage runs, and its degrees."""
    heading = ("stage", "layers", "count", "data", "tensor", "context", "expert")
    rows = [
        (
            str(index),
            f"{stage.start} to {stage.stop - 1}" if stage.num_layers else "none",
            *map(str, (stage.num_layers, stage.data, stage.tensor, stage.context, stage.expert)),
        )
        for index, stage in enumerate(plan.stages)
    ]
    return table([heading, *rows], "><>>>>>")


def comparison_table(run: Run) -> str:
    """Predicted beside measured; how many steps the medians are over."""
    heading = ("", "predicted", "measured", "difference")
    rows = [comparison_row(row) for row in comparisons(run)]
    steps = measured(run.steps).num_steps
    note = f"measured: median of {steps} steps after the warm-up" if steps else "no step measured"
    return table([heading, *rows], "<>>>") + "\n" + note


def comparison_row(row: Comparison) -> tuple[str, str, str, str]:
    """Name, predicted, measured and difference as text."""
    name = "  " * row.is_part + row.name
    predicted, actual = (quantity(value, row.unit) for value in (row.predicted, row.measured))
    return name, predicted, actual, signed_error(row)


def run_text(run: Run) -> str:
    """A whole run in the terminal: plan, losses, predicted beside measured, what is absent."""
    parts = [f"run {run.name}"]
    if run.plan:
        parts.append(f"plan {run.plan.short()}\n\n{stages_table(run.plan)}")
    parts += [_losses(run)] if run.steps else []
    parts.append(comparison_table(run))
    if run.absent:
        parts.append("\n".join(f"{name}: {reason}" for name, reason in run.absent.items()))
    return "\n\n".join(parts)


def _losses(run: Run) -> str:
    first, last = run.steps[0], run.steps[-1]
    lines = [
        f"loss {number(first.loss)} at step {first.step}, {number(last.loss)} at step {last.step}"
    ]
    if run.evaluations:
        first_eval, last_eval = run.evaluations[0], run.evaluations[-1]
        lines.append(
            f"held-out loss {number(first_eval.loss)} at step {first_eval.step}, "
            f"{number(last_eval.loss)} at step {last_eval.step}"
        )
    return "\n".join(lines)
