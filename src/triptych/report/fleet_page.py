"""A fleet as one self-contained HTML file: groups over time, attainment by model and by load."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup

from triptych.report.chart import Series, line_chart
from triptych.report.html import Figure, environment, write_page
from triptych.report.lanes import Lane, lanes_chart
from triptych.report.text import seconds, share

_COLOURS = ("train", "eval")


def write_fleet(document: Mapping[str, Any], out: Path) -> Path:
    """Writes the page of a fleet to `out` (folders are made); returns `out`."""
    return write_page(fleet_page(document), out)


def fleet_page(document: Mapping[str, Any]) -> str:
    """The page of a fleet, from the JSON document of `triptych place` or `simulate` --report."""
    groups = document["groups"]
    devices = sum(group["devices"] for group in groups)
    return (
        environment()
        .get_template("fleet.html.j2")
        .render(
            title=document["title"],
            subtitle=f"{len(document['models'])} models, {len(groups)} groups, {devices} devices",
            figures=_figures(document, devices),
            policies=_bars(document.get("attainment", {})),
            lanes=Markup(_lanes(document)),
            groups=groups,
            models=[_model_row(name, each) for name, each in document["models"].items()],
            charts=[Markup(chart) for chart in _charts(document["curves"])],
            reasons=_reasons(document.get("advice", {}).get("limits", {})),
            share=share,
        )
    )


def _figures(document: Mapping[str, Any], devices: int) -> list[Figure]:
    low, high = share(document["attainment_low"]), share(document["attainment_high"])
    in_time = share(document["attainment_of_all"])
    busy = sum(g["utilisation"] * g["devices"] for g in document["groups"]) / max(1, devices)
    figures = [
        Figure("in time", in_time, f"95 %: {low} to {high}"),
        Figure("requests", f"{document['requests']:,}", f"{seconds(document['duration_s'])}"),
        Figure("busy", share(busy), "slowest stages, mean over devices"),
    ]
    if advice := document.get("advice"):
        more, looser = advice["with_one_more_device"], advice["with_looser_objectives"]
        figures.append(Figure("one more device", share(more), "in time"))
        figures.append(Figure(f"objectives x {advice['looser']}", share(looser), "in time"))
    return figures


def _bars(shares: Mapping[str, float]) -> list[tuple[str, str, float]]:
    return [(name, share(value), 100 * value) for name, value in shares.items()]


def _model_row(name: str, each: Mapping[str, Any]) -> tuple[str, str, str, float, str, str]:
    return (
        name,
        f"{each['requests']:,}",
        share(each["attainment"]),
        100 * each["attainment"],
        seconds(each["latency_p50_s"]),
        seconds(each["latency_p99_s"]),
    )


def _reasons(limits: Mapping[str, str]) -> dict[str, list[str]]:
    """Models by what limits them."""
    found: dict[str, list[str]] = {}
    for name, why in limits.items():
        found.setdefault(why, []).append(name)
    return found


def _lanes(document: Mapping[str, Any]) -> str:
    named = [
        Lane(f"{index}  {group['shape']}  {share(group['utilisation'])}", shares)
        for index, (group, shares) in enumerate(
            zip(document["groups"], document["busy"], strict=True)
        )
    ]
    return lanes_chart("busy share of groups over time", named, document["duration_s"], width=1120)


def _charts(curves: Mapping[str, Mapping[str, list[tuple[float, float]]]]) -> list[str]:
    return [
        line_chart(
            f"by {across}",
            [
                Series(name, css, [(x, 100 * y) for x, y in points], has_dots=True, across=across)
                for css, (name, points) in zip(_COLOURS, lines.items(), strict=False)
            ],
            width=540,
            height=240,
        )
        for across, lines in curves.items()
    ]
