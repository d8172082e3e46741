"""Serving plans and predictions as plain text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from textwrap import wrap
from typing import Any

from triptych.report.text import bar, gib, number, per_second, seconds, table

_WIDTH = 30
STEP_TERMS = {
    "products": "products",
    "attention": "attention over the cache",
    "kernels": "other kernels",
    "tensor": "all-reduces",
    "head": "head and sampling",
    "host": "host",
}


def serving_table(document: Mapping[str, Any]) -> str:
    """The ranked plans with their figures and reasons, and what was rejected."""
    plans = document["plans"]
    heading, cells = serving_cells(document)
    rows = [(str(index), *row) for index, row in enumerate(cells, start=1)]
    parts = ["no plan meets the objectives"]
    if rows:
        parts = [table([("#", *heading), *rows], "><>>>>>>")]
    if rows:
        parts.append("\n".join(f"{plan['plan']['short']}" for plan in plans[:1]))
        parts.append(_listed("why", [f"{i:>3}  {p['reason']}" for i, p in enumerate(plans, 1)]))
    if document.get("binds"):
        parts.append(_listed("what limits plan 1", document["binds"]))
    if document.get("missing"):
        parts.append(
            _listed(f"nearest: {document['nearest']['plan']['short']}", document["missing"])
        )
    return "\n\n".join([*parts, _searched(document)])


def serving_cells(
    document: Mapping[str, Any],
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The heading and the rows of the ranked plans."""
    heading = ("plan", "TTFT", "TPOT", "tokens/s", "requests/s", "at once", "cache")
    return heading, [(_name(plan), *_figures(plan)) for plan in document["plans"]]


def _name(prediction: Mapping[str, Any]) -> str:
    plan = prediction["plan"]
    return f"tp={plan['tp']},pp={plan['pp']},replicas={plan['replicas']},batch={plan['batch']}"


def _figures(prediction: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        seconds(prediction["ttft_s"]),
        seconds(prediction["tpot_s"]),
        per_second(prediction["output_tokens_per_s"]).removesuffix("/s"),
        number(prediction["requests_per_s"], ".3g"),
        str(prediction["max_concurrency"]),
        gib(prediction["kv_cache_gib"]),
    )


def _listed(title: str, lines: list[str]) -> str:
    shown = []
    for line in lines:
        first, *rest = wrap(line, width=95, drop_whitespace=True) or [""]
        shown += [f"  {first}", *(f"    {more}" for more in rest)]
    return "\n".join([f"{title}:", *shown])


def _searched(document: Mapping[str, Any]) -> str:
    line = f"{document['candidates']} plans priced in {seconds(document['search_time_s'])}"
    return "\n".join(
        [line, *(f"  {count} rejected: {why}" for why, count in document["rejected"].items())]
    )


def serving_text(prediction: Mapping[str, Any]) -> str:
    """One serving prediction: headline figures, a step by term, memory by term."""
    fits = "fits" if prediction["fits"] else "DOES NOT FIT"
    lines = (
        ("plan", prediction["plan"]["short"]),
        ("first token", _with_bar(prediction, "ttft_s", seconds)),
        ("between tokens", _with_bar(prediction, "tpot_s", seconds)),
        ("tokens", _with_bar(prediction, "output_tokens_per_s", per_second)),
        ("requests", f"{number(prediction['requests_per_s'], '.3g')}/s"),
        ("most requests", f"{number(prediction['max_requests_per_s'], '.3g')}/s"),
        ("sequences at once", f"{prediction['max_concurrency']} at most"),
        ("memory", f"{gib(prediction['memory_limit_gib'])} a device, {fits}"),
    )
    headline = "\n".join(f"{name:<22} {value}" for name, value in lines)
    return "\n\n".join([headline, _step(prediction), _memory(prediction)])


def _with_bar(prediction: Mapping[str, Any], name: str, text: Callable[[float], str]) -> str:
    """A figure with the range that holds 80 % of runs."""
    ends = prediction.get("bars_80", {}).get(name)
    bar_ = f"  ({text(ends[0])} to {text(ends[1])} in 80 % of runs)" if ends else ""
    return text(prediction[name]) + bar_


def _step(prediction: Mapping[str, Any]) -> str:
    terms = prediction["step_s"]
    if not terms:
        return "no step: nothing fits beside the weights"
    largest = max(terms.values())
    rows = [(STEP_TERMS[k], seconds(v), bar(v, largest, _WIDTH)) for k, v in terms.items()]
    total = ("total", seconds(sum(terms.values())), "")
    title = "step of the slowest stage" if prediction["plan"]["pp"] > 1 else "step without prompts"
    return table([(title, "", ""), *rows, total], "<><")


def _memory(prediction: Mapping[str, Any]) -> str:
    terms = prediction["memory_gib"]
    largest = max(terms.values())
    rows = [(k.replace("_", " "), gib(v), bar(v, largest, _WIDTH)) for k, v in terms.items()]
    return table([("memory of a device", "", ""), *rows], "<><")
